"""Build a twin's model: the right causal-LM class with random weights that let faults show."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from maxport.errors import MaxportError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def default_config(model_type: str) -> PreTrainedConfig:
    """The class default (full-size) config of a transformers model type, ready to shrink.

    An encoder family's class (BERT and its kin) is set to decode.

    Raises:
        MaxportError: If transformers knows no such type, or its class has no default.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise MaxportError(
            f"transformers knows no model type {model_type!r}",
            fix="see transformers.CONFIG_MAPPING for the known types",
        )
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise MaxportError(
            f"the config class of {model_type!r} has no defaults",
            where=str(error).splitlines()[0],
            fix="pass a checkpoint's config instead",
        ) from error
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_decoder", None) is False and not config.is_encoder_decoder:
        text.is_decoder = True
    return config


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a multimodal config that is a causal LM of its own; else the config itself."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    if text is config or getattr(config, "auto_map", None):
        return config
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    except KeyError:
        return config
    return text if found is not None else config


def causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class whose `forward` gives next-token logits for `config`.

    The checkpoint's own `architectures[0]` if it is a causal LM of this config class, else the
    class transformers' auto model picks; remote code is loaded from the config's folder.

    Raises:
        MaxportError: If there is no causal-LM class.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    auto_map = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in auto_map:
        return _remote_class(config, auto_map["AutoModelForCausalLM"])
    named = (getattr(config, "architectures", None) or [""])[0]
    cls: type[PreTrainedModel] | None = getattr(transformers, named, None) if named else None
    if cls is not None and "CausalLM" in named and cls.config_class is type(config):
        return cls
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        found = None
    if found is None:
        raise MaxportError(
            f"{type(config).__name__} has no causal-LM class in transformers",
            where=f"model_type {config.model_type!r}",
            fix="maxport ports decoder language models only",
        )
    first: type[PreTrainedModel] = found[0] if isinstance(found, tuple | list) else found
    return first


def _remote_class(config: PreTrainedConfig, reference: str) -> type[PreTrainedModel]:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    cls: type[PreTrainedModel] = get_class_from_dynamic_module(
        reference, getattr(config, "_name_or_path", "") or "."
    )
    return cls


def twin_model(
    config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model of `config`: eager attention, eval mode, every parameter random.

    Norm weights are 1 + 0.3 N(0, 1) (0.3 N(0, 1) where they start at 0) and biases 0.3 N(0, 1),
    so that a forgotten norm, a forgotten offset or a forgotten bias changes the logits; tied heads
    stay tied. Buffers are left alone. Equal seeds give equal weights up to `dtype`'s rounding.

    Args:
        config: A small config (`twin_config`); a real one would be built at its full size.
        seed: Random seed.
        dtype: Parameters' dtype; float32 if None.
    """
    import torch

    cls = causal_lm_class(config)
    # Some models write into their configuration (Falcon); the caller's stays as it is.
    config = copy.deepcopy(own_config(cls, config))
    kwargs: dict[str, Any] = {"dtype": dtype or torch.float32}
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        try:
            model = cls._from_config(config, attn_implementation="eager", **kwargs)
        except (ValueError, TypeError):  # a class without the attention interface
            model = cls._from_config(config, **kwargs)
    finally:
        torch.random.set_rng_state(state)
    model.eval()
    randomise(model, seed + 1)
    return model


def own_config(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """A multimodal config's text part, where the class takes only that."""
    wanted = cls.config_class
    if wanted is not None and not isinstance(config, wanted):
        text = config.get_text_config(decoder=True)
        if isinstance(text, wanted):
            return text
    return config


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every floating-point parameter of `model` a random value, in place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_weight(name, parameter, noise, id(parameter) in embeddings))


def _weight(
    name: str, parameter: torch.Tensor, noise: torch.Tensor, embedding: bool
) -> torch.Tensor:
    old = parameter.detach().float()
    if name.endswith(("A_log", "dt_bias", "time_decay", "time_first")):
        return (
            old + 0.1 * noise
        )  # state-space rates must stay in the range the class starts them in
    if parameter.ndim < 2:
        centre = old.mean() if old.numel() and bool((old == old.flatten()[0]).all()) else 0.0
        return centre + 0.3 * noise
    if embedding:
        return 0.5 * noise
    fan_in = parameter[0].numel() if parameter.ndim < 3 else parameter.shape[-1]
    return noise * float(fan_in) ** -0.5
