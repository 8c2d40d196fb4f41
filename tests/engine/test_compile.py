"""Several graphs compiled in one module, each with its own weights and cache buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from maxport.engine.build import BuiltGraph
from maxport.engine.compile import compile_graphs
from maxport.engine.inputs import input_roles
from maxport.engine.runner import EvaluatedRunner
from maxport.errors import MaxportError

VOCAB, HEADS, DIM = 11, 1, 4


def lookup_graph(seed: int) -> BuiltGraph:
    """Logits looked up by token, with a port's inputs and outputs.

    No matrix product and no attention kernel: those cost most of a compile and have tests of their
    own.
    """
    from max import tree
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, Weight, ops
    from max.nn.kv_cache import MHAKVCacheParams

    cpu = DeviceRef.CPU()
    params = MHAKVCacheParams(
        dtype=DType.float32,
        n_kv_heads=HEADS,
        head_dim=DIM,
        num_layers=1,
        devices=[cpu],
        page_size=128,
    )
    kinds = [
        TensorType(DType.int64, ["total_seq_len"], cpu),
        TensorType(DType.int64, ["return_n_logits"], cpu),
        TensorType(DType.uint32, ["input_row_offsets_len"], cpu),
        *tree.leaves(params.get_symbolic_inputs()),
    ]
    with Graph("lookup", input_types=kinds) as graph:
        tokens, _, offsets = (value.tensor for value in graph.inputs[:3])
        table = Weight("table", DType.float32, [VOCAB, VOCAB], cpu)
        logits = ops.gather(table, tokens, axis=0)
        last = ops.gather(logits, ops.cast(offsets[1:], DType.int64) - 1, axis=0)
        graph.output(last, logits, offsets)
    table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    names = ("next_token_logits", "logits", "logit_offsets")
    return BuiltGraph(
        graph,
        {"table": table},
        params,
        input_roles(graph, params),
        names,
        VOCAB,
        "v3",
        "all",
        "float32",
        "cpu",
        512,
        f"lookup{seed}",
    )


@pytest.fixture(scope="module")
def graphs() -> list[BuiltGraph]:
    return [lookup_graph(1), lookup_graph(2)]


@pytest.mark.compiled
def test_graphs_compile_together_and_keep_their_weights_apart(graphs: list[BuiltGraph]) -> None:
    runners = compile_graphs(graphs)
    batch = {3: [1, 2, 3], 8: [4]}
    for built, runner in zip(graphs, runners, strict=True):
        table = built.weights["table"]
        for _ in range(2):
            found = runner.step(batch)
            assert list(found) == [3, 8]
            assert np.array_equal(found[3], table[[1, 2, 3]])
            assert np.array_equal(found[8], table[[4]])
        out = runner.outputs(batch)
        assert np.array_equal(out.named["next_token_logits"], table[[3, 4]])
        assert out.named["logit_offsets"].tolist() == [0, 3, 4]
        assert np.array_equal(EvaluatedRunner(built).step(batch)[3], found[3])


def test_merging_leaves_the_graphs_as_they_were(graphs: list[BuiltGraph]) -> None:
    from maxport.engine.compile import merged

    module, weights = merged(graphs)
    assert module.top_level_graph_names() == ["g0", "g1"]
    assert sorted(weights) == ["g0/table", "g1/table"]
    assert [built.graph.name for built in graphs] == ["lookup", "lookup"]
    batch = {0: [5]}
    assert np.array_equal(
        EvaluatedRunner(graphs[0]).step(batch)[0], graphs[0].weights["table"][[5]]
    )


def test_simulated_gpus_cannot_run_compiled_graphs(
    graphs: list[BuiltGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    from max import driver

    monkeypatch.setattr(driver, "is_virtual_device_mode", lambda: True)
    with pytest.raises(MaxportError, match="simulates GPUs cannot run"):
        compile_graphs(graphs)


def test_page_tables_suit_the_compiled_kernels(graphs: list[BuiltGraph]) -> None:
    from max.nn.kv_cache.utils import padded_lut_cols

    from maxport.engine.batch import PagedCache
    from maxport.engine.compile import LUT_PADDING

    cache = PagedCache(graphs[0], lut_padding=LUT_PADDING)
    at = [role.name for role in graphs[0].roles].index("lookup_table")
    table: Any = cache.step_inputs({0: [1] * 300, 1: [2]})[at]
    assert table.shape == (2, padded_lut_cols(3))
    assert len(set(table[0, :3])) == 3 and 0 not in table[0, :3]
    assert not table[:, 3:].any()
