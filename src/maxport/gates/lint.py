"""Traps of MAX's APIs that import and often build, but compute something else or hang."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxport.gates.base import Finding, GateResult, Subject

NAME = "lint"


@dataclass(frozen=True)
class File:
    """One file of the port and what its rules need to know."""

    name: str
    tree: ast.Module
    config: Mapping[str, Any]

    @property
    def v3(self) -> bool:
        """Whether the file is written in ModuleV3."""
        return any(module.startswith("max.experimental") for module, _ in self.imports())

    def imports(self) -> Iterator[tuple[str, str]]:
        """(module, name) of every `from module import name`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, alias.name) for alias in node.names)

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call with its dotted name, such as `ops.constant`; empty where it has none."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node, dotted(node.func)

    def finding(self, node: ast.AST, what: str, fix: str, level: Any = "error") -> Finding:
        """A finding at a node."""
        return Finding(what, f"{self.name}:{getattr(node, 'lineno', 0)}", fix, level)


Rule = Callable[[File], Iterator[Finding]]


def check(subject: Subject) -> GateResult:
    """All rules over all files."""
    findings: list[Finding] = []
    for name, tree in subject.port.trees.items():
        file = File(name, tree, subject.config)
        for rule in RULES:
            findings += rule(file)
    count = len(subject.port.trees)
    return GateResult(NAME, f"{count} files, {len(RULES)} rules", tuple(findings))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def constant_without_device(file: File) -> Iterator[Finding]:
    """`ops.constant` needs its device."""
    for call, name in file.calls():
        if name == "ops.constant" and len(call.args) < 3 and not _keyword(call, "device"):
            yield file.finding(call, "ops.constant without device=", "pass device=, e.g. x.device")


def to_device_ref(file: File) -> Iterator[Finding]:
    """A ModuleV3 Tensor moves to a Device."""
    if not file.v3:
        return
    for call, _name in file.calls():
        is_to = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
        if is_to and call.args and _is_device_ref(call.args[0]):
            what = "Tensor.to takes a Device, not a DeviceRef"
            yield file.finding(call, what, "x.to(other.device), or DeviceRef(...).to_device()")


def _is_device_ref(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and dotted(node.func).split(".")[0] == "DeviceRef"
        and (not dotted(node.func).endswith("to_device"))
    )


