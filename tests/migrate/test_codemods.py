"""Each codemod: no-op inputs first, then before/after with the expected levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxport.migrate.closure import Closure
from maxport.migrate.codemods import ORDER
from maxport.migrate.codemods.constructors import Constructors
from maxport.migrate.codemods.containers import Containers
from maxport.migrate.codemods.entry import Entry
from maxport.migrate.codemods.imports import Imports
from maxport.migrate.codemods.operations import Operations
from maxport.migrate.codemods.sharding import Sharding
from maxport.migrate.codemods.subgraphs import Subgraphs
from maxport.migrate.codemods.surface import Surface
from maxport.migrate.codemods.values import Values
from maxport.migrate.codemods.weights import Weights
from maxport.migrate.kinds import Kinds
from maxport.migrate.plan import Plan
from maxport.migrate.rewrite import Codemod, FileWork, apply
from maxport.migrate.sources import Definition
from maxport.migrate.target import open_target

HEAD = """\
from max.dtype import DType
from max.graph import DeviceRef, ShardingStrategy, TensorValue, Weight, ops
from max.nn.embedding import Embedding
from max.nn.layer import LayerList, Module, Shardable
from max.nn.linear import Linear
from max.nn.norm import LayerNorm
"""

V3 = '''\
"""A ModuleV3 block."""

from max.experimental import functional as F
from max.experimental.nn import Linear, Module
from max.experimental.nn.sequential import ModuleList
from max.experimental.tensor import Tensor


class Block(Module[[Tensor], Tensor]):  # keep me
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = Linear(in_dim=dim, out_dim=dim, bias=False)
        self.scale = Tensor.zeros([dim])
        self.layers = ModuleList([self.up])

    def forward(self, x: Tensor) -> Tensor:

        # comments and blank lines survive
        return F.silu(self.up(x)) * self.scale
'''


def work_on(text: str, folder: Path, native: set[str] | None = None) -> FileWork:
    file = folder / "block.py"
    file.write_text(text)
    target = open_target(str(file))
    module = target.module_name(file)
    target.sources.load(module, file)
    closure = Closure(native=native or set())
    plan = Plan(target, Kinds(target.sources), Definition(module, "Block"), closure)
    plan.places[module] = ("block",)
    return FileWork("block.py", module, text, text, plan)


def run(
    codemod: type[Codemod], text: str, folder: Path, native: set[str] | None = None
) -> FileWork:
    work = work_on(text, folder, native)
    apply(codemod, work)
    return work


@pytest.mark.parametrize("codemod", ORDER, ids=lambda c: c.NAME)
def test_v3_code_is_left_alone(codemod: type[Codemod], tmp_path: Path) -> None:
    work = run(codemod, V3, tmp_path)
    assert work.text == V3
    assert work.changes == []


@pytest.mark.parametrize("codemod", [c for c in ORDER if c is not Imports], ids=lambda c: c.NAME)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = {'ops': 1}\n",
        "def trace(self):\n    return None\n",
        "class Plain:\n    def __call__(self, x):\n        return x.to(x.device)  # mine\n",
    ],
)
def test_code_that_is_no_model_is_left_alone(
    codemod: type[Codemod], text: str, tmp_path: Path
) -> None:
    assert run(codemod, text, tmp_path).text == text


def test_surface(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module, Shardable):\n"
        "    def __call__(self, x: TensorValue) -> TensorValue:  # the call\n"
        "        assert isinstance(x, TensorValue)\n"
        "        return x\n"
    )
    work = run(Surface, text, tmp_path)
    assert "class Block(Module[[Tensor], Tensor]):" in work.text
    assert "    def forward(self, x: Tensor) -> Tensor:  # the call" in work.text
    assert "isinstance(x, Tensor)" in work.text
    assert ("review", 7) in [(c.level, c.line) for c in work.changes]
    assert ("safe", 8) in [(c.level, c.line) for c in work.changes]


def test_surface_renames_device_and_optional_annotations(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    bias: Weight | None = None\n"
        "    def __init__(self, device):\n"
        "        self.device = device\n"
        "    def __call__(self, x: TensorValue | None = None) -> TensorValue | None:\n"
        "        return x\n"
    )
    work = run(Surface, text, tmp_path)
    assert "self.device_ref = device" in work.text
    assert "bias: Tensor | None = None" in work.text
    assert "class Block(Module[..., Tensor | None]):" in work.text


def test_constructors_bind_positions_drop_ambient_and_pin_defaults(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, d, dtype, device):\n"
        "        self.up = Linear(\n"
        "            d,  # in\n"
        "            2 * d,\n"
        "            dtype,\n"
        "            device,\n"
        "        )\n"
        "        self.out = Linear(d, d, dtype, device, has_bias=True)\n"
        "        self.norm = LayerNorm(d, devices=[device], dtype=DType.float32, eps=1e-5)\n"
        "        self.emb = Embedding(10, d, dtype, device)\n"
    )
    native = {
        "max.nn.linear.Linear",
        "max.nn.norm.layer_norm.LayerNorm",
        "max.nn.embedding.Embedding",
    }
    work = run(Constructors, text, tmp_path, native)
    flat = "".join(work.text.split())
    assert "Linear(in_dim=d,#inout_dim=2*d,bias=False,)" in flat
    assert "Linear(in_dim=d, out_dim=d, bias=True)" in work.text
    assert "with default_dtype(DType.float32):" in work.text
    assert "LayerNorm(dim=d, eps=1e-5, keep_dtype=False)" in work.text
    assert "Embedding(10, dim=d)" in work.text
    assert {c.level for c in work.changes} == {"safe"}


def test_containers(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, xs):\n"
        "        self.layer = LayerList(xs)\n"
        "    def run(self):\n"
        "        return [x for x in self.layer.layers]\n"
    )
    work = run(Containers, text, tmp_path)
    assert "self.layer = ModuleList(xs)" in work.text
    assert "for x in self.layer]" in work.text


def test_a_list_that_a_container_wraps_is_held_once(tmp_path: Path) -> None:
    work = run(
        Containers,
        HEAD
        + """

