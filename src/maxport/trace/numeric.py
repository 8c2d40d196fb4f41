"""Run part of a traced model on chosen inputs, in float64: the ground truth of every idiom."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from maxport.trace.capture import LENGTH, Traced

_LOW = {torch.float16, torch.bfloat16, torch.float32}
_SKIPPED = ("aten._assert_tensor_metadata", "aten._assert_scalar")


class TracedValues:
    """Values of a traced program's nodes for given values of other nodes, all floats in float64.

    Weights are the twin's own; `tokens` and `positions` are the example's unless fed.
    """

    def __init__(self, traced: Traced, aliases: Mapping[str, list[str]]) -> None:
        program, self.batch = traced.program, traced.batch
        self.aliases = aliases
        self.nodes = {node.name: node for node in program.graph.nodes}
        signature = program.graph_signature
        tensors = {**program.state_dict, **program.constants, **traced.buffers}
        names = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        self.fixed = {name: self._wide(tensors[fqn].detach()) for name, fqn in names.items()}
        self.params = {fqn.removeprefix("model."): self.fixed[name] for name, fqn in names.items()}
        self.length = LENGTH

    @staticmethod
    def _wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.dtype in _LOW else tensor

    def param(self, fqn: str) -> np.ndarray:
        """A parameter, buffer or constant by its IR name, float64."""
        array: np.ndarray = self.params[fqn].numpy()
        return array

    def run(self, target: str, feeds: Mapping[str, Any], part: int | None = None) -> np.ndarray:
        """The value of node `target` when the nodes in `feeds` have the given values.

        Args:
            target: IR node name.
            feeds: Arrays by IR node name, or a dict of arrays by part where the node has several
                results; their token axis must be `LENGTH` long.
            part: Which result, where the node has several.
        """
        rename = {"tokens": "input_ids", "positions": "position_ids"}
        env: dict[torch.fx.Node, Any] = {}
        same = {n: a for name, a in feeds.items() for n in [name, *self.aliases.get(name, [])]}
        for name, array in same.items():
            node = self.nodes.get(rename.get(name, name))
            if isinstance(array, dict):
                env[node] = {k: self._wide(torch.as_tensor(v)) for k, v in array.items()}
            elif node is not None:
                env[node] = self._wide(torch.as_tensor(array))
        with torch.no_grad():
            result = self._value(self.nodes[rename.get(target, target)], env)
        result = result if part is None else result[part]
        return np.asarray(result.numpy())

    def _value(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        stack = [node]
        while stack:
            top = stack[-1]
            if top in env:
                stack.pop()
                continue
            missing = [n for n in top.all_input_nodes if n not in env and not self._known(n)]
            if top.op == "call_function" and missing:
                stack += missing
                continue
            env[top] = self._compute(top, env)
            stack.pop()
        return env[node]

    def _known(self, node: torch.fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.SymInt)

    def _compute(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            if node.name not in self.fixed:
                raise KeyError(f"{node.name} must be fed")
            return self.fixed[node.name]
        name = str(node.target)
        if name.startswith(_SKIPPED):
            return None
        args = [self._arg(a, env) for a in node.args]
        kwargs = {k: self._arg(v, env) for k, v in node.kwargs.items()}
        kwargs.pop("device", None)
        if node.target is operator.getitem:
            return args[0][args[1]]
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._wide(result) if isinstance(result, torch.Tensor) else result

    def _arg(self, arg: Any, env: dict[torch.fx.Node, Any]) -> Any:
        if isinstance(arg, torch.fx.Node):
            value = arg.meta.get("val")
            if isinstance(value, torch.SymInt):
                expr = value.node.expr
                return int(expr.subs({s: self.length for s in expr.free_symbols}))
            return env[arg]
        if isinstance(arg, list | tuple):
            return type(arg)(self._arg(a, env) for a in arg)
        if arg in _LOW:
            return torch.float64
        return arg