def unpacked_tensor(file: File) -> Iterator[Finding]:
    """Iterating a symbolic Tensor never ends."""
    for function in ast.walk(file.tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        tensors = {
            a.arg
            for a in arguments
            if a.annotation and dotted(a.annotation).split(".")[-1] in ("Tensor", "TensorValue")
        }
        for node in ast.walk(function):
            if (name := _iterated(node)) and name in tensors:
                what = f"the Tensor {name!r} is unpacked or iterated: tracing never ends"
                place = node.iter if isinstance(node, ast.comprehension) else node
                yield file.finding(place, what, "use F.split, F.chunk or indices")


def _iterated(node: ast.AST) -> str:
    """The variable a node unpacks or iterates, or empty."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple | ast.List):
        return dotted(node.value)
    if isinstance(node, ast.For | ast.comprehension):
        return dotted(node.iter)
    if isinstance(node, ast.Call):
        starred = [arg for arg in node.args if isinstance(arg, ast.Starred)]
        return dotted(starred[0].value) if starred else ""
    return ""


def starred_module_list(file: File) -> Iterator[Finding]:
    """`ModuleList` takes one iterable."""
    for call, name in file.calls():
        if name.split(".")[-1] == "ModuleList" and any(
            isinstance(a, ast.Starred) for a in call.args
        ):
            yield file.finding(call, "ModuleList(*layers)", "ModuleList(layers)")


def wrong_paged_cache_values(file: File) -> Iterator[Finding]:
    """`max.nn`'s cache values cannot be made from graph values."""
    origin = next((m for m, n in file.imports() if n == "PagedCacheValues"), "")
    if not origin.startswith("max.nn"):
        return
    for call, name in file.calls():
        if name == "PagedCacheValues.from_upstream":
            what = f"PagedCacheValues of {origin} has no from_upstream"
            fix = (
                "import it from max.experimental.nn.common_layers.kv_cache, or unflatten with "
                "kv_params.unflatten_kv_inputs"
            )
            yield file.finding(call, what, fix)


def lenient_load(file: File) -> Iterator[Finding]:
    """`strict=False` drops weights silently."""
    for call, name in file.calls():
        strict = _keyword(call, "strict")
        if (
            name.endswith("load_state_dict")
            and isinstance(strict, ast.Constant)
            and not strict.value
        ):
            what = "load_state_dict(strict=False) drops weights and leaves zeros silently"
            fix = "load strictly; drop tensors by name in the adapter"
            yield file.finding(call, what, fix, "warning")  # the weights gate sees what is lost


def plain_list_of_modules(file: File) -> Iterator[Finding]:
    """Layers belong in a ModuleList."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Assign) or not dotted(node.targets[0]).startswith("self."):
            continue
        value = node.value
        element: ast.AST | None = None
        if isinstance(value, ast.ListComp):
            element = value.elt
        elif isinstance(value, ast.List) and value.elts:
            element = value.elts[0]
        if isinstance(element, ast.Call) and _is_module(dotted(element.func), file):
            what = f"{dotted(node.targets[0])} is a plain list of modules"
            yield file.finding(node, what, "ModuleList(...) in ModuleV3, LayerList(...) in V2")


def _is_module(name: str, file: File) -> bool:
    """Whether a called name is a module: a class of this file on Module, or a layer of MAX's."""
    if any(n == name and (".nn" in m) for m, n in file.imports()):
        return name[:1].isupper()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return any(
                "Module" in ast.unparse(base) or "Layer" in ast.unparse(base) for base in node.bases
            )
    return False


def state_in_forward(file: File) -> Iterator[Finding]:
    """A Tensor kept on self while tracing becomes a parameter without a weight."""
    for cls in ast.walk(file.tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for function in cls.body:
            if isinstance(function, ast.FunctionDef) and function.name in ("forward", "__call__"):
                for node in ast.walk(function):
                    targets = node.targets if isinstance(node, ast.Assign) else []
                    if any(dotted(target).startswith("self.") for target in targets):
                        what = f"{dotted(targets[0])} is set while tracing"
                        fix = "compute it in __init__ or pass it as an argument: Tensors kept on "
                        yield file.finding(node, what, fix + "self become parameters")


def numpy_of_weights(file: File) -> Iterator[Finding]:
    """numpy has no bfloat16; a function that views the elements as integers may use it."""
    if "weight_adapter" not in file.name:
        return
    for function in ast.walk(file.tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        viewed = any(word in ast.unparse(function) for word in (".view(", "torch"))
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and not viewed and _reads_as_numpy(call):
                what = "a weight is read through numpy, which has no bfloat16 or float8"
                fix = "view it as unsigned integers first: Buffer.view(DType.uint16, shape)"
                yield file.finding(call, what, fix)


def _reads_as_numpy(call: ast.Call) -> bool:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return dotted(call.func) in ("np.from_dlpack", "np.asarray", "np.array") or method == "to_numpy"


def default_that_wins(file: File) -> Iterator[Finding]:
    """`getattr(hf, key, default)` on a key transformers does not set there."""
    for call, name in file.calls():
        if name != "getattr" or len(call.args) != 3:
            continue
        key, default = call.args[1], call.args[2]
        if not isinstance(key, ast.Constant) or not isinstance(default, ast.Constant):
            continue
        home = MOVED.get(str(key.value))
        reads_config = "config" in dotted(call.args[0]) or dotted(call.args[0]) == "hf"
        if home and reads_config and isinstance(default.value, int | float):
            what = f"getattr(..., {key.value!r}, {default.value}) always gives {default.value}"
            yield file.finding(call, what, f"transformers 5 keeps it in {home}")


#: Keys transformers 5 moved, and where they are now.
MOVED = {
    "rope_theta": 'config.rope_parameters["rope_theta"]',
    "partial_rotary_factor": 'config.rope_parameters["partial_rotary_factor"]',
}


def partial_rotary_kernel(file: File) -> Iterator[Finding]:
    """`rope_split_store_ragged` rotates every column."""
    factor = partial_factor(file.config)
    if factor is None or factor >= 1:
        return
    for call, name in file.calls():
        if name.split(".")[-1] == "rope_split_store_ragged":
            what = f"rope_split_store_ragged is silently wrong for partial rotary ({factor})"
            fix = "rotate the part with plain ops, then store_k_cache_ragged/store_v_cache_ragged"
            yield file.finding(call, what, fix)


def partial_factor(config: Mapping[str, Any]) -> float | None:
    """The share of a head's columns that the configuration says is rotated, if it says so."""
    rope = config.get("rope_parameters") or {}
    for part in (config, rope):
        for key in ("partial_rotary_factor", "rotary_pct"):
            if isinstance(part, dict) and isinstance(part.get(key), int | float):
                return float(part[key])
    return None


def racing_zeros(file: File) -> Iterator[Finding]:
    """`Buffer.zeros` on a CPU is not done when the graph starts to run."""
    for call, name in file.calls():
        if name == "Buffer.zeros":
            what = "Buffer.zeros races with the graph's execution on CPU"
            fix = "Buffer.from_numpy(np.zeros(...)), or synchronize the device"
            yield file.finding(call, what, fix, "warning")


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


RULES: tuple[Rule, ...] = (
    constant_without_device,
    to_device_ref,
    unpacked_tensor,
    starred_module_list,
    wrong_paged_cache_values,
    lenient_load,
    plain_list_of_modules,
    state_in_forward,
    numpy_of_weights,
    default_that_wins,
    partial_rotary_kernel,
    racing_zeros,
)
