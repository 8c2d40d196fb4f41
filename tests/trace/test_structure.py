"""A port is right for what was traced, and refuses a checkpoint that computes something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxport.emit.write import write_port
from maxport.engine.build import build_port
from maxport.errors import MaxportError
from maxport.trace.port import make_port
from maxport.twin import default_config, save_twin, twin_config


@pytest.fixture(scope="module")
def port_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    port = make_port(default_config("llama"), slug="refusing_port")
    return write_port(tmp_path_factory.mktemp("ports"), port.spec.slug, port.files)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu', not 'silu'"),
        ({"mlp_bias": True}, "mlp_bias=True, not False"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "rope_parameters.rope_type='linear', not 'default'",
        ),
    ],
)
def test_another_structure_is_refused(
    change: dict[str, object], says: str, port_dir: Path, tmp_path: Path
) -> None:
    config = twin_config(default_config("llama"), 2)
    for key, value in change.items():
        setattr(config, key, value)
    save_twin(config, tmp_path / "checkpoint")
    with pytest.raises(MaxportError) as caught:
        build_port(port_dir, tmp_path / "checkpoint", return_logits="all")
    assert says in str(caught.value) and "maxport port" in str(caught.value)
