"""Ports with one fault each that only importing or building shows; correct ones pass.

All are probed by one process, one after the other, because importing MAX takes seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from tiny_helium import checkpoint, port, tensors

from maxport.checkpoint import open_checkpoint
from maxport.children import child_environment
from maxport.gates import adapter, arch, build, import_smoke, registry_dry_run, tied
from maxport.gates.base import Port, Subject
from maxport.gates.probe import read_steps

CHECKS = {
    "import": import_smoke.check,
    "registry": registry_dry_run.check,
    "arch": arch.check,
    "build": build.check,
    "weights": adapter.check,
    "tied head": tied.check,
}


@dataclass(frozen=True)
class Case:
    """A port and checkpoint, and the gate that must report them; no gate if both are correct."""

    name: str
    gate: str = ""
    message: str = ""
    fix: str = ""
    edits: dict[str, tuple[str, str]] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    more: dict[str, tuple[int, ...]] = field(default_factory=dict)
    modes: str = ""  # build for these; empty: do not build
    warning: bool = False
    lacks: tuple[str, ...] | None = None  # check the names of the checkpoint without these
    has: tuple[str, ...] = ()  # and with these


ARCH_IMPORT = "from .model import HeliumPipelineModel\n"
LLAMA = "from max.pipelines.architectures.llama3_modulev3.model import Llama3Model\n"
CONVERTED = "    return weights\n\n\n@cache"
EXTRA = (
    '    weights["model.left_over"] = weights["model.norm.weight"]\n    return weights\n\n\n@cache'
)
LIKE_LLAMA = {"architectures": ["LlamaForCausalLM"]}

CASES = (
    Case("correct", modes="last,all,variable"),
    Case("correct_bfloat16", model={"dtype": "bfloat16"}, modes="last"),
    Case(
        "correct_tied",
        model={"drop": ("lm_head.weight",), "tie_word_embeddings": True},
        modes="last",
    ),
    Case(
        "correct_v3_of_native",
        edits={"arch": ('"HeliumForCausalLM"', '"LlamaForCausalLM_ModuleV3"')},
        model=LIKE_LLAMA,
    ),
    Case(
        "no_architectures",
        "import",
        "__init__.py has no ARCHITECTURES",
        "ARCHITECTURES = [",
        edits={"init": ("ARCHITECTURES = [helium_arch]", "MODELS = [helium_arch]")},
    ),
    Case(
        "a_tuple",
        "import",
        "ARCHITECTURES is empty or not a list",
        edits={"init": ("[helium_arch]\n", "(helium_arch,)\n")},
    ),
    Case(
        "empty",
        "import",
        "ARCHITECTURES is empty or not a list",
        edits={"init": ("[helium_arch]\n", "[]\n")},
    ),
    Case(
        "beyond",
        "import",
        "a relative import leaves the port's package",
        "from the port's own folder",
        edits={"model": ("from .helium", "from ..helium")},
    ),
    Case(
        "wrong_name",
        "registry",
        "the checkpoint says HeliumForCausalLM: nothing answers",
        'set name="HeliumForCausalLM"',
        edits={"arch": ('name="HeliumForCausalLM"', 'name="Helium"')},
    ),
    Case(
        "falls_back",
        "registry",
        "MAX's own LlamaForCausalLM answers in its place",
        'set name="LlamaForCausalLM_ModuleV3"',
        edits={"arch": ('name="HeliumForCausalLM"', 'name="LlamaForCausalLMV3"')},
        model={"architectures": ["LlamaForCausalLM"]},
    ),
    Case(
        "suffix_forgotten",
        "registry",
        "the port replaces MAX's own LlamaForCausalLM",
        "--prefer-module-v3",
        edits={"arch": ('name="HeliumForCausalLM"', 'name="LlamaForCausalLM"')},
        model=LIKE_LLAMA,
    ),
    Case(
        "no_planner",
        "arch",
        "no memory_planner",
        "PagedMemoryPlanner",
        edits={"arch": ("    memory_planner=PagedMemoryPlanner,\n", "")},
    ),
    Case(
        "shared_model",
        "arch",
        "also serves LlamaForCausalLM_ModuleV3",
        "a PipelineModel class of its own",
        edits={
            "arch": ("pipeline_model=HeliumPipelineModel", "pipeline_model=Llama3Model"),
        },
    ),
    Case(
        "extra",
        "weights",
        "1 weights go nowhere, MAX ignores them silently: model.left_over",
        "drop it by name",
        edits={"weight_adapters": (CONVERTED, EXTRA)},
        modes="last",
    ),
    Case(
        "bias_in_checkpoint",
        "weights",
        "2 weights go nowhere, MAX ignores them silently: model.layers.0.self_attn.qkv_proj.bias",
        more={
            f"model.layers.{i}.self_attn.{p}_proj.bias": (size,)
            for i in range(2)
            for p, size in (("q", 64), ("k", 32), ("v", 32))
        },
        modes="last",
    ),
    Case(
        "bias_in_config",
        "weights",
        "2 parameters get no weight: model.layers.0.self_attn.qkv_proj.bias",
        model={"attention_bias": True},
        modes="last",
    ),
    Case(
        "cached_tensor",
        "weights",
        "1 parameters get no weight: model.angles",
        "Tensors kept on self become parameters",
        edits={
            "helium": (
                "        self.rope = Rot",
                "        self.angles = Tensor.zeros([4])\n        self.rope = Rot",
            )
        },
        modes="last",
    ),
    Case(
        "more_rows_than_vocab_size",
        "weights",
        "model.embed_tokens.weight [512, 64] for [500, 64]",
        "config sizes",
        more={"model.embed_tokens.weight": (512, 64), "lm_head.weight": (512, 64)},
        modes="last",
    ),
    Case(
        "not_transposed",
        "weights",
        "model.layers.0.mlp.down_proj.weight [80, 64] for [64, 80]",
        "transpose them",
        edits={
            "weight_adapters": (
                CONVERTED,
                '    for name in list(weights):\n        if name.endswith("down_proj.weight"):\n'
                "            array = elements(weights[name]).T\n"
                "            weights[name] = from_elements(array, weights[name].dtype, name)\n"
                + CONVERTED,
            )
        },
        modes="last",
    ),
    Case(
        "not_cast",
        "weights",
        "another dtype than their parameter: model.embed_tokens.weight bfloat16 for float32",
        "astype(config.dtype)",
        edits={
            "model": (
                "weight.astype(model_config.dtype) if weight.dtype.is_float() else weight",
                "weight",
            )
        },
        model={"dtype": "bfloat16"},
        modes="last",
    ),
    Case(
        "no_shape",
        "weights",
        "WeightData.shape is no max.graph.Shape: model.layers.0.self_attn.qkv_proj.weight",
        "Shape(array.shape)",
        edits={"weight_adapters": ("dtype, Shape(array.shape))", "dtype, array.shape)")},
        modes="last",
    ),
    Case(
        "twice",
        "weights",
        "running the adapter on its own result changes it: model.norm.weight",
        edits={
            "weight_adapters": (
                CONVERTED,
                '    norm = weights["model.norm.weight"]\n'
                "    shifted = np.asarray(norm.to_buffer().to_numpy()) + 1\n"
                '    weights["model.norm.weight"] = WeightData.from_numpy(shifted, norm.name)\n'
                + CONVERTED,
            )
        },
        modes="last",
        warning=True,
    ),
    Case(
        "own_head_always",
        "tied head",
        "the graph has its own head lm_head.weight, the checkpoint stores only",
        "decide by the loaded weights",
        edits={
            "model_config": (
                'self.tie_word_embeddings = "lm_head.weight" not in state_dict',
                "self.tie_word_embeddings = False",
            )
        },
        model={"drop": ("lm_head.weight",)},
        modes="last",
    ),
    Case(
        "head_ignored",
        "tied head",
        "the checkpoint has a head of its own (lm_head.weight) that the graph ignores",
        edits={
            "model_config": (
                'self.tie_word_embeddings = "lm_head.weight" not in state_dict',
                "self.tie_word_embeddings = True",
            )
        },
        modes="last",
    ),
    Case(
        "config_lies",
        "tied head",
        "config.json says tie_word_embeddings=true, the checkpoint has",
        model={"tie_word_embeddings": True},
        modes="last",
        warning=True,
    ),
    Case("correct_names", modes="last", lacks=()),
    Case("correct_names_tied", modes="last", lacks=("lm_head.weight",)),
    Case(
        "name_missing",
        "weights",
        "the checkpoint has no tensors for model.layers.{i}.mlp.down_proj.weight",
        lacks=("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        modes="last",
    ),
    Case(
        "name_unknown",
        "weights",
        "the adapter refuses the checkpoint's names: ValueError: checkpoint tensor 'model.extra'",
        lacks=(),
        has=("model.extra",),
        modes="last",
    ),
    Case(
        "left_over_range",
        "build",
        "the graph does not build (variable logits)",
        "ReturnLogits.VARIABLE",
        edits={"helium": ("last_n_rows(row_offsets, return_n_logits)", "last_n_rows(row_offsets)")},
        modes="last,variable",
    ),
)

# Registrations are undone between ports, as if each had a process of its own.
RUNNER = """
import json, sys
from max.pipelines.lib.arch_lookup import ARCH_LOOKUP
import max.pipelines
from maxport.engine.port_probe import main

