"""What a port's files are made from, besides its graph: plain data, no Hugging Face, no MAX.

Names with numbers in them are written as patterns: `{i}` stands for one number, the layer's, and is
the only variable. `model.layers.{i}.mlp.up_proj.weight` is one weight of every layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from maxport.errors import MaxportError

Encoding = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ConfigField:
    """One field of the port's configuration.

    Args:
        name: Field name, a Python identifier.
        annotation: Type as it is written in the source, such as `int` or `list[str]`.
        read: Expression over `hf`, the checkpoint's (text) configuration as transformers reads it.
        doc: One sentence that says what the field is.
    """

    name: str
    annotation: str
    read: str
    doc: str


@dataclass(frozen=True)
class Rename:
    """Checkpoint tensors whose names begin with one prefix get another.

    The first rule whose prefix fits wins; a tensor that already has a parameter's name keeps it.
    """

    from_prefix: str
    to_prefix: str


@dataclass(frozen=True)
class Fuse:
    """Checkpoint tensors stored end to end along `axis` in one parameter, in this order."""

    sources: tuple[str, ...]
    target: str
    axis: int = 0


@dataclass(frozen=True)
class Transpose:
    """A two-dimensional checkpoint tensor whose axes the graph swaps (GPT-2's Conv1D).

    Applied before renaming and fusing; `pattern` is the tensor's name in the checkpoint.
    """

    pattern: str


@dataclass(frozen=True)
class Drop:
    """A checkpoint tensor the graph does not need, and why."""

    pattern: str
    why: str


@dataclass(frozen=True)
class Tie:
    """A head that is the embedding's weight when the checkpoint does not store its own.

    Args:
        target: The head's parameter.
        source: The embedding's parameter.
        field: Name of the boolean configuration field that tells the graph; set from the loaded
            weights, so that the checkpoint's tensors decide and not its config.json.
    """

    target: str
    source: str
    field: str = "tie_word_embeddings"


WeightRule = Rename | Fuse | Transpose | Drop | Tie


@dataclass(frozen=True)
class KVCache:
    """Layout of the paged KV cache, each an expression over `hf`."""

    num_layers: str = "hf.num_hidden_layers"
    n_kv_heads: str = "hf.num_key_value_heads"
    head_dim: str = "hf.head_dim"


@dataclass(frozen=True)
class FixedKey:
    """A configuration key that decides what is computed: a port is right for one value of it.

    Args:
        key: The key in config.json, nested ones with a dot.
        read: Expression over `hf`.
        value: What it was when the model was traced: a flag, a name or None.
    """

    key: str
    read: str
    value: str | bool | None


@dataclass(frozen=True)
class PortSpec:
    """Everything the files around the graph need.

    Args:
        slug: Folder, package and graph file name.
        class_name: Name the port registers: `architectures[0]`, with `_ModuleV3` where MAX has one.
        graph_class: Class in `<slug>.py`, called with the configuration.
        config_class: Name of the port's configuration class.
        display_name: How docstrings name the model family, such as `Helium`.
        hf_class: The transformers class the port computes the same as.
        hf_file: Where that class lives, such as `modeling_helium.py`.
        transformers_version: Version the port was made from.
        config_fields: Fields the graph reads, in order.
        fixed: Keys that a checkpoint must have as they were when the model was traced.
        parameters: The graph's parameter names as patterns; every tensor must end at one.
        weight_rules: How the checkpoint's tensors become those parameters.
        kv_cache: Layout of the KV cache.
        max_length: Expression over `hf` for the longest request; None if the model has no bound.
        text_config: Attribute of the checkpoint's configuration that holds the text model's; empty
            where the configuration is the text model's own.
        config_imports: Import statements that annotations and expressions need.
        example_repo_ids: Checkpoints the port was made for.
        encodings: Dtypes the graph runs in.
        default_encoding: The dtype used where MAX cannot tell it from the weights.
    """

    slug: str
    class_name: str
    graph_class: str
    config_class: str
    display_name: str
    hf_class: str
    hf_file: str
    transformers_version: str
    config_fields: tuple[ConfigField, ...]
    parameters: tuple[str, ...]
    weight_rules: tuple[WeightRule, ...] = ()
    fixed: tuple[FixedKey, ...] = ()
    kv_cache: KVCache = KVCache()
    max_length: str | None = "hf.max_position_embeddings"
    text_config: str = ""
    config_imports: tuple[str, ...] = ()
    example_repo_ids: tuple[str, ...] = ()
    encodings: tuple[Encoding, ...] = ("float32", "bfloat16")
    default_encoding: Encoding = "bfloat16"

    def rules(self, kind: type) -> tuple:
        """The weight rules of one kind, in order."""
        return tuple(rule for rule in self.weight_rules if isinstance(rule, kind))

    @property
    def tie(self) -> Tie | None:
        """The tied head's rule, if the model can tie its head."""
        ties = self.rules(Tie)
        return ties[0] if ties else None

    def check(self) -> None:
        """Raise if the parts contradict each other or cannot be written as Python.

        Raises:
            MaxportError: Naming the field, rule or name that is wrong.
        """
        for name in (self.slug, self.class_name, self.graph_class, self.config_class):
            _identifier(name, self.slug)
        _check_fields(self)
        _check_rules(self)


#: Fields every port's configuration has.
OWN_FIELDS = ("dtype", "devices", "device", "max_seq_len", "kv_params", "return_logits")


def _identifier(name: str, where: str) -> None:
    if not name.isidentifier():
        raise MaxportError(f"{name!r} is not a Python identifier", where=where)


def _expression(text: str, where: str) -> None:
    try:
        compile(text, where, "eval")
    except SyntaxError as error:
        raise MaxportError(f"{text!r} is not a Python expression", where=where) from error


def _check_fields(spec: PortSpec) -> None:
    seen: set[str] = set()
    for field in spec.config_fields:
        where = f"config field {field.name}"
        _identifier(field.name, where)
        if field.name in OWN_FIELDS or field.name in seen:
            raise MaxportError(f"config field {field.name!r} is defined twice", where=spec.slug)
        seen.add(field.name)
        _expression(field.read, where)
        _expression(field.annotation, where)
        if not field.doc.strip():
            raise MaxportError("a config field needs a docstring", where=where)
    for text in (spec.kv_cache.num_layers, spec.kv_cache.n_kv_heads, spec.kv_cache.head_dim):
        _expression(text, "kv cache")
    if spec.tie and spec.tie.field not in seen:
        raise MaxportError(
            f"the tied head needs a config field {spec.tie.field!r}", where=spec.slug
        )


def _check_rules(spec: PortSpec) -> None:
    if len(spec.rules(Tie)) > 1:
        raise MaxportError("more than one tied head", where=spec.slug)
    for rule in spec.rules(Fuse):
        if rule.target not in spec.parameters:
            raise MaxportError(f"fused weight {rule.target!r} is no parameter", where=spec.slug)
        if len(rule.sources) < 2:
            raise MaxportError(f"fused weight {rule.target!r} has fewer than two parts")
        for source in rule.sources:
            if source.count("{i}") != rule.target.count("{i}"):
                raise MaxportError(f"{source!r} and {rule.target!r} differ in {{i}}")
    for pattern in spec.parameters:
        if re.sub(r"\{i\}", "", pattern, count=1).count("{"):
            raise MaxportError(f"{pattern!r} has a variable other than one {{i}}")
    if spec.tie and not {spec.tie.target, spec.tie.source} <= set(spec.parameters):
        raise MaxportError("the tied head or its embedding is no parameter", where=spec.slug)
