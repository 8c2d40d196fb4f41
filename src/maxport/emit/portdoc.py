"""`PORT.md` and `port.json`: what a port is, what it was made from, and what proves it.

Both are made from one dict, `evidence`, whose keys are the sections below. A section that is absent
or empty is left out; a key that is no section is an error, so that nothing measured gets lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxport.errors import MaxportError

Row = Mapping[str, Any]


def render_portdoc(evidence: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Text of `PORT.md` and `port.json`, by file name.

    Args:
        evidence: `name` (display name), `slug`, `class_name`; then any of `plan` (a paragraph),
            `model` (name, revision, ...), `versions` (package to version), `reference` (the
            Hugging Face class, file, sha256), `config` (rows key, value, use), `deltas` (rows
            component, reference, donor, change), `idioms` (rows idiom, where, parameters, proof),
            `coverage` (counts), `weights` (rows checkpoint, graph, how), `verdicts` (rows check,
            verdict, detail), `tests` (a paragraph), `notes` (list of sentences).
        files: The port's other files as they are written, to be hashed.

    Raises:
        MaxportError: If `evidence` lacks a name or has a key that is no section.
    """
    lacking = [key for key in ("name", "slug", "class_name") if not evidence.get(key)]
    unknown = sorted(set(evidence) - {"name", "slug", "class_name", *SECTIONS})
    if lacking or unknown:
        raise MaxportError(
            f"the port's evidence lacks {lacking} and has no section for {unknown}",
            where=str(evidence.get("slug", "")),
        )
    hashes = {name: _sha256(text) for name, text in sorted(files.items())}
    document = {**evidence, "files": hashes}
    return {
        "PORT.md": _markdown(document),
        "port.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n",
    }


def serve_commands(slug: str, model: str, class_name: str) -> list[str]:
    """The commands that run a port, from the folder that holds it.

    A port of a class that MAX has itself answers only where ModuleV3 is preferred.
    """
    flag = " --prefer-module-v3" if class_name.endswith("_ModuleV3") else ""
    return [
        f"max serve --custom-architectures {slug} --model {model}{flag}",
        f'max generate --custom-architectures {slug} --model {model}{flag} --prompt "Hello"',
        f"maxport verify {model} --port-dir {slug}",
    ]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _markdown(document: Mapping[str, Any]) -> str:
    head = f"# {document['name']} for MAX\n\nRegisters `{document['class_name']}`."
    parts = [head]
    for key, render in SECTIONS.items():
        if document.get(key):
            parts.append(render(document[key]))
    model = document.get("model", {}).get("name", "<model>")
    commands = "\n".join(serve_commands(document["slug"], model, document["class_name"]))
    parts.append(f"## How to serve\n\nFrom the folder above this one:\n\n```bash\n{commands}\n```")
    return "\n\n".join(parts) + "\n"


def table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """A Markdown table; a row without a column's key leaves the cell empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")


def _pairs(title: str) -> Callable[[Row], str]:
    def render(section: Row) -> str:
        lines = [f"- {key}: {_cell(value)}" for key, value in section.items()]
        return f"## {title}\n\n" + "\n".join(lines)

    return render


def _table(title: str, *columns: str) -> Callable[[Sequence[Row]], str]:
    """A section whose table has these columns first, then whatever else the rows hold."""

    def render(section: Sequence[Row]) -> str:
        more = dict.fromkeys(key for row in section for key in row if key not in columns)
        return f"## {title}\n\n" + table([*columns, *more], section)

    return render


def _paragraph(title: str) -> Callable[[str], str]:
    return lambda section: f"## {title}\n\n{section.strip()}"


def _list(title: str) -> Callable[[Sequence[str]], str]:
    return lambda section: f"## {title}\n\n" + "\n".join(f"- {line}" for line in section)


#: Sections of PORT.md in order: the evidence's key and how it is written.
SECTIONS: dict[str, Callable[[Any], str]] = {
    "plan": _paragraph("Plan"),
    "verdicts": _table("Verdicts", "check", "verdict", "detail"),
    "model": _pairs("Checkpoint"),
    "versions": _pairs("Versions"),
    "reference": _pairs("Reference"),
    "config": _table("Configuration", "key", "value", "use"),
    "deltas": _table("Deltas", "component", "reference", "donor", "change"),
    "idioms": _table("Idioms", "idiom", "where", "parameters", "proof"),
    "coverage": _pairs("Coverage"),
    "weights": _table("Weights", "checkpoint", "graph", "how"),
    "tests": _paragraph("Tests"),
    "notes": _list("Notes"),
}
