"""Tensor parallelism kept: no-op inputs, before and after, and one proof on two devices."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from maxport.migrate.closure import Closure
from maxport.migrate.codemods import ORDER, order_for
from maxport.migrate.codemods.parallel import Parallel
from maxport.migrate.codemods.parallel_signals import Signals
from maxport.migrate.codemods.sharding import Sharding
from maxport.migrate.kinds import Kinds
from maxport.migrate.parallel import (
    HELPERS_TEXT,
    parallel_root,
    several_devices,
    signals_removable,
    weight_attributes,
)
from maxport.migrate.plan import Plan, make_plan
from maxport.migrate.rewrite import Codemod, FileWork, apply
from maxport.migrate.sources import Definition
from maxport.migrate.target import open_target

HEAD = """\
from collections.abc import Callable, Sequence
from max.graph import BufferValue, DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.nn.comm.allreduce import Allreduce
from max.nn.layer import Module, Shardable
from max.nn.linear import Linear
"""

V3 = '''\
"""A ModuleV3 layer on a mesh."""

from max.experimental import functional as F
from max.experimental.nn import Module
from max.experimental.nn.common_layers.linear import ColumnParallelLinear
from max.experimental.tensor import Tensor


class Block(Module[[Tensor], Tensor]):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(dim, dim)  # sharded along the output

    def forward(self, x: Tensor) -> Tensor:
        return F.allreduce_sum(self.up(x))
'''

LAYER = HEAD + (
    "class Norm(Module, Shardable):\n"
    "    def __init__(self, dim, dtype, device):\n"
    '        self.weight = Weight("weight", dtype, [dim], device)\n'
    "    @property\n"
    "    def sharding_strategy(self):\n"
    "        return self.weight.sharding_strategy\n"
    "    @sharding_strategy.setter\n"
    "    def sharding_strategy(self, strategy):\n"
    "        self.weight.sharding_strategy = strategy\n"
    "    def shard(self, devices):\n"
    "        parts = self.weight.shard(devices)  # cut\n"
    "        return parts\n"
)

BLOCK = HEAD + (
    "class Block(Module):\n"
    "    def __init__(self, mlp, norm, config):\n"
    "        self.mlp = mlp\n"
    "        self.mlp.sharding_strategy = ShardingStrategy.tensor_parallel(2)\n"
    "        self.mlp_shards = mlp.shard(config.devices)\n"
    "        self.norm_shards = norm.shard(config.devices)\n"
    "        self.norm = norm\n"
    "        self.allreduce = Allreduce(2)\n"
    "    def __call__(self, xs, signal_buffers: list[BufferValue], offsets):\n"
    "        ys = [mlp(x) for mlp, x in zip(self.mlp_shards, xs)]\n"
    "        ys = self.allreduce(ys, signal_buffers)\n"
    "        return ops.allgather(ys, signal_buffers, axis=-1)\n"
)


def work_on(text: str, folder: Path) -> FileWork:
    file = folder / "block.py"
    file.write_text(text)
    target = open_target(str(file))
    module = target.module_name(file)
    target.sources.load(module, file)
    plan = Plan(target, Kinds(target.sources), Definition(module, "Block"), Closure())
    plan.places[module] = ("layers", "block")
    plan.parallel = True
    plan.weights = weight_attributes(plan.kinds, [module])
    return FileWork("block.py", module, text, text, plan)


def run(codemod: type[Codemod], text: str, folder: Path) -> FileWork:
    work = work_on(text, folder)
    apply(codemod, work)
    return work


@pytest.mark.parametrize("codemod", [Parallel, Signals])
@pytest.mark.parametrize(
    "text",
    [V3, "", "shard = 1  # of glass\n", "class Plain:\n    def shard(self, n):\n        n()\n"],
)
def test_other_code_is_left_alone(codemod: type[Codemod], text: str, tmp_path: Path) -> None:
    work = run(codemod, text, tmp_path)
    assert work.text == text
    assert work.changes == []


def test_a_weights_strategy_becomes_its_placement(tmp_path: Path) -> None:
    work = run(Parallel, LAYER, tmp_path)
    assert '        place(self, "weight", strategy)\n' in work.text
    assert '        return strategy_of(self, "weight")\n' in work.text
    assert '        parts = local_shards(self, "weight", devices)  # cut\n' in work.text
    assert ("..tensor_parallel", "place", "") in work.needs
    assert {c.level for c in work.changes} == {"safe"}
    assert [c.line for c in work.changes if "placement" in c.what] == [14]


def test_copies_become_properties_over_the_devices(tmp_path: Path) -> None:
    work = run(Parallel, BLOCK, tmp_path)
    block = ast.parse(work.text).body[-1]
    assert isinstance(block, ast.ClassDef)
    made = {n.name: ast.unparse(n.body[-1]) for n in block.body if isinstance(n, ast.FunctionDef)}
    assert made["mlp_shards"] == "return shards_of(self.mlp, self.shard_devices)"
    assert made["norm_shards"] == "return shards_of(self.norm, self.shard_devices)"
    assert work.text.count("self.shard_devices = list(config.devices)") == 1
    # A layer keeps its strategy: its own setter hands it to the weights.
    assert "self.mlp.sharding_strategy = ShardingStrategy.tensor_parallel(2)" in work.text
    assert "Allreduce(2)" not in work.text


def test_collectives_need_no_signal_buffers(tmp_path: Path) -> None:
    work = run(Parallel, BLOCK, tmp_path)
    assert "ys = allreduce_sum(ys)" in work.text
    assert "return allgather(ys, axis=-1)" in work.text


def test_a_broadcast_names_the_devices_or_raises(tmp_path: Path) -> None:
    known = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, devices):\n"
        "        self.devices = devices\n"
        "    def __call__(self, x, signals):\n"
        "        return ops.distributed_broadcast(x, signals)\n"
    )
    assert "return broadcast(x, self.devices)" in run(Parallel, known, tmp_path).text
    unknown = known.replace("        self.devices = devices\n", "        pass\n")
    work = run(Parallel, unknown, tmp_path)
    reason = "distributed_broadcast: the devices are not known here"
    assert f"# maxport MANUAL (parallel): {reason}" in work.text
    assert "# was: return ops.distributed_broadcast(x, signals)" in work.text
    assert f'raise NotImplementedError("maxport: parallel: {reason}")' in work.text
    assert [c.level for c in work.changes] == ["manual"]


def test_signal_buffers_go_with_what_hands_them_on(tmp_path: Path) -> None:
    text = HEAD + (
        "def head(\n"
        "    h,\n"
        "    lm_head: Callable[[list[TensorValue], Sequence[BufferValue]], TensorValue],\n"
        "    signal_buffers,\n"
        "):\n"
        '    """Logits.\n\n'
        "    Args:\n"
        "        h: Hidden states.\n"
        "        signal_buffers: For the collectives, one\n"
        "            for each device.\n"
        "        lm_head: The head.\n"
        '    """\n'
        "    inputs = [h, signal_buffers, 1]\n"
        "    lm_head(\n        h, signal_buffers\n    )\n"
        "    return lm_head(*inputs, signal_buffers=signal_buffers)\n"
    )
    work = run(Signals, text, tmp_path)
    assert "signal_buffers" not in work.text
    assert "Callable[[list[TensorValue]], TensorValue]" in work.text
    assert "inputs = [h, 1]" in work.text
    assert "    lm_head(\n        h\n    )\n" in work.text
    assert "        h: Hidden states.\n        lm_head: The head.\n" in work.text
    assert [c.level for c in work.changes] == ["safe"]


