"""One wall: what a model needs, what this MAX lacks for it, and what can be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["stop", "review"]


@dataclass(frozen=True)
class Wall:
    """A reason not to port, or to think first.

    Attributes:
        level: "stop": a port cannot work; "review": it can, within limits that need a decision.
        kind: Short category ("weights", "quantization", "memory").
        need: What the model needs, with where that was read.
        lack: What MAX, the device or the checkpoint lacks, with where that was read.
        fix: What to do.
    """

    level: Level
    kind: str
    need: str
    lack: str
    fix: str