class Experts(Module):
    every: list[Module]
    \"\"\"All of them.\"\"\"

    def __init__(self, make, count: int) -> None:
        super().__init__()
        self.sizes = [count]
        self.every = [make(i) for i in range(count)]  # plain in V2

        self.experts = LayerList(self.every)
""",
        tmp_path,
    )
    assert "self.experts = ModuleList([make(i) for i in range(count)])  # plain in V2" in work.text
    assert "All of them" not in work.text and "every: list" not in work.text
    assert "def every(self) -> list[Any]:" in work.text
    assert "return list(self.experts)" in work.text
    assert "self.sizes = [count]" in work.text
    assert work.counts() == {"safe": 2, "review": 0, "manual": 0}


def test_results_of_kernels_are_tensors_already(tmp_path: Path) -> None:
    text = (
        HEAD
        + """

def first(x, values, holder):
    both = [value.tensor for value in values]
    return ops.custom("k", x.device, [x], [x.type])[0].tensor, both, holder.tensor
"""
    )
    work = run(Values, text, tmp_path)
    assert "[value for value in values]" in work.text
    assert "[x.type])[0], both, holder.tensor" in work.text


def test_names_that_module_reserves_are_said(tmp_path: Path) -> None:
    text = (
        HEAD
        + """

class Block(Module):
    def __init__(self) -> None:
        super().__init__()
        self.children = 3
