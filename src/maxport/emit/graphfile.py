"""`<slug>.py`: the port's graph as ModuleV3 classes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxport.emit.classes import ClassMap, PortClass, child_groups, group_classes
from maxport.emit.expr import widest
from maxport.emit.forward import Body, Printer, attribute_path, input_names
from maxport.emit.lift import Lifted
from maxport.emit.ops import F_IMPORT, norm_arguments
from maxport.emit.prose import docstring
from maxport.emit.tree import (
    Call,
    Instance,
    Loop,
    add_context,
    build_tree,
    name_leaf_weights,
    name_sequentials,
    params_of,
    settle_scopes,
)
from maxport.errors import MaxportError
from maxport.ir import Graph, Node, Param, Ref


def class_docstring(text: str) -> str:
    """A docstring as it stands inside a class."""
    return docstring(text, indent=4).replace("\n", "\n    ")


_TYPES = {"kv": "PagedCacheValues"}


@dataclass(frozen=True)
class Origin:
    """Where transformers defines a class."""

    file: str
    line: int


@dataclass
class GraphFile:
    """The emitted graph with what the port's other files need to know of it.

    Attributes:
        source: Source of `<slug>.py`, not yet formatted.
        helpers: Functions it imports from `functional.py`.
        fields: Names of the configuration fields it reads, in order of first use.
        parameters: Its parameters as patterns, with the name in transformers.
        transposed: Parameters that the checkpoint stores transposed, as patterns.
        head: The head's parameter where it can be tied, and the embedding's.
        renamed: Prefixes of parameters in the checkpoint, and here where they differ.
        attends: Number of attention layers.
        class_name: The graph's class.
        kv_heads: Key heads as an expression or number.
        head_dim: Width of keys and values.
    """

    source: str
    helpers: set[str]
    fields: list[str]
    parameters: list[str]
    transposed: list[str]
    head: tuple[str, str] | None
    tied: bool
    class_name: str
    kv_heads: Any = 0
    head_dim: Any = 0
    renamed: tuple[tuple[str, str], ...] = ()
    buffers: list[str] = field(default_factory=list)


@dataclass
class _Emitter:
    classes: ClassMap
    config_class: str
    origins: Mapping[str, Origin]
    root: Instance
    imports: set[str] = field(default_factory=set)
    helpers: set[str] = field(default_factory=set)
    fields: dict[str, None] = field(default_factory=dict)
    needs_layer: dict[int, bool] = field(default_factory=dict)
    needs_kind: dict[int, bool] = field(default_factory=dict)

    # classes

    def norm_class(self, entry: PortClass) -> str:
        """The class of a norm leaf: MAX's own where it computes the same, else the port's."""
        leaf = entry.body.leaf
        assert leaf is not None
        if leaf.op == "layer_norm":
            return "LayerNorm" if not leaf.attrs["offset"] else entry.name
        if leaf.attrs["weight"] is None:
            return f"{entry.name}WithoutScale"
        offset, early = leaf.attrs["offset"], leaf.attrs["multiply_before_cast"]
        if not offset and not early:
            return "RMSNorm"
        return "GemmaRMSNorm" if offset == 1.0 and early else entry.name

    def leaf_constructor(self, entry: PortClass, child: Instance, p: Printer | None) -> str:
        """`Linear(in_dim=..., ...)` for a leaf."""
        leaf = child.leaf
        assert leaf is not None
        nn = "max.experimental.nn"
        if leaf.op == "linear":
            self.imports.add(f"from {nn} import Linear")
            shape = leaf.attrs["weight"].shape
            ins, outs = (0, 1) if leaf.attrs["transposed"] else (1, 0)
            bias = leaf.attrs["bias"] is not None
            sizes = f"in_dim={self.size(shape[ins])}, out_dim={self.size(shape[outs])}"
            return f"Linear({sizes}, bias={bias})"
        if leaf.op == "embedding":
            self.imports.add(f"from {nn} import Embedding")
            rows, width = leaf.attrs["weight"].shape
            return f"Embedding({self.size(rows)}, dim={self.size(width)})"
        name = self.norm_class(entry)
        weight = leaf.attrs["weight"]
        width = self.size(weight.shape[0] if weight is not None else leaf.shape[-1])
        eps = self.size(leaf.attrs["eps"])
        if name in ("RMSNorm", "GemmaRMSNorm"):
            self.imports.add(f"from {nn}.norm import {name}")
            return f"{name}({width}, {eps})"
        if name == "LayerNorm":
            self.imports.add(f"from {nn}.norm import LayerNorm")
            extra = "" if leaf.attrs["keep_dtype"] else ", keep_dtype=False"
            if weight is None:
                extra += ", elementwise_affine=False"
            elif leaf.attrs["bias"] is None:
                extra += ", use_bias=False"
            return f"LayerNorm({width}, {eps}{extra})"
        return f"{name}({eps})" if weight is None else f"{name}({width}, {eps})"

    def size(self, value: Any) -> str:
        """A size or number in `__init__`."""
        for name in getattr(value, "fields", ()):
            self.fields.setdefault(name)
        return repr(value)

    def own_norms(self) -> list[str]:
        """Classes for norms that MAX has no module for."""
        out: dict[str, str] = {}
        for entry in self.classes.classes:
            leaf = entry.body.leaf
            if leaf is None or leaf.op not in ("rms_norm", "layer_norm"):
                continue
            name = self.norm_class(entry)
            if name in ("RMSNorm", "GemmaRMSNorm", "LayerNorm") or name in out:
                continue
            out[name] = self._norm_source(entry, leaf, name)
        return list(out.values())

    def _norm_source(self, entry: PortClass, leaf: Node, name: str) -> str:
        origin = self.origin(entry.hf_class)
        nn = "max.experimental.nn"
        if leaf.attrs["weight"] is None:
            self.imports |= {f"from {nn} import Module"}
            self.helpers.add("unit_rms_norm")
            doc = class_docstring(f"RMS norm without a weight{origin}.")
            return f"""class {name}(Module[[Tensor], Tensor]):
    {doc}

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return unit_rms_norm(x, self.eps)
"""
        if leaf.op == "rms_norm":
            self.imports.add(f"from {nn}.norm import RMSNorm, rms_norm")
            shift = f"{leaf.attrs['offset']:g} + weight" if leaf.attrs["offset"] else "its weight"
            when = "before" if leaf.attrs["multiply_before_cast"] else "after"
            doc = class_docstring(
                f"RMS norm that multiplies by {shift} {when} casting back{origin}."
            )
            return f"""class {name}(RMSNorm):
    {doc}

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps{norm_arguments(leaf)})
"""
        self.imports |= {f"from {nn}.norm import LayerNorm", F_IMPORT}
        doc = class_docstring(
            f"LayerNorm that scales by {leaf.attrs['offset']:g} + weight{origin}."
        )
        return f"""class {name}(LayerNorm):
    {doc}

    def forward(self, x: Tensor) -> Tensor:
        gamma, beta = self._affine_params(x)
        return F.layer_norm(x, gamma + {leaf.attrs["offset"]}, beta, self.eps)
