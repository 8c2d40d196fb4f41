"""Float8 kernels against products of what the scales stand for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxport.engine.evaluator.call import Unsupported
from maxport.engine.evaluator.kernels import float8
from maxport.engine.evaluator.kernels.paged import OPERANDS

SEEDS = st.integers(0, 2**31)
BLOCKS = {"m_scale_granularity": 1, "n_scale_granularity": 128, "k_scale_granularity": 128}


def call(
    shapes: tuple[list[int], ...] = (),
    dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, torch.float32),
    **attributes: Any,
) -> Any:
    return SimpleNamespace(
        attribute=lambda name, default=None: attributes.get(name, default),
        shape=lambda index=0: shapes[index],
        dtype=lambda index=0: dtypes[index],
    )


def random(seed: int, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.booleans(), SEEDS)
def test_quantized_values_times_scales_are_the_values(
    rows: int, groups: int, power: bool, seed: int
) -> None:
    x = random(seed, rows, 128 * groups) * 10.0 ** (seed % 5 - 2)
    scales_dtype = torch.float8_e8m0fnu if power else torch.float32
    kind = call(
        ([rows, 128 * groups], [groups, rows + 3]),
        (torch.float8_e4m3fn, scales_dtype),
        group_size_or_per_token=128,
        amax_floor=0.0,
    )
    values, scales = float8.quantize(kind, x, torch.tensor(1200.0))
    assert values.dtype == torch.float8_e4m3fn
    used = scales[:, :rows].T
    if power:
        assert torch.equal(torch.log2(used), torch.log2(used).round())
    again = values.float() * used.repeat_interleave(128, 1)
    error = (again - x).abs().unflatten(1, (-1, 128)).amax(-1)
    assert (error <= x.abs().unflatten(1, (-1, 128)).amax(-1) / 16).all()


def test_where_float8_is_carried_wide_nothing_is_rounded() -> None:
    x = random(0, 3, 128)
    wide = call(([3, 128], [1, 4]), (torch.float32, torch.float32), group_size_or_per_token=128)
    values, scales = float8.quantize(wide, x, torch.tensor(1200.0))
    assert torch.equal(values, x)
    assert torch.equal(scales, torch.ones(1, 4))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.sampled_from([1, 127, 128, 200]), st.integers(1, 2), SEEDS)
def test_scaled_products(rows: int, outputs: int, groups: int, seed: int) -> None:
    width = 128 * groups
    a, b = random(seed, rows, width), random(seed + 1, outputs, width)
    a_scales = random(seed + 2, groups, rows + 3).abs()
    b_scales = random(seed + 3, -(-outputs // 128), groups).abs()
    got = float8.scaled_matmul(call(**BLOCKS), a, b, a_scales, b_scales)
    for row in range(rows):
        for output in (0, outputs - 1):
            want = sum(
                float(a[row, g * 128 : g * 128 + 128] @ b[output, g * 128 : g * 128 + 128])
                * float(a_scales[g, row] * b_scales[output // 128, g])
                for g in range(groups)
            )
            assert float(got[row, output]) == pytest.approx(want, abs=1e-3, rel=1e-4)


def test_one_scale_for_a_whole_tensor_or_row() -> None:
    whole = float8.spread(torch.tensor([[2.0]]), (3, 4), (-1, -1))
    assert torch.equal(whole, torch.full((3, 4), 2.0))
    rows = float8.spread(torch.tensor([[1.0], [2.0]]), (2, 3), (1, -1))
    assert rows.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_each_group_of_rows_meets_its_expert() -> None:
    rows, weight = random(0, 5, 128), random(1, 3, 4, 128)
    a_scales, b_scales = random(2, 1, 5).abs(), random(3, 3, 1, 1).abs()
    starts, experts = torch.tensor([0, 2, 2, 5]), torch.tensor([2, 0, 1])
    got = float8.grouped_scaled_matmul(
        call(**BLOCKS), rows, weight, a_scales, b_scales, starts, experts
    )
    for first, last, expert in ((0, 2, 2), (2, 5, 1)):
        scale = a_scales[0, first:last, None] * b_scales[expert, 0]
        want = rows[first:last] @ weight[expert].T * scale
        assert torch.allclose(got[first:last], want, atol=1e-4)


def cache(blocks: torch.Tensor, lengths: list[int], table: list[list[int]]) -> list[torch.Tensor]:
    nothing = torch.zeros(1)
    return [blocks, nothing, torch.tensor(lengths), torch.tensor(table), nothing, nothing]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 6), SEEDS)
def test_the_index_chooses_past_tokens_of_largest_score(
    start: int, new: int, count: int, seed: int
) -> None:
    length, slots = start + new, 4
    keys, scales = random(seed, length, 8), random(seed + 1, length, 1).abs() + 0.1
    q, weights = random(seed + 2, new, 2, 8), random(seed + 3, new, 2)
    table = [[3, 1, 2]]
    blocks, scale_blocks = torch.zeros(4, 1, 1, slots, 1, 8), torch.zeros(4, 1, 1, slots, 1, 1)
    for position in range(length):
        place = (table[0][position // slots], 0, 0, position % slots, 0)
        blocks[place], scale_blocks[place] = keys[position], scales[position]
    mla_table = torch.tensor([[2, 3, 1]])
    positions, rows = float8.index_rows(
        call(k=count, mask_str="causal", write_logical=True), q, weights,
        torch.tensor([0, new]), *cache(blocks, [start], table), scale_blocks, torch.zeros(1),
        torch.tensor(table), torch.tensor(0), torch.zeros(4, 1, 1, slots, 1, 8), mla_table,
    )  # fmt: skip
    for token in range(new):
        seen = start + token + 1
        score = (torch.relu(q[token] @ keys[:seen].T) * weights[token][:, None]).sum(0)
        score = score * scales[:seen, 0]
        used = positions[token][positions[token] >= 0]
        assert len(used) == min(count, seen)
        lowest = score[used].min()
        left_out = [float(score[p]) for p in range(seen) if p not in used.tolist()]
        assert all(value <= lowest + 1e-5 for value in left_out)
        want = [int(mla_table[0, p // slots]) * slots + p % slots for p in used.tolist()]
        assert rows[token][rows[token] >= 0].tolist() == want


def test_scales_of_keys_go_where_their_tokens_are() -> None:
    scales = torch.zeros(3, 1, 1, 2, 1, 1)
    nothing, table = torch.zeros(1), torch.tensor([[2, 1]])
    float8.store_key_scales(
        call(), torch.tensor([[[7.0]], [[8.0]]]), nothing, nothing, torch.tensor([1]), table,
        torch.tensor([0, 2]), nothing, nothing, scales, nothing, table, torch.tensor(0),
    )  # fmt: skip
    assert scales[2, 0, 0, 1, 0, 0] == 7 and scales[1, 0, 0, 0, 0, 0] == 8


def sparse_call(**changes: Any) -> Any:
    return call(**{**BLOCKS, "physical_indices": True, "has_attn_sink": False, **changes})


def sparse_operands(rows: torch.Tensor, lengths: list[int], new: int) -> list[torch.Tensor]:
    """q, kv and the rest for one sequence of heads 2, nope 4, rope 2, latent 6, values 3."""
    held = cache(random(9, 3, 1, 1, 4, 1, 8), lengths, [[2, 1]])
    assert len(held) == OPERANDS
    return [
        random(1, new, 2, 6), random(2, new, 8), torch.tensor([0, new]), random(3, 8, 2),
        random(4, 6), random(5, 2, 6, 4), random(6, 2, 3, 6), *held, torch.tensor(0),
        torch.tensor(0.4), torch.tensor(1e-5), torch.ones(2, 1, 1), torch.ones(2, 1, 1),
        torch.zeros(1), rows, torch.zeros(1), torch.zeros(1),
    ]  # fmt: skip


def test_sparse_attention_to_every_past_row_is_dense_attention() -> None:
    from maxport.engine.evaluator.kernels import mla

    physical = [2 * 4 + slot for slot in range(4)]
    rows = torch.tensor([[*physical[: token + 1], *[-1] * (3 - token)] for token in range(4)])
    got = float8.sparse_decode(sparse_call(), *sparse_operands(rows, [0], 4))
    q, kv, offsets, frequencies, gamma, w_uk, w_uv, *rest = sparse_operands(rows, [0], 4)
    dense = mla.decode(
        call(mask_str="causal", local_window_size=-1),
        q, kv, offsets, frequencies, gamma, w_uk, w_uv, *rest,
    )  # fmt: skip
    assert torch.allclose(got, dense, atol=1e-5)


def test_a_chosen_row_alone_gives_its_own_value() -> None:
    rows = torch.tensor([[8, -1]])
    one = float8.sparse_decode(sparse_call(), *sparse_operands(rows, [3], 1))
    operands = sparse_operands(rows, [3], 1)
    latent = operands[7][2, 0, 0, 0, 0, :6]
    assert torch.allclose(one[0], torch.einsum("hvl,l->hv", operands[6], latent), atol=1e-5)


def test_variants_that_are_not_known_say_so() -> None:
    rows = torch.tensor([[8, -1]])
    with pytest.raises(Unsupported):
        float8.sparse_decode(sparse_call(has_attn_sink=True), *sparse_operands(rows, [3], 1))
