"""From a configuration to the files of a port."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import transformers
from transformers import PreTrainedConfig

from maxport.emit.expr import Expr, FieldSource
from maxport.emit.graphfile import GraphFile, render_graph
from maxport.emit.helpers import render_functional
from maxport.emit.shell import render_shell
from maxport.emit.spec import (
    ConfigField,
    Drop,
    KVCache,
    PortSpec,
    Rename,
    Tie,
    Transpose,
    WeightRule,
)
from maxport.errors import MaxportError
from maxport.trace.study import Study, refusing_unknown, study


@dataclass
class Port:
    """A port before it is written: its files and what they were made from."""

    spec: PortSpec
    files: dict[str, str]
    study: Study


def field_docs(source: FieldSource) -> str:
    """One sentence on a configuration field."""
    known = {
        "head_dim": "Width of one attention head.",
        "hidden_size": "Width of the residual stream.",
        "intermediate_size": "Width of the MLP's inner layer.",
        "layer_types": "Kind of each layer.",
        "num_attention_heads": "Query heads of a layer.",
        "num_hidden_layers": "Number of decoder layers.",
        "num_key_value_heads": "Key and value heads of a layer.",
        "pad_token_id": "Id of the padding token.",
        "rms_norm_eps": "Added to the mean square in every RMS norm.",
        "rope_theta": "Base of the rotary frequencies.",
        "sliding_window": "Tokens that a sliding-window layer sees, itself included.",
        "tie_word_embeddings": "Whether the head is the token embedding; the tensors decide.",
        "vocab_size": "Rows of the embedding and the head.",
    }
    words = source.name.replace("_", " ")
    return known.get(source.name, f"`{source.read.removeprefix('hf.')}` of config.json: {words}.")


def _sources(study: Study, names: Sequence[str]) -> list[ConfigField]:
    by_name = {s.name: s for s in study.lifted.fields}
    fields = []
    for name in names:
        if name in ("max_seq_len", "dtype", "kv_params"):
            continue
        source = by_name.get(name) or FieldSource(name, f"hf.{name}", (0,), _type_of(name))
        fields.append(ConfigField(name, source.annotation, source.read, field_docs(source)))
    return fields


def _type_of(name: str) -> str:
    return "bool" if name == "tie_word_embeddings" else "int"


def _over_hf(study: Study, value: object) -> str:
    """An expression over `config` as one over `hf`."""
    if not isinstance(value, Expr):
        return repr(value)
    by_name = {s.name: s for s in study.lifted.fields}

    def read(match: re.Match[str]) -> str:
        text = by_name[match[1]].read
        return text if text.isidentifier() or re.fullmatch(r"[\w.\[\]\"]+", text) else f"({text})"

    return re.sub(r"config\.(\w+)", read, value.text)


def _rules(study: Study, graph: GraphFile, stored: Sequence[str]) -> list[WeightRule]:
    rules: list[WeightRule] = [Transpose(name) for name in graph.transposed]
    if graph.head is not None:
        target, source = graph.head
        rules.append(Tie(target, source))
    rules += [Rename(before, after) for before, after in graph.renamed]
    names = set(graph.parameters) | ({graph.head[0]} if graph.head else set())
    patterns = {re.sub(r"(?<=\.)\d+(?=\.)", "{i}", key, count=1) for key in stored}
    prefix = f"{study.base_prefix}."
    for pattern in sorted(patterns - names):
        if prefix + pattern in names:
            rules.append(Rename(_first_part(pattern), prefix + _first_part(pattern)))
        elif _ignored(study, pattern):
            rules.append(Drop(pattern, "transformers ignores it too: it is computed, not learnt"))
    return list(dict.fromkeys(rules))


def _first_part(pattern: str) -> str:
    return pattern.split(".")[0] + "."


def _ignored(study: Study, pattern: str) -> bool:
    name = pattern.replace("{i}", "0")
    return any(re.search(p, name) for p in study.ignored) or name.endswith("rotary_emb.inv_freq")


def make_port(
    config: PreTrainedConfig,
    *,
    slug: str,
    class_name: str | None = None,
    stored: Sequence[str] = (),
    repos: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
    window: int | None = None,
) -> Port:
    """Trace, recognise and emit.

    Args:
        config: The checkpoint's (text) configuration at its real size.
        slug: The port's folder, package and graph file.
        class_name: Name under which MAX registers it; the transformers class's if None.
        stored: The checkpoint's tensor names, if it has any.
        repos: Checkpoints to name as examples.
        progress: Called with what is being done.
        window: Sliding window of the twins.

    Raises:
        MaxportError: The model cannot be ported; says where and why.
    """
    with refusing_unknown(config):
        result = study(config, progress=progress, window=window)
        progress("writing the port")
        return _make(config, result, slug, class_name, stored, repos)


def _make(
    config: PreTrainedConfig,
    result: Study,
    slug: str,
    class_name: str | None,
    stored: Sequence[str],
    repos: Sequence[str],
) -> Port:
    """Emit what was traced."""
    hf_class = result.model_class.__name__
    display = hf_class.removesuffix("ForCausalLM").removesuffix("LMHeadModel") or hf_class
    config_class = f"{display}Config"
    origin = result.origins.get(
        f"{result.model_class.__module__}.{result.model_class.__qualname__}"
    )
    heading = (
        f"{display} decoder as a MAX ModuleV3 graph. Computes what transformers "
        f"{transformers.__version__} `{hf_class}` computes. Tokens of all requests lie end to end "
        "in one ragged axis, `total`."
    )
    graph = render_graph(
        result.lifted,
        config_class=config_class,
        origins=result.origins,
        heading=heading,
        tie_field=hasattr(config, "tie_word_embeddings"),
    )
    if graph.buffers:
        raise MaxportError(
            f"the model reads constants that it computes itself: {', '.join(graph.buffers)}",
            fix="report the model; its constants have no known formula",
        )
    names = list(dict.fromkeys([*graph.fields, *(["tie_word_embeddings"] if graph.head else [])]))
    parameters = [p for p in graph.parameters if not graph.head or p != graph.head[0]]
    if graph.head:
        parameters.append(graph.head[0])
    spec = PortSpec(
        slug=slug,
        class_name=class_name or hf_class,
        graph_class=graph.class_name,
        config_class=config_class,
        display_name=display,
        hf_class=hf_class,
        hf_file=origin.file if origin else "",
        transformers_version=transformers.__version__,
        config_fields=tuple(_sources(result, names)),
        parameters=tuple(parameters),
        weight_rules=tuple(_rules(result, graph, stored)),
        fixed=tuple(k for k in result.fixed if k.key not in names),
        kv_cache=KVCache(
            num_layers="hf.num_hidden_layers",
            n_kv_heads=_over_hf(result, graph.kv_heads),
            head_dim=_over_hf(result, graph.head_dim),
        ),
        max_length=_max_length(config),
        example_repo_ids=tuple(repos),
    )
    files = render_shell(spec)
    files[f"{slug}.py"] = graph.source
    files["functional.py"] = render_functional(graph.helpers)
    return Port(spec, files, result)


def _max_length(config: PreTrainedConfig) -> str | None:
    for name in ("max_position_embeddings", "max_seq_len"):
        if getattr(config, name, None):
            return f"hf.{name}"
    return None