"""

    def origin(self, hf_class: str) -> str:
        """` (modeling_llama.py:223)`, or nothing where the class is not known."""
        found = self.origins.get(hf_class)
        return f" ({found.file}:{found.line})" if found else ""

    def flags(self, entry: PortClass) -> tuple[bool, bool]:
        """Whether a class's constructor needs the layer's index, and its kind."""
        return self.needs_layer.get(id(entry), False), self.needs_kind.get(id(entry), False)

    def child_constructor(self, entry: PortClass, name: str, body: Body) -> str:
        """How the class's child `name` is made; by kind where its class depends on it."""
        group = child_groups(entry)[name]
        texts: dict[Any, str] = {}
        for child in group:
            made = self.classes.of(child)
            text = self._constructor(made, child)
            texts.setdefault(self.classes.kinds.get(child.path), text)
        if len(set(texts.values())) == 1:
            text = next(iter(texts.values()))
        else:
            body.uses_kind = True
            names = {k: t.partition("(") for k, t in texts.items()}
            arguments = {t[2] for t in names.values()}
            if len(arguments) == 1:
                pairs = ", ".join(f"{k!r}: {t[0]}" for k, t in names.items())
                text = f"{{{pairs}}}[kind]({arguments.pop()}"
            else:
                text = body.choose(texts)
        if re.search(r"\blayer\b", text.partition("(")[2]):
            body.uses_layer = True
        if re.search(r"\bkind\b", text):
            body.uses_kind = True
        return text

    def _constructor(self, made: PortClass, child: Instance) -> str:
        if child.leaf is not None:
            return self.leaf_constructor(made, child, None)
        layer, kind = self.flags(made)
        return f"{made.name}(config{', layer' * layer}{', kind' * kind})"

    # source

    def class_source(self, entry: PortClass) -> str:
        """One class of the port."""
        instance = entry.body
        printer = Printer(entry, self.classes)
        body = printer.run(instance.items, instance.outputs)
        lines = self._children(entry, body)
        lines += self._own_params(instance)
        lines += [f"self.{a.name} = {a.init}" for a in body.attributes.values()]
        if any(a.name == "kinds" for a in body.attributes.values()):
            lines = self._move_kinds(lines)
        self._collect(body)
        self.needs_layer[id(entry)] = body.uses_layer
        self.needs_kind[id(entry)] = body.uses_kind
        arguments = input_names(instance)
        signature = ", ".join(f"{n}: {_type(r)}" for r, n in arguments.items())
        types = ", ".join(_type(r) for r in arguments)
        result = (
            "Tensor"
            if len(instance.outputs) == 1
            else (f"tuple[{', '.join(['Tensor'] * len(instance.outputs))}]")
        )
        self.imports.add("from max.experimental.nn import Module")
        extra = (", layer: int" * body.uses_layer) + (
            f", kind: {self._kind_type()}" * body.uses_kind
        )
        doc = class_docstring(f"{self.describe(instance)}{self.origin(entry.hf_class)}.")
        code = "\n".join(f"        {line}" for line in [*body.locals(), *lines])
        forward = "\n".join(f"        {line}" for line in [*body.lines, f"return {body.result}"])
        return f"""class {entry.name}(Module[[{types}], {result}]):
    {doc}

    def __init__(self, config: {self.config_class}{extra}) -> None:
        super().__init__()
{code}

    def forward(self, {signature}) -> {result}:
{forward}
"""

    def _kind_type(self) -> str:
        return self.classes.kind.annotation if self.classes.kind else "str"

    def _collect(self, body: Body) -> None:
        self.helpers |= body.helpers
        self.imports |= body.imports
        for name in body.fields:
            self.fields.setdefault(name)
        for attribute in body.attributes.values():
            for name in re.findall(r"config\.(\w+)", attribute.init):
                self.fields.setdefault(name)

    def _move_kinds(self, lines: list[str]) -> list[str]:
        """`kinds` is a local of `__init__` first, so that the layer list can use it."""
        return [line for line in lines if line != "self.kinds = kinds"] + ["self.kinds = kinds"]

    def _children(self, entry: PortClass, body: Body) -> list[str]:
        lines: list[str] = []
        done: set[str] = set()
        for item in entry.body.items:
            if isinstance(item, Loop):
                lines += self._layer_list(entry, item, body)
            elif isinstance(item, Call) and item.child.name not in done:
                done.add(item.child.name)
                path = attribute_path(item.child.name)
                if "." in path or "[" in path:
                    raise MaxportError(
                        f"{entry.hf_class} calls {item.child.name}, a module of its child",
                        where=item.child.path,
                        fix="report the model",
                    )
                lines.append(
                    f"self.{path} = {self.child_constructor(entry, item.child.name, body)}"
                )
        return lines

    def _layer_list(self, entry: PortClass, loop: Loop, body: Body) -> list[str]:
        self.imports.add("from max.experimental.nn.sequential import ModuleList")
        self.fields.setdefault("num_hidden_layers")
        kind = self.classes.kind
        texts: dict[Any, str] = {}
        for call in loop.calls:
            label = self.classes.kinds.get(call.child.path)
            texts.setdefault(label, self._constructor(self.classes.of(call.child), call.child))
        names = {t.partition("(")[0] for t in texts.values()}
        path = attribute_path(loop.name)
        count = "range(config.num_hidden_layers)"
        if kind is None:
            inner = next(iter(texts.values()))
            variable = "layer" if re.search(r"\blayer\b", inner) else "_"
            return [f"self.{path} = ModuleList({inner} for {variable} in {count})"]
        for name in kind.fields:
            self.fields.setdefault(name)
        if len(names) == 1 and len(set(texts.values())) == 1:
            inner = next(iter(texts.values()))
        else:
            pairs = ", ".join(f"{k!r}: {t.partition('(')[0]}" for k, t in texts.items())
            wide = max(texts.values(), key=len).partition("(")[2]
            return [
                f"kinds = [{kind.text} for layer in {count}]",
                f"classes = {{{pairs}}}",
                f"self.{path} = ModuleList("
                f"classes[kind]({wide} for layer, kind in enumerate(kinds))",
            ]
        if kind.text.endswith("[layer]") and "," not in kind.text:
            first = f"kinds = {kind.text.removesuffix('[layer]')}"
        else:
            first = f"kinds = [{kind.text} for layer in {count}]"
        variables = "layer, kind in enumerate(kinds)"
        if not re.search(r"\blayer\b", inner):
            variables = "kind in kinds"
        return [first, f"self.{path} = ModuleList({inner} for {variables})"]

    def _own_params(self, instance: Instance) -> list[str]:
        """Weights that lie in the module itself, wherever they are used."""
        lines: dict[str, None] = {}
        for node in self.root.nodes():
            for param in params_of(node):
                owner, _, name = param.fqn.rpartition(".")
                if owner == instance.path:
                    shape = ", ".join(self.size(s) for s in param.shape)
                    lines.setdefault(f"self.{name} = Tensor.zeros([{shape}])")
        return list(lines)

    def describe(self, instance: Instance) -> str:
        """One clause that says what a module computes, read off its operations."""
        nodes = [i for i in instance.items if isinstance(i, Node)]
        ops = {n.op for n in nodes}
        attends = [n for n in nodes if n.op == "attend"]
        if attends:
            return _describe_attention(attends[0], ops, instance)
        if any(isinstance(i, Loop) for i in instance.items):
            return "Embedding, decoder layers and what lies between them and the head"
        calls = [i.child for i in instance.items if isinstance(i, Call)]
        if any(n.op == "attend" for child in calls for n in child.nodes()):
            names = ", ".join(c.name for c in calls)
            return f"Decoder layer: {names}" + ", with residual additions" * ("residual" in ops)
        if "gate" in ops and "activation" in ops:
            return "Gated MLP"
        if "activation" in ops:
            return "MLP"
        if "embedding" in ops:
            return "Embedding with a factor" if "multiplier" in ops else "Embedding"
        return "One part of the model"


