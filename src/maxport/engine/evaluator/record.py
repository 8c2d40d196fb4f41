"""Keep the values of chosen ops of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from maxport.engine.evaluator.decode import Node


class Recording:
    """Pass as `record=`; afterwards `values` holds what was asked for, in order of execution.

    Args:
        names: Op kinds or kernel symbols to keep (`matmul`, `mo.mha.ragged.paged`).
        modules: Module paths to keep; everything below a path counts.
        indices: Op numbers to keep.

    With no arguments every op is kept.
    """

    def __init__(
        self,
        *,
        names: Collection[str] = (),
        modules: Collection[str] = (),
        indices: Collection[int] = (),
    ) -> None:
        self._names, self._modules, self._indices = set(names), tuple(modules), set(indices)
        self.values: list[tuple[Node, list[torch.Tensor]]] = []

    def __call__(self, node: Node, results: Sequence[torch.Tensor]) -> None:
        """Keep a copy of `results` if the op was asked for."""
        if self._wants(node):
            self.values.append((node, [result.clone() for result in results]))

    def _wants(self, node: Node) -> bool:
        if not (self._names or self._modules or self._indices):
            return True
        below = any(node.module == m or node.module.startswith(f"{m}.") for m in self._modules)
        return below or node.index in self._indices or node.name in self._names
