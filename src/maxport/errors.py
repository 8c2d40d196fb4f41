"""The one error type that reaches a user: what is wrong, where, and what to do."""

from __future__ import annotations


class MaxportError(Exception):
    """An expected failure, printed without a traceback.

    Args:
        what: What is wrong, one sentence without a trailing full stop.
        where: File, tensor, config key or line it was found at; empty if there is none.
        fix: What the user can do about it; empty if nothing can be done.
        code: The process's exit code (2 for bad input, 1 for a negative verdict).
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", code: int = 2) -> None:
        self.what, self.where, self.fix, self.code = what, where, fix, code
        super().__init__(str(self))

    def __str__(self) -> str:
        """All three parts on one line, for logs and tests."""
        where = f" ({self.where})" if self.where else ""
        fix = f". To fix: {self.fix}" if self.fix else ""
        return f"{self.what}{where}{fix}"