def _describe_attention(node: Node, ops: set[str], instance: Instance) -> str:
    mask = {"causal": "Causal", "sliding": "Sliding-window", "chunked": "Chunked"}.get(
        str(node.attrs["mask"]), "Bidirectional"
    )
    rope = ", rotary position embedding" if "rope" in ops else ""
    norms = [
        i.child.name for i in instance.items
        if isinstance(i, Call) and i.child.leaf is not None and "norm" in i.child.leaf.op
    ]  # fmt: skip
    extra = f", {' and '.join(norms)}" if norms else ""
    return f"{mask} attention through the paged KV cache{rope}{extra}"


def _type(ref: Ref) -> str:
    return _TYPES.get(ref.name, "Tensor")


def render_graph(
    lifted: Lifted,
    *,
    config_class: str,
    origins: Mapping[str, Origin],
    heading: str,
    tie_field: bool,
) -> GraphFile:
    """Write the graph of a lifted model.

    Args:
        lifted: The ragged graph with sizes as expressions; changed in place.
        config_class: Name of the port's configuration class.
        origins: Where transformers defines each class.
        heading: Docstring of the file.
        tie_field: Whether the configuration says if the head is the embedding.

    Raises:
        MaxportError: Something has no lowering, or the layers differ for no known reason.
    """
    from maxport.emit.headfile import render_root

    graph = lifted.graph
    kv_heads, head_dim = cache_layout(graph)
    prefixes = name_sequentials(graph) | name_leaf_weights(graph)
    settle_scopes(graph)
    add_context(graph)
    root = build_tree(graph)
    classes = group_classes(root, lifted.fields)
    emitter = _Emitter(classes, config_class, origins, root)
    sources = []
    for entry in classes.classes:
        if entry.body.leaf is None and entry.body.path:
            sources.append(emitter.class_source(entry))
    top = render_root(emitter, root, tie_field=tie_field)
    own = emitter.own_norms()
    source = _assemble(emitter, [*own, *sources, top.source], heading, config_class)
    parameters, transposed, buffers = _parameters(root)
    renamed = tuple(dict.fromkeys((_pattern(a), _pattern(b)) for a, b in prefixes.items()))
    if top.bias is not None:
        renamed += (top.bias,)
        parameters = [top.bias[1] if p == top.bias[0] else p for p in parameters]
    return GraphFile(
        source, emitter.helpers, list(emitter.fields), parameters, transposed, top.head, top.tied,
        classes.of(root).name, kv_heads, head_dim, renamed, buffers,
    )  # fmt: skip


