"""MAX's own pipeline with a port: what it refuses before it compiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxport.engine.pipeline_run import PipelineRun
from maxport.errors import MaxportError

PORT = Path(__file__).parents[1] / "fixtures" / "ports" / "helium"


def test_a_port_that_does_not_load_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "helium"}))
    with pytest.raises(MaxportError, match="does not load the port"):
        PipelineRun(PORT, tmp_path)
