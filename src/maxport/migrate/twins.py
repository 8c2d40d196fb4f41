"""A tiny checkpoint for a registered architecture: what both generations are built from.

Decoders use maxport's own twins. Encoders, which maxport does not port and so has no twins for, get
a small configuration of the same class; only shapes matter here, not weights.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from maxport.errors import MaxportError
from maxport.migrate.keys import keys_read
from maxport.migrate.plan import Plan
from maxport.migrate.target import Target

# Small values for the numbers that size an encoder; keys a config does not have are left alone.
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 160,
}

# Small values for the numbers that size the vision part of a model of images and text.
_SMALL_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "image_size": 56,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
}
# RoPE as long-context checkpoints have it; some architectures build for nothing else.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def registered_names(target: Target) -> list[str]:
    """`name=` of every architecture that the target's files register, in order."""
    found: list[str] = []
    for path in target.files:
        source = target.sources.module(target.module_name(path))
        for node in ast.walk(source.tree) if source else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "SupportedArchitecture":
                found += [
                    keyword.value.value
                    for keyword in node.keywords
                    if keyword.arg == "name"
                    and isinstance(keyword.value, ast.Constant)
                    and isinstance(keyword.value.value, str)
                ]
    return found


@cache
def _model_types() -> dict[str, str]:
    """Transformers class name -> model type, read from its auto tables without importing it."""
    spec = find_spec("transformers")
    folder = Path(str(spec.origin)).parent if spec and spec.origin else None
    path = folder / "models" / "auto" / "modeling_auto.py" if folder else None
    if path is None or not path.is_file():
        raise MaxportError("transformers is not installed here", fix="pip install transformers")
    pairs = re.findall(r'\("([\w-]+)",\s*"(\w+)"\)', path.read_text("utf-8"))
    types: dict[str, str] = {}
    for model_type, name in pairs:
        types.setdefault(name, model_type)
    return types


def model_type_of(class_name: str) -> str:
    """Transformers model type of a model class; the text model's where a class has several parts.

    Raises:
        MaxportError: transformers has no such class.
    """
    types = _model_types()
    if class_name not in types:
        raise MaxportError(
            f"transformers has no class {class_name}, so there is no twin to prove with",
            where=class_name,
            code=1,
        )
    model_type = types[class_name]
    text = f"{model_type}_text"
    return text if text in types.values() else model_type


def make_twin(class_name: str, folder: Path) -> Path:
    """Write a tiny checkpoint of a registered class into `folder` and return it.

    Raises:
        MaxportError: transformers has no such class, or no small configuration of it builds.
    """
    from maxport.twin import default_config, save_twin, twin_config

    config = default_config(model_type_of(class_name))
    if _sees(class_name) and not config.model_type.endswith("_text"):
        return _whole_twin(class_name, folder)
    if class_name.endswith("ForCausalLM") or "ConditionalGeneration" in class_name:
        twin = twin_config(config)
        if not hasattr(twin, "head_dim") and hasattr(twin, "num_attention_heads"):
            # Published configs state it, transformers' defaults may not, and MAX reads it.
            twin.head_dim = twin.hidden_size // twin.num_attention_heads
        twin.architectures = [class_name]
        return Path(save_twin(twin, folder))
    import transformers

    small = {key: value for key, value in _SMALL.items() if hasattr(config, key)}
    config = type(config)(**small)
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(folder)
    config.architectures = [class_name]  # after the model, which names its own class
    config.save_pretrained(folder)
    return folder


def _sees(class_name: str) -> bool:
    """Whether a transformers class is a model of images and text."""
    import transformers

    config = getattr(getattr(transformers, class_name, None), "config_class", None)
    return {"text_config", "vision_config"} <= set(getattr(config, "sub_configs", ()))


def _whole_twin(class_name: str, folder: Path) -> Path:
    """Write a tiny model of images and text, its text part one of maxport's own twins."""
    import transformers

    from maxport.twin import twin_config
    from maxport.twin.model import randomise

    cls = getattr(transformers, class_name)
    whole = cls.config_class()
    text = twin_config(whole.get_text_config(decoder=True))
    vision = whole.vision_config or whole.sub_configs["vision_config"]()
    for key, value in _SMALL_VISION.items():
        if hasattr(vision, key):
            setattr(vision, key, value)
    if hasattr(vision, "output_proj_dims"):
        vision.output_proj_dims = text.hidden_size
    config = cls.config_class(text_config=text.to_dict(), vision_config=vision.to_dict())
    config.architectures = [class_name]
    config.tie_word_embeddings = text.tie_word_embeddings
    model = cls._from_config(config, attn_implementation="eager").eval()
    randomise(model, 1)
    model.save_pretrained(folder)
    return folder


def variants(twin: Path, plan: Plan, class_name: str) -> Iterator[tuple[str, Path]]:
    """The twin, then copies of it closer to what is published, for V2 that refuses the twin.

    A twin of a model of images and text is of its text part. Transformers' class defaults lack
    keys that published configs have, and have plain RoPE.

    Args:
        twin: From `make_twin`.
        plan: The migration's, whose V2 code says what keys it reads.
        class_name: What the twin was made for.

    Yields:
        (what was added, the folder); nothing was added to the first.
    """
    yield "", twin
    if _sees(class_name) and "vision_config" not in _config_of(twin):
        with suppress(MaxportError):
            yield "the vision part", _whole_twin(class_name, twin.with_name(f"{twin.name}-whole"))
    read = keys_read(plan)

    def completed(config: dict[str, Any]) -> dict[str, Any]:
        return {**read, **config}

    def scaled(config: dict[str, Any]) -> dict[str, Any]:
        return {**read, **config, "rope_parameters": YARN, "rope_scaling": YARN}

    yield "the keys V2 reads", _changed(twin, "keys", completed)
    yield "the keys V2 reads and YaRN", _changed(twin, "yarn", scaled)


def _config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text("utf-8")))


def _changed(twin: Path, suffix: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A copy of a checkpoint beside it, with another config.json."""
    copy = twin.with_name(f"{twin.name}-{suffix}")
    if not copy.exists():
        shutil.copytree(twin, copy)
        (copy / "config.json").write_text(json.dumps(change(_config_of(twin))), "utf-8")
    return copy


def in_bfloat16(twin: Path) -> Path:
    """A copy of a checkpoint beside it, with bfloat16 weights."""
    from safetensors.torch import load_file, save_file

    copy = twin.with_name(f"{twin.name}-bf16")
    if copy.exists():
        return copy
    shutil.copytree(twin, copy)
    for path in copy.glob("*.safetensors"):
        save_file({k: v.bfloat16() for k, v in load_file(path).items()}, path, {"format": "pt"})
    config = {**_config_of(twin), "dtype": "bfloat16"}
    for part in ("text_config", "vision_config"):
        if isinstance(config.get(part), dict):
            config[part] = {**config[part], "dtype": "bfloat16"}
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    return copy
