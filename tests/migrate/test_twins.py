"""What V2 asks of a twin beyond transformers' class defaults."""

from __future__ import annotations

import json
from pathlib import Path

from maxport.migrate.closure import Closure
from maxport.migrate.keys import keys_read
from maxport.migrate.kinds import Kinds
from maxport.migrate.plan import Plan, make_plan
from maxport.migrate.sources import Definition
from maxport.migrate.target import open_target
from maxport.migrate.twins import variants

CODE = """\
from dataclasses import dataclass

from max.graph import TensorValue
from max.nn.layer import Module


@dataclass
class BaseConfig:
    width: int = 8
    method: str = "greedy"
    unread: int = 3


@dataclass
class TinyConfig(BaseConfig):
    width: int = 16
    offset: float | None = None
    period: int = 2

    @classmethod
    def initialize(cls, hf):
        period = getattr(hf, "period", 4)
        return cls(width=hf.width, method=required(hf, "method"), offset=hf.offset, period=period)


class Gate(Module):
    def __init__(self, method: str) -> None:
        if method != "noaux":
            raise ValueError(method)

    def __call__(self, x: TensorValue) -> TensorValue:
        return x
"""


def planned(folder: Path) -> Plan:
    file = folder / "tiny.py"
    file.write_text(CODE)
    target = open_target(str(file))
    module = target.module_name(file)
    target.sources.load(module, file)
    plan = Plan(target, Kinds(target.sources), Definition(module, "Gate"), Closure())
    plan.graph.append(module)
    return plan


def test_keys_are_what_the_settings_class_reads_and_declares(tmp_path: Path) -> None:
    assert keys_read(planned(tmp_path)) == {"width": 16, "method": "noaux"}


def test_an_installed_architecture_reads_keys_that_transformers_does_not_save() -> None:
    found = keys_read(make_plan(open_target("hy_v3")))
    assert found["route_norm"] is True
    assert found["first_k_dense_replace"] == 1


def test_variants_come_closer_to_published_checkpoints(tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps({"width": 5}))
    plan = planned(tmp_path)
    found = {
        added: json.loads((folder / "config.json").read_text())
        for added, folder in variants(twin, plan, "TinyForCausalLM")
    }
    assert found[""] == {"width": 5}
    assert found["the keys V2 reads"] == {"width": 5, "method": "noaux"}
    assert found["the keys V2 reads and YaRN"]["rope_scaling"]["rope_type"] == "yarn"
    assert json.loads((twin / "config.json").read_text()) == {"width": 5}
