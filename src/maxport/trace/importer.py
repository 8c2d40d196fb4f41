"""From an exported program to the IR: live value nodes only, shapes read from the trace."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from maxport.errors import MaxportError
from maxport.ir import ODD, Const, Graph, Merged, Node, Param, Ref, Size
from maxport.trace.capture import MASK_KINDS, Traced

_IDENTITY = {"alias", "clone", "contiguous", "detach", "dropout", "lift_fresh_copy"}
_CASTS = {"_to_copy", "to", "type_as"}
_RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten"}
_RENAMED = {"concat": "cat", "concatenate": "cat", "multiply": "mul", "_softmax": "softmax"}


def op_name(target: Any) -> str:
    """`aten.add.Tensor` for the overload `aten::add.Tensor`; the default overload has no suffix."""
    if hasattr(target, "_schema"):
        name: str = target._schema.name.replace("::", ".")
        overload = target._schema.overload_name
        return f"{name}.{overload}" if overload and overload != "default" else name
    return getattr(target, "__name__", str(target))


def base_name(name: str) -> str:
    """The operation alone: `aten.add_.Tensor` is `add`, every kind of view is `reshape`."""
    base = name.split(".")[1].removesuffix("_") if name.startswith(("aten.", "maxport.")) else name
    if name in ("aten.max.dim", "aten.min.dim"):
        return name.removeprefix("aten.")
    return "reshape" if base in _RESHAPES else _RENAMED.get(base, base)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def size(value: Any, batch: int) -> Size:
    """A traced size: an int, which of batch and tokens it is a multiple of, or `ODD`."""
    if isinstance(value, torch.SymInt):
        expr = value.node.expr
        if not expr.is_Integer:
            rest, symbols = expr.as_coeff_mul()
            if len(symbols) != 1 or not symbols[0].is_Symbol or not rest.is_Integer:
                return ODD
            number = int(rest)
            whole = number % batch == 0
            return Merged(batch=whole, tokens=True, rest=number // batch if whole else number)
        value = int(expr)
    number = int(value)
    if number % batch == 0 and number:
        return Merged(batch=True, tokens=False, rest=number // batch)
    return number


def _is_symbolic(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _live(program: ExportedProgram) -> set[torch.fx.Node]:
    """Nodes that the logits depend on through tensors."""
    stack: list[torch.fx.Node] = [next(n for n in program.graph.nodes if n.op == "output")]
    seen: set[torch.fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or (node.op != "output" and _is_symbolic(node)):
            continue
        seen.add(node)
        stack += node.all_input_nodes
    return seen


def _scope(node: torch.fx.Node) -> tuple[str, dict[str, str]]:
    """The module path that computes `node`, without the wrapper, and the class at each level."""
    classes: dict[str, str] = {}
    path = ""
    for fqn, cls in (node.meta.get("nn_module_stack") or {}).values():
        path = str(fqn).split("@")[0]
        if path == "" or path == "model":
            path = ""
        path = path.removeprefix("model.")
        name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
        classes.setdefault(path, name) if path else classes.__setitem__("", name)
    return path, classes


def _line(node: torch.fx.Node) -> str:
    """`modeling_llama.py:230` of the innermost modelling code line on the traced stack."""
    for entry in reversed((node.meta.get("stack_trace") or "").split("\n")):
        entry = entry.strip()
        if entry.startswith('File "') and "/torch/" not in entry:
            path, line = entry[6:].split('", line ', 1)
            return f"{Path(path).name}:{line.split(',')[0]}"
    return ""


def _first_names(program: ExportedProgram) -> dict[str, str]:
    """For every name of a shared weight, the first: a tied head is the embedding's."""
    by_storage: dict[int, str] = {}
    first: dict[str, str] = {}
    for name, tensor in program.state_dict.items():
        first[name] = by_storage.setdefault(tensor.data_ptr(), name)
    return first


def _is_neutral(name: str, args: list[Any], node: torch.fx.Node) -> bool:
    """Whether an operation adds zero or multiplies by one, and changes neither shape nor dtype."""
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1}.get(name)
    if neutral is None or len(args) < 2 or isinstance(args[1], bool):
        return False
    if not isinstance(args[0], Ref) or not isinstance(args[1], int | float) or args[1] != neutral:
        return False
    source, value = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(source.dtype == value.dtype and source.shape == value.shape)