TABLES = ("architectures", "_architectures_by_task", "_lazy_architectures")
fresh = {table: dict(getattr(ARCH_LOOKUP, table)) for table in TABLES}
for arguments in json.load(open(sys.argv[1])):
    for table, content in fresh.items():
        getattr(ARCH_LOOKUP, table).clear()
        getattr(ARCH_LOOKUP, table).update(content)
    main(arguments)
"""


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    """Every case, probed."""
    root = tmp_path_factory.mktemp("ports")
    runs, models, ports = [], {}, {}
    for case in CASES:
        arrays = tensors(**case.more)
        models[case.name] = checkpoint(root / "models" / case.name, arrays, **case.model)
        ports[case.name] = port(root / case.name, **case.edits)
        if case.name == "shared_model":
            file = ports[case.name] / "arch.py"
            file.write_text(file.read_text().replace(ARCH_IMPORT, LLAMA))
        config = json.loads((models[case.name] / "config.json").read_text())
        run = [str(ports[case.name]), config["architectures"][0], str(root / f"{case.name}.jsonl")]
        if case.modes:
            run += ["--model", str(models[case.name]), "--modes", case.modes]
        if case.lacks is not None:
            listed = [[n, list(a.shape)] for n, a in arrays.items() if n not in case.lacks]
            listed += [[name, [64]] for name in case.has]
            (root / f"{case.name}.headers").write_text(json.dumps(listed))
            run += ["--headers", str(root / f"{case.name}.headers")]
        runs.append(run)
    (root / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-c", RUNNER, str(root / "runs.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=child_environment())
    found = {}
    for case in CASES:
        model = open_checkpoint(str(models[case.name]), inspect_only=True)
        lines = (root / f"{case.name}.jsonl").read_text().splitlines()
        found[case.name] = Subject(
            port=Port(ports[case.name]),
            class_name=model.architecture or "",
            config=model.config,
            checkpoint=model,
            trouble=None,
            steps=read_steps([json.loads(line) for line in lines]),
        )
    return found


@pytest.mark.parametrize("case", [c for c in CASES if c.gate], ids=lambda case: case.name)
def test_fault_is_reported_by_its_gate(case: Case, subjects: dict[str, Subject]) -> None:
    result = CHECKS[case.gate](subjects[case.name])
    told = [f for f in result.findings if case.message in f.what]
    assert told, [result.not_run, *(f.what for f in result.findings)]
    assert case.fix in told[0].fix and told[0].where
    assert result.passed == case.warning
    assert told[0].level == ("warning" if case.warning else "error")


@pytest.mark.parametrize("case", [c for c in CASES if not c.gate], ids=lambda case: case.name)
def test_no_false_alarm(case: Case, subjects: dict[str, Subject]) -> None:
    looked = CHECKS if case.modes else ("import", "registry", "arch")
    for gate in looked:
        result = CHECKS[gate](subjects[case.name])
        assert result.passed and not result.findings, (gate, result)


def test_gates_after_a_failed_import_say_why_they_did_not_look(
    subjects: dict[str, Subject],
) -> None:
    for gate in ("registry", "arch"):
        result = CHECKS[gate](subjects["empty"])
        assert not result.passed and result.not_run == "an earlier step failed"
