"""A checkpoint's configuration as transformers reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxport.checkpoint import known_model_types
from maxport.errors import MaxportError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from maxport.checkpoint import Checkpoint


def load_config(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The (text) configuration to trace, with `architectures` from config.json.

    Raises:
        MaxportError: transformers knows no such model type, config.json does not fit it, or the
            model is no decoder.
    """
    from transformers import AutoConfig

    from maxport.twin import causal_lm_class

    model_type = checkpoint.config.get("model_type")
    remote = bool(checkpoint.config.get("auto_map"))
    where = str(checkpoint.folder / "config.json")
    if not remote and model_type not in known_model_types():
        raise MaxportError(
            f"transformers knows no model type {model_type!r}",
            where=where,
            fix="update transformers, or check `model_type` for a typing error",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises whatever a config class raises
        reason = str(error).strip().split("\n", 1)[0]
        raise MaxportError(
            f"transformers cannot read the configuration: {reason}",
            where=where,
            fix="compare config.json with the model's page on the Hub",
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise MaxportError(
            f"{model_type} is an encoder-decoder, not a decoder",
            where=where,
            fix="maxport ports decoder language models only",
        )
    named = (checkpoint.config.get("architectures") or [""])[0]
    if not remote and not named.endswith(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    ):
        raise MaxportError(
            f"{named} is no decoder language model",
            where=where,
            fix="maxport ports classes that predict the next token, such as ...ForCausalLM",
        )
    causal_lm_class(config)
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    return text