def cache_layout(graph: Graph) -> tuple[Any, Any]:
    """(key heads, head width) of the one cache that all layers share.

    Marks every attention with whether its heads may be narrower than the cache's.

    Raises:
        MaxportError: No one cache holds the keys and values of all layers.
    """
    attends = [n for n in graph.nodes if n.op == "attend"]
    shapes = {str(shape): shape for shape in (_kv_shape(graph, n) for n in attends)}
    heads = {str(shape[0]): shape[0] for shape in shapes.values()}
    widths = {str(shape[1]): shape[1] for shape in shapes.values()}
    plain = all(not n.attrs["softcap"] and "slopes" not in n.attrs for n in attends)
    if len(heads) != 1 or (len(widths) > 1 and not plain):
        raise MaxportError(
            f"layers cache keys and values of different shapes: {', '.join(shapes) or 'none'}",
            fix="maxport needs one cache layout for all layers; port this model by hand",
        )
    for node in attends:
        node.attrs["padded"] = len(widths) > 1
    return next(iter(heads.values())), widest(list(widths.values()))


def _kv_shape(graph: Graph, node: Node) -> tuple[Any, Any]:
    shapes = []
    for ref in node.args[1:3]:
        shape = graph.by_name()[ref.name].shape
        shapes.append((shape if ref.part is None else shape[ref.part])[1:])
    if str(shapes[0]) != str(shapes[1]):
        raise MaxportError(
            f"keys are {shapes[0]} and values {shapes[1]} wide",
            where=node.scope,
            fix="MAX's paged cache needs keys and values of one width; port this layer by hand",
        )
    return tuple(shapes[0])


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name, count=1)