class _Importer:
    def __init__(self, traced: Traced) -> None:
        program, self.batch = traced.program, traced.batch
        self.buffers = traced.buffers
        signature = program.graph_signature
        self.weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.program = program
        self.first_name = _first_names(program)
        self.computed = set(signature.non_persistent_buffers)
        self.constants = dict(signature.inputs_to_lifted_tensor_constants)
        self.env: dict[torch.fx.Node, Any] = {}
        self.nodes: list[Node] = []

    def size(self, value: Any) -> Size:
        return size(value, self.batch)

    def value(self, arg: Any) -> Any:
        """An fx argument as an IR argument; symbolic ints become sizes."""
        if isinstance(arg, torch.fx.Node):
            return self.size(arg.meta["val"]) if _is_symbolic(arg) else self.env[arg]
        if isinstance(arg, list | tuple):
            return [self.value(a) for a in arg]
        if isinstance(arg, torch.dtype):
            return dtype_name(arg)
        return arg

    def placeholder(self, node: torch.fx.Node) -> None:
        tensor = node.meta["val"]
        if node.name in self.weights:
            fqn = self.first_name.get(self.weights[node.name], self.weights[node.name])
            if fqn in self.computed and tensor.ndim == 0:
                self.env[node] = self.buffers[fqn].item()
                return
            shape = tuple(int(s) for s in tensor.shape)
            name = fqn.removeprefix("model.")
            self.env[node] = Param(name, shape, dtype_name(tensor.dtype), fqn in self.computed)
        elif node.name in self.constants:
            name = self.constants[node.name]
            if tensor.ndim == 0:
                self.env[node] = self.program.constants[name].item()
                return
            shape = tuple(int(s) for s in tensor.shape)
            self.env[node] = Const(name, shape, dtype_name(tensor.dtype))
        else:
            sizes = tuple(self.size(s) for s in tensor.shape)
            name = {"input_ids": "tokens", "position_ids": "positions"}.get(node.name, node.name)
            self.nodes.append(Node(name, "input", shape=sizes, dtype=dtype_name(tensor.dtype)))
            self.env[node] = Ref(name)

    def constant_index(self, node: torch.fx.Node, args: list[Any]) -> tuple[str, list[Any]]:
        """`x[..., [i]]` with a constant i is a slice of one element."""
        chosen = [(axis, a) for axis, a in enumerate(args[1]) if a is not None]
        if len(chosen) != 1 or not isinstance(chosen[0][1], Const):
            return "index", args
        axis, constant = chosen[0]
        values = self.program.constants[constant.name].tolist()
        if len(values) != 1:
            return "index", args
        start = int(values[0])
        return "slice", [args[0], axis, start, None if start == -1 else start + 1]

    def call(self, node: torch.fx.Node) -> None:
        name, value = base_name(op_name(node.target)), node.meta.get("val")
        if node.target is operator.getitem:
            self.env[node] = Ref(self.env[node.args[0]].name, int(node.args[1]))
            return
        args = [self.value(a) for a in node.args]
        same_dtype = name in _CASTS and node.args[0].meta["val"].dtype == value.dtype
        if name in _IDENTITY or same_dtype or _is_neutral(name, args, node):
            self.env[node] = args[0]
            return
        scope, classes = _scope(node)
        attrs = {
            k: self.value(v)
            for k, v in node.kwargs.items()
            if k not in ("device", "layout", "pin_memory", "memory_format", "non_blocking")
        }
        several = isinstance(value, list | tuple)
        values = list(value) if several else [value]
        shapes = [tuple(self.size(s) for s in v.shape) for v in values]
        if name == "mask":
            args = [MASK_KINDS[args[0]], args[1]]
        if name == "index":
            name, args = self.constant_index(node, args)
        if name in _CASTS:
            name, args, attrs = "cast", [args[0], dtype_name(value.dtype)], {}
        ir_node = Node(
            node.name,
            name,
            args,
            attrs,
            shape=shapes if several else shapes[0],
            dtype=dtype_name(values[0].dtype),
            scope=scope,
            classes=classes,
            line=_line(node),
        )
        self.nodes.append(ir_node)
        self.env[node] = Ref(node.name)


def _merge_equal(graph: Graph) -> None:
    """Let equal operations on equal values be one: models compute `x - mean` or `1 + w` twice."""
    seen: dict[str, str] = {}
    for node in list(graph.nodes):
        key = f"{node.op} {node.args} {node.attrs} {node.dtype} {node.scope}"
        first = seen.setdefault(key, node.name)
        if first != node.name and node.op != "input":
            parts = range(len(node.shape)) if isinstance(node.shape, list) else [None]
            for part in parts:
                graph.replace(Ref(node.name, part), Ref(first, part))
            graph.aliases.setdefault(first, []).append(node.name)


def import_program(traced: Traced) -> Graph:
    """The IR of an exported causal LM.

    Returns:
        A graph from `tokens` and `positions` to the logits. Asserts, shape arithmetic, dropout
        and copies are gone; `traced` is the number of operations that remain.
    """
    program = traced.program
    importer = _Importer(traced)
    live = _live(program)
    output: Ref | None = None
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node in live or node.name in ("input_ids", "position_ids"):
                importer.placeholder(node)
        elif node.op == "output":
            result = importer.value(node.args[0])
            output = result[0]
        elif node in live and node.op == "call_function":
            importer.call(node)
    if output is None:
        raise MaxportError("the traced model returns nothing")
    graph = Graph(importer.nodes, output)
    _merge_equal(graph)
    graph.sweep()
    graph.traced = sum(node.op not in ("input", "mask") for node in graph.nodes)
    return graph
