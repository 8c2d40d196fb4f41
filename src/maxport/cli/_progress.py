"""A line on stderr that says what is being done, on a terminal and once it takes over 2 s."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(after: float = 2.0) -> Iterator[Callable[[str], None]]:
    """A function to call with a few words; shows nothing where stderr is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        status = console.status("")
        shown = False

        def say(text: str) -> None:
            nonlocal shown
            if not shown and time.monotonic() - begun >= after:
                stack.enter_context(status)
                shown = True
            status.update(text)

        yield say
