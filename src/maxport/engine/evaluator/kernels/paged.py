"""The paged key/value cache as MAX lays it out.

`kv_blocks` is [pages, 2, layers, page size, heads, head dim]; axis 1 is keys and values (for MLA it
has size 1). Row b of the lookup table lists the pages of sequence b; `cache_lengths[b]` tokens are
there before this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

KEYS, VALUES = 0, 1
OPERANDS = 6
"""kv_blocks, page_stride, cache_lengths, lookup_table, max_prompt_length, max_cache_length."""


@dataclass
class PagedCache:
    """One layer of the cache and where each sequence's pages are.

    Attributes:
        blocks: [pages, 2 or 1, layers, page size, heads, head dim]; written in place.
        lengths: [batch] int64, tokens cached before this step.
        table: [batch, pages per sequence] int64.
        layer: Which layer of the cache.
    """

    blocks: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    layer: int

    @classmethod
    def from_operands(cls, operands: Sequence[torch.Tensor], layer: torch.Tensor) -> PagedCache:
        """From the six operands that every cache kernel takes in a row, and the layer index."""
        blocks, _, lengths, table = operands[:4]
        return cls(blocks, lengths.long(), table.long(), int(layer.item()))

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return int(self.blocks.shape[3])

    def positions(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence number and position in the sequence of every new token.

        Args:
            offsets: [batch + 1], where each sequence's new tokens start and end.
        """
        offsets = offsets.long()
        counts = offsets.diff()
        sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
        position = torch.arange(len(sequence)) - offsets[sequence] + self.lengths[sequence]
        return sequence, position

    def store(self, which: int, new: torch.Tensor, offsets: torch.Tensor) -> None:
        """Write new tokens' keys or values, [tokens, heads, head dim]; the rest is skipped."""
        sequence, position = self.positions(offsets)
        new = new[: len(sequence)]
        page = self.table[sequence, position // self.page_size]
        self.blocks[page, which, self.layer, position % self.page_size] = new.to(self.blocks.dtype)

    def read(self, which: int, sequence: int, length: int) -> torch.Tensor:
        """The first `length` cached keys or values of a sequence, [length, heads, head dim]."""
        pages = self.table[sequence, : -(-length // self.page_size)]
        return self.blocks[pages, which, self.layer].flatten(0, 1)[:length]

    def new(self, which: int, offsets: torch.Tensor) -> torch.Tensor:
        """This step's keys or values as stored, [tokens, heads, head dim]."""
        sequence, position = self.positions(offsets)
        page = self.table[sequence, position // self.page_size]
        return self.blocks[page, which, self.layer, position % self.page_size]
