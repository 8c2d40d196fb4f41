"""Loops, branches, subgraph calls and parallel regions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maxport.engine.evaluator.call import Call, op


@op("while")
def while_(call: Call, *carried: torch.Tensor) -> Sequence[torch.Tensor]:
    """Run the body until the condition block says no; its first output is the condition."""
    condition, body = call.node.blocks
    state = list(carried)
    while True:
        test, *state = call.frame.run(condition, _with_chains(condition.specs, state))
        if not bool(test):
            return state
        state = call.frame.run(body, _with_chains(body.specs, state))


@op("if")
def if_(call: Call, condition: torch.Tensor) -> Sequence[torch.Tensor]:
    """Run one of two blocks."""
    then, other = call.node.blocks
    return call.frame.run(then if bool(condition) else other, [])


@op("call")
def call_(call: Call, *arguments: torch.Tensor) -> Sequence[torch.Tensor]:
    """Run a subgraph; `prefix` completes the names of the weights inside it."""
    return call.frame.call(call.attribute("callee"), call.attribute("prefix"), arguments)


def _with_chains(
    specs: Sequence[object | None], values: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Values in a block's argument order, None in the places of chains."""
    given = iter(values)
    return [None if spec is None else next(given) for spec in specs]