@pytest.mark.parametrize(
    ("line", "removable"),
    [
        ("self.allreduce(xs, signal_buffers)", True),
        ("self.layer(xs, signal_buffers)", True),
        ("xs += signal_buffers", False),
        ("signal_buffers[0]", False),
        ("kernel(xs, signal_buffers)", False),
    ],
)
def test_signal_buffers_that_are_read_stay(line: str, removable: bool, tmp_path: Path) -> None:
    text = f"from max.nn.kernels import kernel\n{HEAD}" + (
        f"class Block(Module):\n    def __call__(self, xs, signal_buffers):\n        {line}\n"
    )
    work = work_on(text, tmp_path)
    assert signals_removable(work.plan.kinds, [work.module], {}) is removable


def test_the_order_differs_only_where_v2_runs_on_several_devices() -> None:
    assert order_for(False) == ORDER
    assert Sharding not in order_for(True) and Parallel in order_for(True)
    assert Signals in order_for(True, signals=True)


def test_which_root_v2_builds_on_several_devices() -> None:
    plan = make_plan(open_target("mistral"))
    assert plan.parallel and plan.root.name == "Mistral"
    assert plan.several is not None and plan.several.name == "DistributedMistral"
    target = open_target("olmo2")  # registered for one GPU
    assert not several_devices(Kinds(target.sources), target)
    one = Definition("max.pipelines.architectures.gemma3.gemma3", "Gemma3")
    kinds = Kinds(plan.kinds.sources)
    assert parallel_root(kinds, one, {one, plan.several}) is None  # it takes lists itself


