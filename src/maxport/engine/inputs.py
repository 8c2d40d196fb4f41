"""What each input and output of a built graph holds, from its types and cache parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxport.errors import MaxportError

#: Per-batch inputs by (dtype, first dim's name), as MAX's batch processors declare them
#: (max/pipelines/lib/interfaces/batch_processor.py, ragged_batch_inputs).
_BATCH_INPUTS = {
    "total_seq_len": "tokens",
    "input_row_offsets_len": "row_offsets",
    "return_n_logits": "return_n_logits",
}


@dataclass(frozen=True)
class Role:
    """What one graph input holds.

    Attributes:
        name: `tokens`, `row_offsets`, `kv_blocks`, `lookup_table`, `signal`, ...
        group: Cache group the input belongs to; empty for the only group and for batch inputs.
        device: Index of the device the input is for.
        dtype: MAX's dtype name.
        shape: Static sizes, None where the size is only known with the batch.
        on_host: Whether the graph reads it on the CPU, also when the model runs on a GPU.
    """

    name: str
    group: str
    device: int
    dtype: str
    shape: tuple[int | None, ...]
    on_host: bool = False

    def __str__(self) -> str:
        """`group/device/name`, as short as it stays clear."""
        return "/".join([*([self.group] if self.group else []), str(self.device), self.name])


def input_roles(graph: Any, kv_params: Any) -> tuple[Role, ...]:
    """Role of every input of `graph`, in graph order.

    Raises:
        MaxportError: An input is neither a batch input, a signal buffer nor a cache leaf.
    """
    types = [value.type for value in graph.inputs]
    leaves = list(cache_leaves(kv_params)) if kv_params is not None else []
    start = _find([_key(kind) for kind in types], [_key(kind) for _, _, _, kind in leaves])
    if start is None:
        raise MaxportError("the graph's inputs lack the cache inputs its parameters declare")
    roles: list[Role] = []
    for index, kind in enumerate(types):
        if start <= index < start + len(leaves):
            group, device, name, _ = leaves[index - start]
        else:
            group, device, name = "", _device_index(kind), _batch_role(kind)
        on_host = bool(kind.device.is_cpu())
        roles.append(Role(name, group, device, kind.dtype.name, _static(kind), on_host))
    return tuple(roles)


def output_names(named: tuple[str, ...] | None, graph: Any, return_logits: str) -> tuple[str, ...]:
    """Names of the graph's outputs: `named` where ModuleV3 names them, else MAX's fixed order."""
    if named:
        return named
    count = len(graph.output_types)
    fixed = ("next_token_logits", "logits", "logit_offsets", "hidden_states")
    if return_logits == "last" and count == 2:
        return ("next_token_logits", "hidden_states")
    return tuple(fixed[i] if i < len(fixed) else f"output_{i}" for i in range(count))


def has_cache(graph: Any, kv_params: Any) -> bool:
    """Whether the graph's inputs contain the cache inputs that `kv_params` declares."""
    leaves = [_key(kind) for _, _, _, kind in cache_leaves(kv_params)]
    return _find([_key(value.type) for value in graph.inputs], leaves) is not None


def cache_leaves(kv_params: Any) -> Iterator[tuple[str, int, str, Any]]:
    """(group, device index, field, type) of every cache input, in graph order."""
    yield from _walk(kv_params.get_symbolic_inputs(), "", 0)


def _walk(node: Any, group: str, device: int) -> Iterator[tuple[str, int, str, Any]]:
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from _walk(child, f"{group}.{key}" if group else str(key), device)
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _walk(child, group, index)
    elif dataclasses.is_dataclass(node):
        yield from _fields(node, group, device)
    elif node is not None:
        raise MaxportError(f"unknown kind of cache input: {type(node).__name__}")


def _fields(node: Any, group: str, device: int) -> Iterator[tuple[str, int, str, Any]]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if value is None:
            continue
        if field.name == "leaves":  # recurrent state: one pool and row table per state
            for index, leaf in enumerate(value):
                yield from _fields(leaf, f"{group}.state{index}".lstrip("."), device)
        elif isinstance(value, list | tuple):
            for index, kind in enumerate(value):
                yield group, device, f"{field.name}.{index}", kind
        else:
            yield group, device, field.name, value


def _find(whole: list[Any], part: list[Any]) -> int | None:
    """Where `part` begins in `whole` as one run."""
    starts = range(len(whole) - len(part) + 1)
    return next((at for at in starts if whole[at : at + len(part)] == part), None)


def _key(kind: Any) -> tuple[str, str, tuple[str, ...]]:
    return type(kind).__name__, kind.dtype.name, tuple(str(dim) for dim in kind.shape)


def _batch_role(kind: Any) -> str:
    dims = [str(dim) for dim in kind.shape]
    if type(kind).__name__ == "BufferType" and kind.dtype.name == "uint8" and len(dims) == 1:
        return "signal"
    if len(dims) == 1 and dims[0] in _BATCH_INPUTS:
        return _BATCH_INPUTS[dims[0]]
    if kind.dtype.name == "int64" and len(dims) == 1 and dims[0].isdigit():
        return "data_parallel_splits"
    if kind.dtype.name == "int32" and dims == ["1"]:
        return "batch_context_lengths"
    # Embeddings of images and where they go, as vision_merge_inputs declares them.
    if kind.dtype.is_float() and len(dims) == 2 and "image" in dims[0]:
        return "image_embeddings"
    if kind.dtype.name == "int32" and dims == ["total_image_tokens"]:
        return "image_token_indices"
    # NemotronH keeps its recurrent states beside the cache, one slot per sequence.
    if type(kind).__name__ == "BufferType" and dims[0] == "max_slots":
        return "slot_pool"
    if kind.dtype.name == "uint32" and dims == ["batch_size"]:
        return "state_slots"
    if kind.dtype.name == "bool" and dims == ["has_initial_state_len"]:
        return "has_initial_state"
    raise MaxportError(
        f"a graph input of unknown meaning: {kind.dtype.name}[{', '.join(dims)}]",
        fix="declare the inputs as MAX's batch processors do (ragged_batch_inputs)",
    )


def _device_index(kind: Any) -> int:
    return int(getattr(kind.device, "id", 0) or 0)


def _static(kind: Any) -> tuple[int | None, ...]:
    return tuple(int(dim) if str(dim).isdigit() else None for dim in kind.shape)
