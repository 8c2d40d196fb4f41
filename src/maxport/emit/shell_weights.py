"""`weight_adapters.py`: from the checkpoint's tensors to the graph's parameters."""

from __future__ import annotations

from maxport.emit.prose import WIDTH, comment, docstring
from maxport.emit.spec import Drop, Fuse, PortSpec, Rename, Transpose

_FITS = '''
@cache
def pattern_regex(pattern: str) -> re.Pattern[str]:
    """The names a pattern stands for; group 1 is the number of the layer."""
    return re.compile(re.escape(pattern).replace(r"\\{i\\}", r"(\\d+)"))


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns stands for the name."""
    return any(pattern_regex(pattern).fullmatch(name) for pattern in patterns)
'''

_RENAMED = '''
def renamed(name: str) -> str:
    """The name with the first prefix that fits it replaced."""
    for before, after in RENAMED.items():
        if found := pattern_regex(before).match(name):
            return after.replace("{i}", "".join(found.groups())) + name[found.end() :]
    return name
'''

_FUSED_PLACE = '''
def fused_place(name: str) -> tuple[str, str, str] | None:
    """Parameter pattern, source pattern and layer of a tensor that is stored with others."""
    for parameter, sources in FUSED.items():
        for source in sources:
            if found := pattern_regex(source).fullmatch(name):
                return parameter, source, "".join(found.groups())
    return None
'''

_ELEMENTS = '''
def elements(weight: WeightData) -> npt.NDArray[Any]:
    """The weight's elements as unsigned integers."""
    buffer = Buffer.from_dlpack(weight.data)
    return buffer.view(BITS[weight.dtype.size_in_bytes], tuple(buffer.shape)).to_numpy()
'''

_FROM_ELEMENTS = '''
def from_elements(array: npt.NDArray[Any], dtype: DType, name: str) -> WeightData:
    """The reverse of `elements`."""
    buffer = Buffer.from_numpy(np.ascontiguousarray(array)).view(dtype, array.shape)
    return WeightData(buffer, name, dtype, Shape(array.shape))
'''

_TRANSPOSED = '''
class Transposed(WeightData):
    """A weight whose axes are swapped already; a second run leaves it alone."""


def transposed(weight: WeightData, name: str) -> WeightData:
    """A stored (inputs, outputs) matrix as (outputs, inputs)."""
    swapped = from_elements(elements(weight).T, weight.dtype, name)
    return Transposed(swapped.data, name, swapped.dtype, swapped.shape)
'''

_EQUAL = '''
def equal(one: WeightData, other: WeightData) -> bool:
    """Whether two weights hold the same elements."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(np.array_equal(elements(one), elements(other)))
'''


def render_weight_adapters(spec: PortSpec) -> str:
    """Source of `weight_adapters.py`, not yet formatted; it holds only what the rules need."""
    helpers = [_FITS]
    if spec.rules(Rename):
        helpers.append(_RENAMED)
    if spec.rules(Fuse):
        helpers.append(_FUSED_PLACE)
    if _moves_elements(spec):
        helpers.append(_ELEMENTS)
    if spec.rules(Fuse) or spec.rules(Transpose):
        helpers.append(_FROM_ELEMENTS)
    if spec.rules(Transpose):
        helpers.append(_TRANSPOSED)
    if spec.rules(Fuse):
        helpers.append(_concatenated(spec))
    if spec.tie:
        helpers.append(_EQUAL)
    head = docstring(
        f"Turns the tensors of a `{spec.hf_class}` checkpoint into the graph's parameters."
    )
    parts = [head, _imports(spec), _tables(spec), _convert(spec), *helpers]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _moves_elements(spec: PortSpec) -> bool:
    return bool(spec.rules(Fuse) or spec.rules(Transpose) or spec.tie)


def _imports(spec: PortSpec) -> str:
    fuse, moves = bool(spec.rules(Fuse)), _moves_elements(spec)
    makes = fuse or bool(spec.rules(Transpose))
    abstract = "Iterable, Mapping, Sequence" if fuse else "Iterable, Mapping"
    lines = [
        "from __future__ import annotations\n",
        "import re",
        f"from collections.abc import {abstract}",
        "from functools import cache",
        "from typing import Any\n",
    ]
    if moves:
        lines += ["import numpy as np", "import numpy.typing as npt"]
        lines += ["from max.driver import Buffer", "from max.dtype import DType"]
    if makes:
        lines.append("from max.graph import Shape")
    lines.append("from max.graph.weights import WeightData, Weights")
    return "\n".join(lines)