"""
    )
    assert run(Surface, text, tmp_path).counts()["manual"] == 1
    assert run(Surface, text.replace("self.children", "self.c"), tmp_path).counts()["manual"] == 0


def test_weights_keep_names_and_say_when_they_cannot(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, d, dtype, device):\n"
        '        self.weight = Weight("weight", dtype, [d], device=DeviceRef.CPU())\n'
        '        self.q = Weight("q_norm.weight", dtype, [d], device)\n'
        '        loose = Weight("loose", dtype, [d], device)\n'
    )
    work = run(Weights, text, tmp_path)
    assert "self.weight = Tensor.zeros([d], dtype=dtype, device=CPU())" in work.text
    assert "device=device.to_device()" in work.text
    levels = {c.line: c.level for c in work.changes}
    assert levels == {9: "safe", 10: "safe", 11: "manual"}
    assert "parameter_names: ClassVar[dict[str, str]] = {" in work.text
    assert '"q": "q_norm.weight",' in work.text
    assert "class Block(NamedParameters, Module):" in work.text
    assert "# maxport MANUAL (weights): V2 names this weight 'loose'" in work.text
    assert '# was: loose = Weight("loose", dtype, [d], device)' in work.text
    assert "raise NotImplementedError(" in work.text
    assert "V3 nothing" in next(c.what for c in work.changes if c.level == "manual")


def test_encoded_weights_are_refused_loudly(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, d, dtype, device, quantization_encoding=None):\n"
        '        """Doc."""\n'
        '        self.weight = Weight("weight", dtype, [d], device, quantization_encoding)\n'
    )
    work = run(Weights, text, tmp_path)
    body = work.text.split('"""Doc."""\n')[1]
    assert body.startswith("        if quantization_encoding is not None:\n")
    assert "# maxport MANUAL (weights):" in body
    assert "raise NotImplementedError(" in body
    assert [c.level for c in work.changes] == ["safe", "manual"]


def test_shared_weights_are_tied_in_forward(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, c):\n"
        "        self.emb = c.emb\n"
        "        self.head = c.head\n"
        "        if c.tie:\n"
        '            self.head.set_shared_weight("weight", self.emb.weight)\n'
        "    def forward(self, x):\n"
        "        return self.head(x)\n"
    )
    work = run(Weights, text, tmp_path)
    assert "self.head.weight = None" in work.text
    assert "        if self.head.weight is None:\n" in work.text
    assert "            self.head.weight = self.emb.weight\n" in work.text
    assert "    def forward(self, x):\n        self.tie_weights()\n" in work.text


def test_operations(tmp_path: Path) -> None:
    text = HEAD + (
        "def f(x, y, z):\n"
        "    a = ops.where(condition=x, x=y, y=z)\n"
        "    b = ops.split(a, split_sizes=[1, 2], axis=0)\n"
        "    return map(ops.silu, ops.buffer_load(b))\n"
    )
    work = run(Operations, text, tmp_path)
    assert "F.where(cond=x, x=y, y=z)" in work.text
    assert "F.split(a, split_size_or_sections=[1, 2], axis=0)" in work.text
    assert "map(F.silu, F.functional(ops.buffer_load)(b))" in work.text
    assert [c.level for c in work.changes].count("review") == 1


def test_values(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, d):\n"
        "        self.bias = Tensor.zeros([d])\n"
        "    def forward(self, x):\n"
        "        if self.bias:\n"
        "            x = TensorValue(x).to(self.device_ref)\n"
        "        n = TensorValue(x.shape[0])\n"
        "        return x.to(n.device).rebind([1]), x.type.device\n"
    )
    work = run(Values, text, tmp_path)
    assert "if self.bias is not None:" in work.text
    assert "F.transfer_to(x, self.device_ref)" in work.text
    assert "Tensor.from_graph_value(TensorValue(x.shape[0]))" in work.text
    assert "F.rebind(x.to(n.device), [1]), x.device" in work.text


def test_sharding_becomes_one_device_and_says_so(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, norm, devices):\n"
        "        self.norm = norm\n"
        "        self.norm.sharding_strategy = ShardingStrategy.replicate(2)\n"
        "        self.norm_shards = self.norm.shard(devices)\n"
        "    def shard(self, devices):\n"
        "        return []\n"
    )
    work = run(Sharding, text, tmp_path)
    assert "sharding_strategy" not in work.text.split("class Block")[1]
    assert "def norm_shards(self) -> list[Any]:" in work.text
    assert "return [self.norm]" in work.text
    assert "def shard(" not in work.text
    assert {c.level for c in work.changes} == {"review"}


def test_branches_that_only_set_strategies_go(tmp_path: Path) -> None:
    text = (
        HEAD
        + """

