"""What a port was made from and what was proven, as PORT.md and port.json show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from maxport import __version__
from maxport.emit.portdoc import render_portdoc
from maxport.emit.spec import Drop, Rename, Tie, Transpose

if TYPE_CHECKING:
    from maxport.trace.port import Port


def describe(port: Port, model: str, revision: str | None = None) -> dict[str, Any]:
    """Evidence for `render_portdoc`.

    Args:
        port: The port.
        model: The checkpoint as the user named it.
        revision: Its revision on the Hub.
    """
    study, spec = port.study, port.spec
    packages = ("max", "transformers", "torch")
    evidence: dict[str, Any] = {
        "name": spec.display_name,
        "slug": spec.slug,
        "class_name": spec.class_name,
        "model": {"name": model} | ({"revision": revision} if revision else {}),
        "versions": {"maxport": __version__} | {p: version(p) for p in packages},
        "reference": {"class": spec.hf_class, "file": spec.hf_file},
        "config": [
            {"key": f.read.removeprefix("hf."), "value": f.annotation, "use": f.name}
            for f in spec.config_fields
        ],
        "idioms": idiom_rows(port),
        "coverage": {
            "traced operations": study.total,
            "in proven idioms": study.covered,
            "emitted one by one": study.plain or "none",
        },
        "weights": [_weight(rule) for rule in spec.weight_rules],
        "notes": _notes(port),
    }
    return evidence


def idiom_rows(port: Port) -> list[dict[str, Any]]:
    """One row per idiom: how often, with which parameters, and its largest difference."""
    accepted = [f for f in port.study.findings if f.accepted]
    rows = []
    for name, count in Counter(f.op for f in accepted).items():
        same = [f for f in accepted if f.op == name]
        parameters = {
            k: v
            for k, v in same[0].params.items()
            if k not in ("weight", "bias", "rotation") and v is not None
        }
        worst = max(f.difference for f in same)
        proof = f"float64, largest difference {worst:.1e}" if worst else "by construction, probed"
        rows.append(
            {"idiom": name, "where": f"{count} places", "parameters": parameters, "proof": proof}
        )
    for finding in port.study.findings:
        if not finding.accepted:
            rows.append(
                {
                    "idiom": f"not {finding.op}",
                    "where": finding.scope,
                    "parameters": {},
                    "proof": finding.why,
                }
            )
    return rows


def _weight(rule: Any) -> dict[str, str]:
    if isinstance(rule, Transpose):
        return {"checkpoint": rule.pattern, "graph": rule.pattern, "how": "transposed"}
    if isinstance(rule, Tie):
        return {"checkpoint": rule.source, "graph": rule.target, "how": "shared where not stored"}
    if isinstance(rule, Rename):
        return {"checkpoint": rule.from_prefix, "graph": rule.to_prefix, "how": "renamed"}
    if isinstance(rule, Drop):
        return {"checkpoint": rule.pattern, "graph": "", "how": f"dropped: {rule.why}"}
    return {
        "checkpoint": " + ".join(rule.sources),
        "graph": rule.target,
        "how": "stored end to end",
    }


def _notes(port: Port) -> list[str]:
    notes = ["Structure and numbers were read off the traced model at two sizes."]
    if any(f.params.get("softcap") or f.params.get("slopes") for f in port.study.findings):
        notes.append(
            "Attention writes its scores out, because MAX's kernel has neither soft cap nor ALiBi; "
            "long prompts cost memory in proportion to new tokens times cached tokens."
        )
    return notes


def with_documents(
    port: Port,
    model: str,
    revision: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The port's files with PORT.md and port.json; `more` holds further sections of evidence."""
    evidence = {**describe(port, model, revision), **(more or {})}
    return {**port.files, **render_portdoc(evidence, port.files)}