def _tables(spec: PortSpec) -> str:
    """The rules as constants."""
    blocks = [
        "# The graph's parameters; {i} is the number of a layer, here and below.\n"
        f"PARAMETERS = ({_names(sorted(spec.parameters))})"
    ]
    if renames := spec.rules(Rename):
        blocks.append(
            "# Prefixes of checkpoint names and what the graph has in their place; "
            "the first that fits.\n"
            "RENAMED = {\n" + "".join(map(_rename_row, renames)) + "}"
        )
    if transposes := spec.rules(Transpose):
        blocks.append(
            "# Matrices the checkpoint stores as (inputs, outputs).\n"
            f"TRANSPOSED = ({_names([rule.pattern for rule in transposes])})"
        )
    if fuses := spec.rules(Fuse):
        rows = "".join(
            f'    "{rule.target}": ({_names(rule.sources)}),\n'
            for rule in sorted(fuses, key=lambda rule: rule.target)
        )
        blocks.append(
            "# Parameters that hold several checkpoint tensors end to end, in this order.\n"
            f"FUSED = {{\n{rows}}}"
        )
        if odd := [rule for rule in fuses if rule.axis]:
            rows = "".join(f'    "{rule.target}": {rule.axis},\n' for rule in odd)
            blocks.append(f"# Those joined along another axis than the first.\nAXIS = {{\n{rows}}}")
    if drops := spec.rules(Drop):
        rows = "".join(f'{comment(rule.why, indent=4)}    "{rule.pattern}",\n' for rule in drops)
        blocks.append(f"# Checkpoint tensors the graph does not need.\nDROPPED = (\n{rows})")
    if spec.tie:
        blocks.append(
            "# Heads that may be a copy of an embedding, or be left out because the embedding "
            "serves as head.\n"
            f'TIED = {{"{spec.tie.target}": "{spec.tie.source}"}}'
        )
    if _moves_elements(spec):
        blocks.append(
            "# numpy has no bfloat16 or float8: elements are moved as unsigned integers of the "
            "same size.\n"
            "BITS = {1: DType.uint8, 2: DType.uint16, 4: DType.uint32, 8: DType.uint64}"
        )
    return "\n\n".join(blocks)


def _rename_row(rule: Rename) -> str:
    """One entry of RENAMED; ruff cannot break a long one by itself."""
    row = f'    "{rule.from_prefix}": "{rule.to_prefix}",\n'
    if len(row) <= WIDTH:
        return row
    return f'    "{rule.from_prefix}": (\n        "{rule.to_prefix}"\n    ),\n'


def _names(names: list[str] | tuple[str, ...]) -> str:
    return "".join(f'"{name}", ' for name in names)


def _convert(spec: PortSpec) -> str:
    """The adapter MAX calls."""
    fuse, lacks = bool(spec.rules(Fuse)), ""
    if fuse:
        lacks = " or a fused parameter lacks a part"
    lines = [
        "def convert_safetensor_state_dict(",
        "    state_dict: Mapping[str, Weights | WeightData], **unused: Any",
        ") -> dict[str, WeightData]:",
        '    """Weights by the graph\'s parameter names; what is already converted stays as it is.',
        "",
        "    Args:",
        "        state_dict: The checkpoint's tensors by name.",
        "        unused: The configurations that MAX hands to every adapter.",
        "",
        "    Raises:",
        f"        ValueError: If a tensor has no place in the graph{lacks}.",
        '    """',
        "    weights: dict[str, WeightData] = {}",
    ]
    if fuse:
        lines.append("    parts: dict[tuple[str, str], dict[str, WeightData]] = {}")
    lines += ["    for name, entry in state_dict.items():", *_loop(spec)]
    if fuse:
        lines += _join(spec)
    if spec.tie:
        lines += [
            "    for head, embedding in TIED.items():",
            "        if {head, embedding} <= weights.keys() and "
            "equal(weights[head], weights[embedding]):",
            "            del weights[head]",
        ]
    return "\n".join([*lines, "    return weights"])


def _loop(spec: PortSpec) -> list[str]:
    """What happens to one tensor of the checkpoint."""
    lines = []
    if spec.rules(Drop):
        lines += ["        if fits(name, DROPPED):", "            continue"]
    lines.append("        weight = entry if isinstance(entry, WeightData) else entry.data()")
    if spec.rules(Transpose):
        lines += [
            "        if fits(name, TRANSPOSED) and not isinstance(weight, Transposed):",
            "            weight = transposed(weight, name)",
        ]
    first = "if"
    if spec.rules(Fuse):
        first = "elif"
        lines += [
            "        if place := fused_place(name):",
            "            parameter, source, layer = place",
            "            parts.setdefault((parameter, layer), {})[source] = weight",
        ]
    lines += [
        f"        {first} fits(name, PARAMETERS):",
        "            weights[name] = weight",
    ]
    if spec.rules(Rename):
        lines += [
            "        elif fits(renamed(name), PARAMETERS):",
            "            weights[renamed(name)] = weight",
        ]
    return [
        *lines,
        "        else:",
        "            raise ValueError("
        f'f"checkpoint tensor {{name!r}} has no place in the {spec.display_name} graph")',
    ]


def _join(spec: PortSpec) -> list[str]:
    axis = ", AXIS.get(parameter, 0)" if any(rule.axis for rule in spec.rules(Fuse)) else ""
    return [
        "    for (parameter, layer), found in parts.items():",
        "        if missing := [source for source in FUSED[parameter] if source not in found]:",
        '            names = ", ".join(source.replace("{i}", layer) for source in missing)',
        '            raise ValueError(f"the checkpoint lacks {names}")',
        '        name = parameter.replace("{i}", layer)',
        "        weights[name] = "
        f"concatenated([found[source] for source in FUSED[parameter]], name{axis})",
    ]


def _concatenated(spec: PortSpec) -> str:
    odd = any(rule.axis for rule in spec.rules(Fuse))
    parameter, along = (", axis: int", "one axis") if odd else ("", "their first axis")
    axis = ", axis=axis" if odd else ""
    return f'''
def concatenated(weights: Sequence[WeightData], name: str{parameter}) -> WeightData:
    """The weights end to end along {along}."""
    if len({{weight.dtype for weight in weights}}) > 1:
        raise ValueError(f"the parts of {{name}} are stored in different dtypes")
    array = np.concatenate([elements(weight) for weight in weights]{axis})
    return from_elements(array, weights[0].dtype, name)
'''
