"""How a V2 pipeline model constructs its root, and what of it reaches V3."""

from __future__ import annotations

import ast
from pathlib import Path

from maxport.migrate.construction import find_construction, pipeline_chain
from maxport.migrate.kinds import Kinds
from maxport.migrate.registered import registrations
from maxport.migrate.run import migrate
from maxport.migrate.sources import Definition
from maxport.migrate.target import Target, open_target

MODEL = """\
import functools

from max.nn.layer import LayerList, Module
from max.nn.linear import Linear
from max.pipelines.lib import PipelineModel


class Root(Module):
    def __init__(self, layers, head, tied):
        super().__init__()
        self.layers = LayerList(layers)
        self.head = head

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class TinyModel(PipelineModel):
    def load_model(self, session):
        size = self.huggingface_config.hidden_size
        unrelated = self.count(size)
        make = functools.partial(Linear, size, size)
        layers = []
        # one per hidden layer
        for _ in range(3):
            layers.append(make(self.dtype, self.device))
        head = Linear(size, size, self.dtype, self.device)
        if self.tied:
            head.set_shared_weight("weight", layers[0].weight)
        print(unrelated)
        model = Root(layers, head, tied=self.tied)
        return session.load(model, size)
"""
ARCH = """\
from max.pipelines.lib import SupportedArchitecture

from .model import TinyModel

tiny = SupportedArchitecture(name="TinyForCausalLM", pipeline_model=TinyModel, batching=None)
"""


def tiny(folder: Path, model: str = MODEL) -> Target:
    package = folder / "tiny"
    package.mkdir()
    (package / "model.py").write_text(model)
    (package / "arch.py").write_text(ARCH)
    return open_target(str(package))


def construction_text(target: Target) -> str:
    kinds = Kinds(target.sources)
    first = registrations(kinds, target)[0]
    assert first.name == "TinyForCausalLM"
    chain = pipeline_chain(kinds, first.pipeline, target.package)
    found = find_construction(kinds, Definition(f"{target.package}.model", "Root"), chain)
    assert found is not None
    return found.text


def test_only_what_leads_to_the_root_is_taken(tmp_path: Path) -> None:
    text = construction_text(tiny(tmp_path))
    ast.parse(f"def construct(self, model_config):\n    {text.replace(chr(10), chr(10) + '    ')}")
    assert text.startswith("size = self.huggingface_config.hidden_size\n")
    assert "unrelated" not in text
    assert "# one per hidden layer\nfor _ in range(3):\n    layers.append(" in text
    assert 'head.set_shared_weight("weight", layers[0].weight)' in text
    assert text.endswith("return Root(layers, head, tied=self.tied)")


def test_a_config_parameter_of_another_name_is_bound(tmp_path: Path) -> None:
    model = MODEL.replace("self, session", "self, config").replace(
        "self.huggingface_config.hidden_size", "config.hidden_size"
    )
    assert construction_text(tiny(tmp_path, model)).startswith("config = model_config\nsize = ")


def test_layers_constructed_there_go_through_the_codemods(tmp_path: Path) -> None:
    result = migrate(tiny(tmp_path))
    assert result is not None
    text = result.files["model.py"]
    ast.parse(text)
    assert "functools.partial(Linear, size, size)" in text
    assert "from .carried.linear import Linear" in text
    assert "head.weight = None  # held by layers[0].weight" in text
    assert "nn_model = Root(layers, head, tied=self.tied)" in text
    said = [c.what for c in result.changes if c.file == "model.py" and c.level == "review"]
    assert any("holds no weight of its own" in what for what in said)
