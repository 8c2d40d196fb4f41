"""`tests/test_<slug>.py`: the port's parity with Hugging Face, one build for all tests."""

from __future__ import annotations

from maxport.emit.prose import docstring

#: Checks of `maxport verify` that every text model has, in the order of its report.
PROBES = ("ragged", "chunked", "decode", "logits=last", "logits=all", "logits=variable")


def render_test_file(slug: str, display_name: str, model: str) -> dict[str, str]:
    """A pytest file below the port's folder, by file name, not yet formatted.

    Args:
        slug: The port's folder.
        display_name: How the docstring names the model.
        model: Checkpoint the tests run on unless MAXPORT_MODEL names another.
    """
    head = docstring(
        f"{display_name}: the port's logits against Hugging Face's. The graph is built once for "
        "the module; set MAXPORT_ENGINE=compile to compile it with MAX instead of evaluating it, "
        "and MAXPORT_MODEL to test another checkpoint."
    )
    probes = ", ".join(f'"{probe}"' for probe in PROBES)
    return {
        f"tests/test_{slug}.py": f'''{head}

from __future__ import annotations

import os
from pathlib import Path

import pytest
from maxport.checkpoint import open_checkpoint
from maxport.verify import Report, verify_port

PORT = Path(__file__).resolve().parents[1]
MODEL = os.environ.get("MAXPORT_MODEL", {model!r})
ENGINE = os.environ.get("MAXPORT_ENGINE", "evaluate")


@pytest.fixture(scope="module")
def report() -> Report:
    """All probes, run once."""
    folder = open_checkpoint(MODEL).weights_folder()
    return verify_port(folder, PORT, engine=ENGINE, model=MODEL)


@pytest.mark.parametrize("probe", [{probes}])
def test_probe_equals_the_reference(probe: str, report: Report) -> None:
    """One way of feeding tokens, or one choice of logits."""
    row = next(row for row in report.rows if row.name == probe)
    assert row.verdict == "equal", row.why


def test_nothing_differs(report: Report) -> None:
    """Probes that only some models have, such as those past a sliding window, agree too."""
    assert report.verdict == "equal", report.why
'''
    }
