"""A port that starts as a full copy of its donor's package, renamed and told apart."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from maxport.emit.prose import docstring
from maxport.plan.compare import Delta
from maxport.plan.max_source import max_root, max_version
from maxport.scaffold.donor import Donor, absolute, class_name
from maxport.scaffold.skeleton import (
    Target,
    graph_names,
    render_arch,
    render_init,
    render_skeleton,
    todo_list,
)

#: Parts of a donor's package that a port does not need.
LEFT_OUT = ("recipes", "__pycache__", "text_encoder")


def render_copy(target: Target, donor: Donor, deltas: Sequence[Delta]) -> dict[str, str]:
    """The donor's files under the port's names, not yet formatted.

    Classes that the registration names get the port's names everywhere; imports from other
    architectures become absolute. Every module's docstring says that the file is still the
    donor's: its own text describes another model.
    """
    folder = max_root() / "pipelines" / "architectures" / donor.arch.slug
    names = {**graph_names(target, donor), class_name(donor.config): target.config}
    names[class_name(donor.model)] = target.pipeline_model
    graph = _graph_file(donor)
    files: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        inside = PurePosixPath(path.relative_to(folder).as_posix())
        if set(inside.parts) & set(LEFT_OUT) or inside.name == "arch.py":
            continue
        module = ".".join([donor.package, *inside.with_suffix("").parts])
        text = path.read_text("utf-8")
        text = _absolute_imports(text, module.removesuffix(".__init__"), donor.package, inside)
        text = _renamed(text, names)
        place = f"{target.slug}.py" if str(inside) == graph else str(inside)
        text = text.replace(f".{PurePosixPath(graph).stem} import", f".{target.slug} import")
        files[place] = _told_apart(text, donor, inside, deltas if str(inside) == graph else ())
    files["__init__.py"] = render_init(target, donor)
    files["arch.py"] = _own_imports(render_arch(target, donor), donor, target)
    needed = {"model.py", "model_config.py", "weight_adapters.py", f"{target.slug}.py"}
    missing = needed - files.keys()
    if f"{target.slug}.py" in missing:
        missing.add("model.py")  # the donor runs another package's graph: subclass that one
    if any(not adapter.module.startswith(donor.package) for adapter in donor.adapters):
        missing.add("weight_adapters.py")  # some are another package's: call them from here
    skeleton = render_skeleton(target, donor, deltas)
    return files | {name: skeleton[name] for name in missing}


def _graph_file(donor: Donor) -> str:
    """The donor's graph file inside its package; empty if the graph is another package's."""
    for found in donor.graphs:
        if found.module.startswith(donor.package + "."):
            return found.module.removeprefix(donor.package + ".").replace(".", "/") + ".py"
    return "no graph of its own"


def _absolute_imports(text: str, module: str, package: str, inside: PurePosixPath) -> str:
    """Imports that leave the donor's package made absolute, those that stay in it relative."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        place = absolute(module, node)
        if place == package or place.startswith(package + "."):
            continue
        dots = "." * node.level + (node.module or "")
        at = node.lineno - 1
        lines[at] = lines[at].replace(f"from {dots} ", f"from {place} ", 1)
    own = "." * len(inside.parts)
    return re.sub(rf"^(\s*from ){re.escape(package)}\.", rf"\1{own}", "".join(lines), flags=re.M)


def _renamed(text: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def _told_apart(text: str, donor: Donor, inside: PurePosixPath, deltas: Sequence[Delta]) -> str:
    """The file with a module docstring that says what it still is."""
    tree = ast.parse(text)
    body = text
    if ast.get_docstring(tree) is not None:
        first = tree.body[0]
        lines = text.splitlines(keepends=True)
        body = "".join(lines[: first.lineno - 1] + lines[(first.end_lineno or 1) :])
    head = docstring(
        f"Copy of MAX {max_version()} `{donor.arch.slug}/{inside}`, NOT YET adapted. TODO: change "
        "what differs, then say here what this file does."
    )
    license_lines = re.match(r"(?:#.*\n)*", body)
    kept = license_lines.group() if license_lines else ""
    return f"{kept}{head}\n\n{todo_list(deltas)}\n{body[len(kept) :].lstrip()}"


def _own_imports(text: str, donor: Donor, target: Target) -> str:
    """arch.py with imports from the donor's package replaced by the copy's."""
    return text.replace(f"from {donor.package}.", "from .").replace(
        f"from {donor.package} import", "from . import"
    )