def _parameters(root: Instance) -> tuple[list[str], list[str], list[str]]:
    """Parameters as patterns, those stored transposed, and those that transformers computes."""
    names: dict[str, None] = {}
    transposed: dict[str, None] = {}
    buffers: dict[str, None] = {}
    for node in root.nodes():
        for param in params_of(node):
            if param.buffer:
                buffers.setdefault(_pattern(param.fqn))
            names.setdefault(_pattern(param.fqn))
        weight = node.attrs.get("weight")
        if node.op == "linear" and node.attrs["transposed"] and isinstance(weight, Param):
            transposed.setdefault(_pattern(weight.fqn))
    return list(names), list(transposed), list(buffers)


def _assemble(emitter: _Emitter, sources: Sequence[str], heading: str, config_class: str) -> str:
    code = "\n\n".join(sources)
    imports = set(emitter.imports) | {"from max.experimental.tensor import Tensor"}
    imports.add("from max.nn.kv_cache import PagedCacheValues")
    lines = sorted(imports)
    local = []
    if emitter.helpers:
        used = [h for h in sorted(emitter.helpers) if re.search(rf"\b{h}\(", code)]
        local.append(f"from .functional import {', '.join(used)}")
    local.append(f"from .model_config import {config_class}")
    math = "import math\n\n" if "math." in code else ""
    return "\n\n".join(
        [docstring(heading), "from __future__ import annotations", math + "\n".join(lines),
         "\n".join(local), code]
    )  # fmt: skip
