"""PORT.md and port.json hold the same evidence."""

from __future__ import annotations

import hashlib
import json

import pytest

from maxport.emit.portdoc import render_portdoc
from maxport.errors import MaxportError

EVIDENCE = {
    "name": "Helium",
    "slug": "helium",
    "class_name": "HeliumForCausalLM",
    "plan": "Port Helium on ModuleV3, float32 and bfloat16.",
    "model": {"name": "kyutai/helium-1-2b", "revision": "main"},
    "versions": {"max": "26.7.0", "transformers": "5.12.1"},
    "idioms": [
        {"idiom": "rms_norm", "where": "model.norm", "parameters": {"offset": 0}, "proof": 1e-16}
    ],
    "verdicts": [{"check": "ragged | prefill", "verdict": "equal", "detail": "2e-6", "tier": 2}],
    "notes": ["Windows are not used."],
}


def test_both_files_hold_everything() -> None:
    files = {"arch.py": "x = 1\n"}
    made = render_portdoc(EVIDENCE, files)
    document = json.loads(made["port.json"])
    assert document.pop("files") == {"arch.py": hashlib.sha256(b"x = 1\n").hexdigest()}
    assert document == EVIDENCE
    text = made["PORT.md"]
    for expected in (
        "# Helium for MAX",
        '| rms_norm | model.norm | {"offset": 0} | 1e-16 |',
        "| check | verdict | detail | tier |",
        "| ragged \\| prefill | equal | 2e-6 | 2 |",
        "max serve --custom-architectures helium --model kyutai/helium-1-2b",
        "- Windows are not used.",
    ):
        assert expected in text
    assert "## Deltas" not in text


def test_evidence_without_a_section_or_a_name_is_refused() -> None:
    with pytest.raises(MaxportError, match=r"no section for \['timing'\]"):
        render_portdoc({**EVIDENCE, "timing": 3}, {})
    with pytest.raises(MaxportError, match=r"lacks \['class_name'\]"):
        render_portdoc({"name": "A", "slug": "a"}, {})