def _package(folder: Path) -> tuple[Any, Path, Path]:
    from maxport.migrate.run import migrate
    from maxport.migrate.twins import make_twin
    from maxport.migrate.write import write_package

    result = migrate(open_target("mistral"))
    assert result is not None
    package = folder / result.plan.name
    write_package(result.files, package)
    return result, package, make_twin("MistralForCausalLM", folder / "twin")


def test_mistral_on_two_devices_and_a_package_that_forgets_to_reduce(tmp_path: Path) -> None:
    from maxport.migrate.parallel_proof import prove_parallel

    result, package, twin = _package(tmp_path)
    assert result.files["tensor_parallel.py"] == HELPERS_TEXT
    assert "multi_gpu_supported=True" in result.files["arch.py"]
    proof = prove_parallel("MistralForCausalLM", package, twin, modes=("all",))
    assert proof.summary == "2 devices: equal by graph-hash"
    assert proof.modes == ["ALL"]
    helpers = package / "tensor_parallel.py"
    reduced = "list(F.allreduce_sum(_joined(xs, Partial())).local_shards)"
    assert reduced in HELPERS_TEXT
    helpers.write_text(HELPERS_TEXT.replace(reduced, "list(xs)"))
    wrong = prove_parallel("MistralForCausalLM", package, twin, modes=("all",))
    assert wrong.verdict == "differs" and wrong.engine == "evaluate"
    assert wrong.max_diff is not None and wrong.max_diff > 1e-2
    assert "outputs differ" in wrong.summary


def test_strategies_as_placements() -> None:
    from max.experimental.sharding import Replicated, Sharded
    from max.graph import ShardingStrategy

    names: dict[str, Any] = {}
    exec(compile(HELPERS_TEXT, "tensor_parallel.py", "exec"), names)
    placement_of = names["placement_of"]
    assert placement_of(ShardingStrategy.rowwise(2)) == Sharded(0)
    assert placement_of(ShardingStrategy.columnwise(2)) == Sharded(1)
    assert placement_of(ShardingStrategy.axiswise(2, 2)) == Sharded(2)
    assert placement_of(ShardingStrategy.replicate(2)) == Replicated()
    assert placement_of(ShardingStrategy.head_aware_columnwise(2, 4, 8)) == Sharded(1)
    # No placement says these; such weights stay whole and are cut where they are used.
    for strategy in (
        ShardingStrategy.head_aware_columnwise(2, 5, 8),
        ShardingStrategy.stacked_qkv(2, 4, 8),
        ShardingStrategy.gate_up(2),
        ShardingStrategy.tensor_parallel(2),
    ):
        assert placement_of(strategy) is None
