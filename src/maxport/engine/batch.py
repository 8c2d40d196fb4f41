"""Inputs of one step of a built graph: ragged tokens and a paged cache filled by hand.

Pages are dealt out in a shuffled order, so the pages of one sequence are neither contiguous nor in
order, and unused cache holds finite noise: reading a wrong page or past the end shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxport.engine.inputs import Role
from maxport.errors import MaxportError

if TYPE_CHECKING:
    from maxport.engine.build import BuiltGraph

#: Inputs that live as long as the cache does; all others are made for each step.
_POOLS = ("kv_blocks", "kv_scales", "pool", "slot_pool", "signal")
#: Of these, recurrent states, which MAX hands out zeroed.
STATES = ("pool", "slot_pool")


class PagedCache:
    """The cache buffers of one graph and which pages belong to which sequence.

    Args:
        built: The graph the inputs are for.
        capacity: Tokens that fit, over all sequences.
        lut_padding: Unused columns of the page tables, pointing to a page of noise. MAX's compiled
            kernels read up to 15 entries ahead and want a multiple of 8.
        seed: Of the page order and the noise.
    """

    def __init__(
        self, built: BuiltGraph, *, capacity: int = 2048, lut_padding: int = 1, seed: int = 0
    ) -> None:
        self.built = built
        self.page_size = _page_size(built.kv_params)
        self.lut_padding = lut_padding
        self.pages = 1 + 8 + capacity // self.page_size
        self._rng = np.random.default_rng(seed)
        self._pools = self._make_pools(seed)
        self.reset()

    def reset(self) -> None:
        """Forget all sequences. Their keys and values stay behind as noise, as in serving."""
        self.lengths: dict[int, int] = {}
        self._owned: dict[int, list[int]] = {}
        self._slots: dict[int, int] = {}
        # Page 0 is MAX's null page: it pads the tables and no sequence owns it.
        self._free = [int(page) for page in self._rng.permutation(np.arange(1, self.pages))]
        for index, pool in self._pools.items():
            if self.built.roles[index].name in STATES:
                pool.zero_()

    def _make_pools(self, seed: int) -> dict[int, Any]:
        """The buffers by input number; those of one device and group may share memory."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        shared: dict[tuple[str, int], Any] = {}
        return {
            index: self._pool(role, shared, generator)
            for index, role in enumerate(self.built.roles)
            if role.name.split(".")[0].removesuffix("_per_layer") in _POOLS
        }

    def step_inputs(
        self, batch: Mapping[int, Sequence[int]], *, return_n_logits: int = 1
    ) -> list[Any]:
        """Inputs in graph order for `batch`, sequence id -> its new tokens; marks them as cached.

        Pools are torch tensors that the graph writes to; everything else is a fresh numpy array.

        Raises:
            MaxportError: A sequence gets no token, or the cache is full.
        """
        self._admit(batch)
        values = [self._value(i, r, batch, return_n_logits) for i, r in enumerate(self.built.roles)]
        for key, tokens in batch.items():
            self.lengths[key] += len(tokens)
        return values

    def _admit(self, batch: Mapping[int, Sequence[int]]) -> None:
        for key, tokens in batch.items():
            if not len(tokens):
                raise MaxportError(f"sequence {key} gets no token in this step")
            if key not in self.lengths:
                self.lengths[key], self._owned[key] = 0, []
                self._slots[key] = len(self._slots)
            need = -(-(self.lengths[key] + len(tokens)) // self.page_size)
            while len(self._owned[key]) < need:
                if not self._free:
                    raise MaxportError("the hand-made cache is full", fix="raise its capacity")
                self._owned[key].append(self._free.pop())

    def _value(
        self, index: int, role: Role, batch: Mapping[int, Sequence[int]], return_n_logits: int
    ) -> Any:
        if index in self._pools:
            return self._pools[index]
        if role.name == "image_embeddings":  # text alone; numpy has no bfloat16
            import torch

            return torch.zeros(0, int(role.shape[1] or 0), dtype=torch_dtype(role.dtype))
        counts = [len(tokens) for tokens in batch.values()]
        cached = [self.lengths[key] for key in batch]
        longest = max(c + n for c, n in zip(cached, counts, strict=True))
        made: dict[str, Any] = {
            "tokens": lambda: np.concatenate([np.asarray(t) for t in batch.values()]),
            "row_offsets": lambda: np.cumsum([0, *counts]),
            "return_n_logits": lambda: [return_n_logits],
            "data_parallel_splits": lambda: [0, len(batch)],
            "batch_context_lengths": lambda: [sum(counts) + sum(cached)],
            "state_slots": lambda: [self._slots[key] + 1 for key in batch],
            "has_initial_state": lambda: [length > 0 for length in cached],
            "cache_lengths": lambda: cached,
            "lookup_table": lambda: self._lookup_table(batch),
            "scales_lookup_table": lambda: self._lookup_table(batch),
            "live_row_ids": lambda: self._state_rows(role, batch),
            "max_prompt_length": lambda: [max(counts)],
            "max_cache_length": lambda: [longest],
            "page_stride": lambda: [self._stride(role, "kv_blocks")],
            "scales_page_stride": lambda: [self._stride(role, "kv_scales")],
            "attention_dispatch_metadata": lambda: self._dispatch(role, counts, longest),
            "image_token_indices": lambda: [],
            "mla_num_partitions": lambda: [1],
        }
        if role.name not in made:
            raise MaxportError(f"no value is known for graph input {role}")
        return np.ascontiguousarray(made[role.name](), dtype=role.dtype)

    def _lookup_table(self, batch: Mapping[int, Sequence[int]]) -> np.ndarray:
        used = max(len(self._owned[key]) for key in batch)
        width = used + self.lut_padding
        if self.lut_padding >= 16:  # compiled kernels: see max.nn.kv_cache.utils.padded_lut_cols
            width = -(-used // 8) * 8 + self.lut_padding
        table = np.zeros((len(batch), width), np.uint32)
        for row, key in enumerate(batch):
            table[row, : len(self._owned[key])] = self._owned[key]
        return table

    def _state_rows(self, role: Role, batch: Mapping[int, Sequence[int]]) -> np.ndarray:
        """Pool rows of each sequence's state, (layers, batch); see MAX's RecurrentStateRegion."""
        layers = role.shape[0] or 1
        slots = np.array([self._slots[key] + 1 for key in batch])
        return slots[None, :] * layers + np.arange(layers)[:, None]

    def _dispatch(self, role: Role, counts: list[int], longest: int) -> list[int]:
        """What max.nn.kv_cache's MHAAttnKey, MLAAttnKey and MSAAttnKey pack, one partition."""
        full = [len(counts), max(counts), 1, longest]
        return [42] if role.shape == (1,) else full[: role.shape[0]]

    def _stride(self, role: Role, name: str) -> int:
        """Elements from one page to the next of the pool beside `role`."""
        for other in self.built.roles:
            if (other.name, other.group, other.device) == (name, role.group, role.device):
                return int(np.prod([size for size in other.shape[1:] if size is not None]))
        raise MaxportError(f"{role} belongs to no {name}")

    def _pool(self, role: Role, shared: dict[tuple[str, int], Any], generator: Any) -> Any:
        import torch

        dtype = torch_dtype(role.dtype)
        if role.name == "signal":
            return torch.zeros([int(size or 0) for size in role.shape], dtype=dtype)
        sizes = [size if size is not None else self._pool_rows(role) for size in role.shape]
        if role.name in STATES:
            return torch.zeros(sizes, dtype=dtype)
        if role.name == "kv_blocks_per_layer.0" and (role.group, role.device) in shared:
            return shared[role.group, role.device]
        page = torch.randn(sizes[1:], generator=generator, dtype=torch.float32).to(dtype)
        noise = page.expand(sizes).contiguous()
        if role.name == "kv_blocks":
            shared[role.group, role.device] = noise
        return noise

    def _pool_rows(self, role: Role) -> int:
        """Rows of a pool: pages, or for a recurrent state one block of layers per sequence."""
        if role.name != "pool":
            return self.pages
        rows = next(
            r
            for r in self.built.roles
            if (r.name, r.group, r.device) == ("live_row_ids", role.group, role.device)
        )
        return self.pages * int(rows.shape[0] or 1)


def torch_dtype(name: str) -> Any:
    """The torch dtype of MAX's dtype `name`."""
    import torch

    return getattr(torch, name)


def _page_size(kv_params: Any) -> int:
    """Tokens per page; the tree's first attention cache decides, all share it."""
    if kv_params is None:
        return 128
    children = getattr(kv_params, "children", None)
    if children:
        sizes = [_page_size(child) for child in children.values()]
        return sizes[0]
    return int(getattr(kv_params, "page_size", 128))