class Block(Module):
    def __init__(self, up, dp: bool) -> None:
        super().__init__()
        self.up = up
        if dp:
            self.up.sharding_strategy = ShardingStrategy.replicate(1)
        else:
            self.up.sharding_strategy = ShardingStrategy.rowwise(1)
        if dp:
            self.up.sharding_strategy = ShardingStrategy.replicate(1)
        else:
            self.dp = dp

    def __call__(self, xs, signals):
        if len(xs) > 1:
            xs = ops.allreduce.sum(xs, signals)
        return xs
"""
    )
    work = run(Sharding, text, tmp_path)
    assert work.text.count("if dp:") == 1
    assert "self.dp = dp" in work.text
    assert "    def __call__(self, xs, signals):\n        return xs\n" in work.text
    assert work.counts()["manual"] == 0


def test_entry(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def input_types(self):\n"
        "        return ()\n"
        "    def trace(self, *input_types):\n"
        '        """Doc."""\n'
        "        def forward(tokens, input_row_offsets, return_n_logits, *kv_inputs):\n"
        "            kv = self.kv_params.unflatten_kv_inputs(iter(kv_inputs))\n"
        "            return self(tokens.tensor, kv, return_n_logits.tensor)\n"
        "        return Graph('g', forward, input_types=input_types)\n"
        "    def __call__(self, tokens, kv, n):\n"
        "        return (tokens,)\n"
    )
    work = run(Entry, text, tmp_path)
    body = work.text.split("class Block")[1]
    assert body.index("tokens: Tensor") < body.index("return_n_logits: Tensor")
    assert body.index("return_n_logits: Tensor") < body.index("input_row_offsets: Tensor")
    assert "iter(value._graph_value for value in kv_inputs)" in body
    assert "        outputs = self.run(tokens, kv, return_n_logits)\n" in body
    assert "        return named_outputs(outputs)\n" in body
    assert "def run(self, tokens, kv, n):" in body
    assert "def trace" not in body
    assert "input_types" not in body


def test_entry_takes_inputs_one_by_one(tmp_path: Path) -> None:
    text = (
        HEAD
        + """

class Model(Module):
    def __call__(self, tokens, kv, n):
        return tokens

    def trace(self, *input_types):
        def forward(*inputs):
            left = iter(inputs)
            tokens = next(left)
            input_row_offsets = next(left)
            return_n_logits = next(left)
            signals = [next(left).buffer for _ in range(2)]
            return self(tokens.tensor, list(left), return_n_logits.tensor)

        return Graph("model", forward, input_types=input_types)
