"""Docstrings and comments of emitted code, wrapped to the emitted code's line length."""

from __future__ import annotations

import textwrap

#: Line length of emitted code.
WIDTH = 100


def docstring(text: str, *, indent: int = 0) -> str:
    """`text` as a docstring whose lines fit at the given indent; the first line is not indented."""
    text = " ".join(text.split())
    if len(text) + 6 + indent <= WIDTH:
        return f'"""{text}"""'
    lines = textwrap.wrap(text, WIDTH - indent - 6)
    return '"""' + "\n".join(lines) + '\n"""'


def comment(text: str, *, indent: int = 0) -> str:
    """`text` as whole comment lines, each ending in a line feed."""
    pad = " " * indent
    lines = textwrap.wrap(" ".join(text.split()), WIDTH - indent - 2)
    return "".join(f"{pad}# {line}\n" for line in lines)
