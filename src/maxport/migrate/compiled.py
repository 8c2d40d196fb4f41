"""The last proof of a migration: both packages compiled by MAX and run on the device.

    python -m maxport.migrate.compiled TARGET PACKAGE     reads [class name, twin] from stdin

Both graphs go into one compile. They see the same weights and prompts; then each generates greedily
from its own logits, so that a difference anywhere would lead the tokens apart.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maxport.errors import MaxportError

PROMPTS: Mapping[int, Sequence[int]] = {0: (3, 5, 7, 11, 13), 1: (2, 4)}


@dataclass(frozen=True)
class CompiledProof:
    """Logits and greedy tokens of both compiled graphs.

    Attributes:
        max_diff: Largest difference of logits, over the prompts and all steps.
        largest: Largest logit.
        tokens: Per sequence, what V2 and V3 generated.
    """

    max_diff: float
    largest: float
    tokens: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def equal(self) -> bool:
        """Same tokens, and logits within 1e-5 of the largest."""
        same = all(first == second for first, second in self.tokens)
        return same and self.max_diff <= 1e-5 * max(self.largest, 1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {**asdict(self), "equal": self.equal}


def compile_and_compare(
    class_name: str, package: Path, twin: Path, *, architecture: Any = None, steps: int = 8
) -> CompiledProof:
    """Compile V2's graph and the migrated package's, run both on the CPU and compare.

    Args:
        class_name: Registered decoder, e.g. `LlamaForCausalLM`.
        package: Folder of the migrated package.
        twin: Tiny checkpoint of that class.
        architecture: V2's registration, where MAX would not find it by name.
        steps: Tokens to generate for each prompt.

    Raises:
        MaxportError: a graph does not build or compile.
    """
    from maxport.engine.build import build_native, build_port
    from maxport.engine.compile import compile_graphs

    same: dict[str, Any] = {"return_logits": "all", "max_length": 128}
    old = build_native(class_name, twin, lane="v2", architecture=architecture, **same)
    new = build_port(package, twin, **same)
    return compare_runners(*compile_graphs([old, new]), steps=steps)


def compare_runners(first: Any, second: Any, *, steps: int = 8) -> CompiledProof:
    """Run two runners (see `engine.runner.Runner`) side by side from the same prompts."""
    batches = [dict(PROMPTS), dict(PROMPTS)]
    tokens: list[list[list[int]]] = [[[], []] for _ in PROMPTS]
    worst = largest = 0.0
    together = True
    for _ in range(steps):
        found = [first.step(batches[0]), second.step(batches[1])]
        for key in PROMPTS:
            left, right = found[0][key], found[1][key]
            if together:  # after a different token, logits say nothing more
                worst = max(worst, float(abs(left - right).max()))
                largest = max(largest, float(abs(left).max()))
            for side, logits in enumerate((left, right)):
                tokens[key][side].append(int(logits[-1].argmax()))
        batches = [{key: [tokens[key][side][-1]] for key in PROMPTS} for side in (0, 1)]
        together = together and batches[0] == batches[1]
    return CompiledProof(worst, largest, tuple((tuple(pair[0]), tuple(pair[1])) for pair in tokens))


def main() -> int:
    """Wait for a task on stdin, compile, run, print the report; see `proving`."""
    target_path, package = sys.argv[1:3]
    task = sys.stdin.read()
    if not task:
        return 1
    class_name, twin = json.loads(task)
    from contextlib import nullcontext

    from maxport.engine import lanes
    from maxport.migrate.kinds import Kinds
    from maxport.migrate.prove import architecture_of
    from maxport.migrate.target import open_target

    target = open_target(target_path)
    try:
        with nullcontext() if target.installed else lanes.placed(target.package, target.folder):
            architecture = architecture_of(Kinds(target.sources), target, class_name)
            found = compile_and_compare(
                class_name, Path(package), Path(twin), architecture=architecture
            )
    except MaxportError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found.to_json()), flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # MAX's teardown takes seconds and may hang