"""
    )
    work = run(Entry, text, tmp_path)
    place = work.text.index("        tokens: Tensor,\n        return_n_logits: Tensor,\n")
    assert "        input_row_offsets: Tensor,\n        *kv_inputs: Tensor," in work.text[place:]
    assert "inputs = (tokens, input_row_offsets, return_n_logits, *kv_inputs)" in work.text
    assert "signals = []" in work.text
    compile(work.text, "block.py", "exec")


def test_entry_keeps_buffers_that_are_no_signals(tmp_path: Path) -> None:
    text = HEAD + (
        "class Model(Module):\n"
        "    def __call__(self, tokens, pools, n):\n"
        "        return tokens\n\n"
        "    def trace(self, *input_types):\n"
        "        def forward(tokens, input_row_offsets, return_n_logits, *rest):\n"
        "            pools = [rest[i].buffer for i in range(2)]\n"
        "            return self(tokens.tensor, pools, return_n_logits.tensor)\n\n"
        "        return Graph('model', forward, input_types=input_types)\n"
    )
    assert "pools = [rest[i] for i in range(2)]" in run(Entry, text, tmp_path).text


def test_imports_stay_above_a_described_constant(tmp_path: Path) -> None:
    text = (
        "from max.graph import ops\n"
        "from max.nn.layer import Module\n\n"
        'ACTIVATIONS = {"silu": ops.silu}\n'
        '"""What a config may name."""\n\n\n'
        "class Block(Module):\n"
        "    pass\n"
    )
    work = run(Operations, text, tmp_path)
    apply(Imports, work)
    order = ["functional as F", "ACTIVATIONS =", "What a config may name"]
    assert [work.text.index(part) for part in order] == sorted(map(work.text.index, order))


@pytest.mark.parametrize("codemod", ORDER, ids=lambda c: c.NAME)
def test_a_second_run_changes_nothing(codemod: type[Codemod], tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, d, dtype, device):\n"
        "        self.device = device\n"
        '        self.weight = Weight("weight", dtype, [d], device=device)\n'
        "        self.layers = LayerList([Linear(d, d, dtype, device)])\n"
        "    def __call__(self, x: TensorValue) -> TensorValue:\n"
        "        return ops.silu(x).to(self.device) * self.weight\n"
    )
    native = {"max.nn.linear.Linear"}
    first = run(codemod, text, tmp_path, native)
    again = work_on(text, tmp_path, native)
    again.text = first.text
    apply(codemod, again)
    assert again.text == first.text


def test_subgraphs(tmp_path: Path) -> None:
    text = HEAD.replace("ops\n", "Graph, ops\n") + (
        "from max import tree\n\n\n"
        "def run(layers, inputs_for, h):\n"
        "    built: dict[int, Graph] = {}\n"
        "    for i, layer in enumerate(layers):\n"
        "        values = inputs_for(i, h)\n"
        "        # one subgraph for all\n"
        "        if 0 not in built:\n"
        '            built[0] = layer.build_subgraph(name="block", inputs=values)\n'
        "        flat = tree.leaves(values)\n"
        '        results = ops.call(built[0], *flat, prefix=f"layers.{i}.")\n'
        "        h = [x.tensor for x in results]\n"
        "    return h\n"
    )
    work = run(Subgraphs, text, tmp_path)
    assert "build_subgraph" not in work.text and "built" not in work.text
    assert "flat" not in work.text
    call = 'as_subgraph(layer, name="block")(*subgraph_arguments(values))'
    assert f"        results = tree.leaves({call}, leaf=Tensor)\n" in work.text
    assert "def subgraph_arguments(values: Sequence[Any]) -> Any:" in work.text
    assert [c.level for c in work.changes] == ["safe", "safe"]


def test_a_dtype_of_its_own_is_kept_or_told(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, config, embedding_dtype):\n"
        "        self.embed = Embedding(8, 4, embedding_dtype, config.device)\n"
        "        self.more = [Embedding(8, 4, embedding_dtype, config.device)]\n"
        "        self.plain = Embedding(8, 4, config.dtype, config.device)\n"
    )
    work = run(Constructors, text, tmp_path, {"max.nn.embedding.Embedding"})
    block = (
        "        with default_dtype(embedding_dtype):\n            self.embed = Embedding(8, dim=4)"
    )
    assert block in work.text
    assert work.text.count("with default_dtype") == 1
    told = [c.what for c in work.changes if c.level == "review"]
    assert told == ["Embedding's dtype embedding_dtype is the default's in V3"]


def test_surface_unwraps_a_copied_list_of_shards(tmp_path: Path) -> None:
    text = HEAD + (
        "class Block(Module):\n"
        "    def __init__(self, mlp, devices):\n"
        "        self.mlp_shards: list[Module] = list(mlp.shard(devices))\n"
        "        shards = list(mlp.shard(devices))\n"
    )
    work = run(Surface, text, tmp_path)
    assert "self.mlp_shards: list[Module] = mlp.shard(devices)\n" in work.text
    assert "shards = list(mlp.shard(devices))\n" in work.text
