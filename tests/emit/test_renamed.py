"""Nothing depends on names: a copy of the modelling code with every name changed ports alike.

The copy is remote code: its classes, its modules, its parameters and its model type have new names.
The graph that MAX builds from its port must be the original's but for the weights' names.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.families

FAMILIES = ("llama", "qwen2", "gemma", "phi3", "glm", "olmo2")
#: Attributes that transformers' base classes read by name.
KEPT = {
    "attention_scaling", "config", "gradient_checkpointing", "inv_freq", "max_seq_len_cached",
    "original_inv_freq", "original_max_seq_len", "rope_type",
}  # fmt: skip


def renamed_source(source: str, config_class: str) -> tuple[str, dict[str, str]]:
    """The modelling file with every class, module and parameter renamed; and the new names."""
    source = re.sub(r"from \.\.\.(\w)", r"from transformers.\1", source)
    source = source.replace("from ... import", "from transformers import")
    source = re.sub(
        r"from \.configuration_\w+ import \w+", "from .configuration_zed import ZedConfig", source
    )
    source = re.sub(rf"\b{config_class}\b", "ZedConfig", source)
    source = re.sub(r"^ *@(auto_docstring|use_kernel\w*)(\(.*\))?\n", "", source, flags=re.M)
    classes = re.findall(r"^class (\w+)\(", source, flags=re.M)
    names = {c: f"Zed{i}" for i, c in enumerate(classes)}
    names |= {c: "ZedForCausalLM" for c in classes if c.endswith("ForCausalLM")}
    for old, new in names.items():
        source = re.sub(rf"\b{old}\b", new, source)
    attributes = set(re.findall(r"\bself\.(\w+) = ", source)) - KEPT
    attributes |= set(re.findall(r'register_buffer\("(\w+)"', source))
    for attribute in attributes:
        new = f"zed_{attribute}"
        if attribute == "weight":
            source = rename_own_weights(source, new)
        else:
            source = re.sub(rf"\b(self|module)\.{attribute}\b", rf"\1.{new}", source)
        source = source.replace(f'register_buffer("{attribute}"', f'register_buffer("{new}"')
    for name in ("lm_head", "embed_tokens", "model"):
        source = re.sub(rf'(?<=["."]){name}(?=["."])', f"zed_{name}", source)
    base = 'base_model_prefix = "zed_model"'
    source = source.replace(base, f'{base}\n    _input_embed_layer = "zed_embed_tokens"')
    return source, names


def rename_own_weights(source: str, new: str) -> str:
    """`self.weight` renamed in the classes that make it, not in those that inherit torch's."""
    blocks = re.split(r"(?=^class )", source, flags=re.M)
    return "".join(
        re.sub(r"\bself\.weight\b", f"self.{new}", b) if "self.weight = " in b else b
        for b in blocks
    )


def write_remote(folder: Path, family: str) -> None:
    """A config-only checkpoint whose modelling code is the renamed copy."""
    import transformers

    from maxport.twin import causal_lm_class, default_config

    config = default_config(family)
    model_class = causal_lm_class(config)
    config_class = type(config).__name__
    source, _ = renamed_source(inspect.getsource(inspect.getmodule(model_class)), config_class)
    folder.mkdir()
    (folder / "modeling_zed.py").write_text(source, "utf-8")
    (folder / "configuration_zed.py").write_text(
        f"from transformers import {config_class}\n\n\n"
        f"class ZedConfig({config_class}):\n    model_type = 'zed'\n",
        "utf-8",
    )
    raw = config.to_dict() | {
        "model_type": "zed",
        "architectures": ["ZedForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_zed.ZedConfig",
            "AutoModelForCausalLM": "modeling_zed.ZedForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(raw), "utf-8")
    assert transformers.__version__


def unnamed_graph(port_dir: Path, checkpoint: Path) -> str:
    """Hash of the built graph's dataflow, the weights numbered in the order of the modules."""
    from maxport.engine.build import build_port
    from maxport.engine.graphhash import graph_text, hash_graph

    built = build_port(port_dir, checkpoint, return_logits="all", trust_remote_code=True)
    text = graph_text(built.graph)
    for number, name in enumerate(built.weights):
        text = text.replace(f'name = "{name}"', f'name = "weight {number}"')
    found = hash_graph(text)
    assert not found.unknown and len(found.weights) > 10
    assert all(name.startswith("weight ") for name in found.weights)
    return found.root


@pytest.mark.parametrize("family", FAMILIES)
def test_a_renamed_copy_gives_the_same_graph(family: str, tmp_path: Path) -> None:
    import transformers

    from maxport.emit.write import write_port
    from maxport.trace.port import make_port
    from maxport.twin import default_config, save_twin, twin_config

    write_remote(tmp_path / "remote", family)
    renamed: Any = transformers.AutoConfig.from_pretrained(
        tmp_path / "remote", trust_remote_code=True
    )
    hashes = []
    default = default_config(family)
    original = type(default).from_dict(default.to_dict())
    for slug, config in (("original", original), ("renamed", renamed)):
        port = make_port(config, slug=f"{slug}_{family}")
        folder = write_port(tmp_path / "ports", port.spec.slug, port.files)
        checkpoint = tmp_path / f"{slug}-twin"
        save_twin(twin_config(config, 2), checkpoint)
        hashes.append(unnamed_graph(folder, checkpoint))
        assert (slug == "renamed") == (
            "Zed" in (folder / f"{port.spec.slug}.py").read_text("utf-8")
        )
    assert hashes[0] == hashes[1]
