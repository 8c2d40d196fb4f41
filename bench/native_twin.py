"""Twin checkpoints for native_row.py, in the form in which such checkpoints are published."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxport.errors import MaxportError

#: Keys that published config.json files have, transformers' config classes drop on saving, and
#: MAX reads. Values are those of the published DeepSeek configs.
PUBLISHED_KEYS: dict[str, Any] = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "seq_aux": True,
}
#: The same where families differ, by model type.
PUBLISHED_ROUTING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v32": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm_moe_dsa": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v4": {
        "dspark_target_layer_ids": [0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 0,
        "dspark_markov_rank": 256,
        "expert_dtype": None,
    },
    "hy_v3": {"route_norm": True, "first_k_dense_replace": 1},
}

#: The same in the text part's config: the regular Gemma 4 layout, which MAX's gemma4/arch.py says
#: the unified checkpoints have, of a model without experts and per-layer inputs.
PUBLISHED_TEXT: dict[str, dict[str, Any]] = {
    "gemma4_unified": {
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 262144,
    },
}

#: Tensor names of published checkpoints where transformers saves others (NemotronH).
PUBLISHED_NAMES = {"backbone.embedding.weight": "backbone.embeddings.weight"}

#: The same as patterns, in order; DeepSeek V4's are transformers' conversion_mapping.py reversed.
PUBLISHED_PATTERNS: dict[str, list[tuple[str, str]]] = {
    "deepseek_v4": [
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.self_attn\.sinks$", ".attn.attn_sink"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.scorer\.", "."),
        (
            r"\.compressor\.indexer\.(kv_|gate_|position_)",
            r".indexer.compressor.\1",
        ),
        (r"\.compressor\.indexer\.", ".indexer."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"(attn\S*)\.gate_proj\.", r"\1.wgate."),
        (r"\.gate_proj\.", ".w1."),
        (r"\.down_proj\.", ".w2."),
        (r"\.up_proj\.", ".w3."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    ],
}

#: Tensors that bfloat16 checkpoints keep in float32 (DeepSeek V3, Nemotron-H).
PUBLISHED_FLOAT32 = ("e_score_correction_bias",)

#: Edge of the blocks that float8 checkpoints have a scale for, and what they leave in bfloat16.
BLOCK = 128
UNQUANTIZED = ("embed", "lm_head", "norm", ".gate.weight", "weights_proj")

#: Sizes that suit float8 blocks and sparse latent attention, as DeepSeek V3.2 has them.
SPARSE_LATENT = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "head_dim": 64,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 16,  # with few, tokens tie at a score of 0
}

#: Sizes that a family's graph is built around and a twin changes.
PUBLISHED_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "head_dim": 128,  # 64 without rotation, the block of its cache's quantization
        "partial_rotary_factor": 0.5,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "index_n_heads": 16,
    },
    "deepseek_v32": SPARSE_LATENT,
    "glm_moe_dsa": SPARSE_LATENT,
    "minimax_m2": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128},
}

#: A small encoder, in the names that encoders' configs share.
ENCODER_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 132,
    "layer_norm_eps": 3e-4,
}


#: A small vision part; only that it is there matters to a language model.
VISION_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 56,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
}


class NotJudged(Exception):
    """The row has a verdict without numbers."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.verdict, self.why = verdict, why


def generates(cls: Any) -> bool:
    """Whether a transformers class is a language model; the others here are encoders."""
    return "CausalLM" in cls.__name__ or "ConditionalGeneration" in cls.__name__


@functools.cache
def twin_of(name: str) -> Any:
    """The small config of a transformers class, searched for once."""
    import transformers

    from maxport.twin import twin_config

    # Not by model type: importing MAX registers config classes of its own over transformers'.
    cls = getattr(transformers, name)
    if not generates(cls):
        return cls.config_class(**ENCODER_SIZES)
    config = cls.config_class()
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_decoder", None) is False and not config.is_encoder_decoder:
        text.is_decoder = True
    return twin_config(config, 0)


def make_twin(
    name: str, encoding: str, temp: Path, changes: Mapping[str, Any], *, images: bool = False
) -> Path:
    """A twin checkpoint of transformers' class `name`, with the keys that published ones have.

    Args:
        name: Hugging Face class name.
        encoding: Dtype of the weights; float8_e4m3fn quantizes the layers' products in blocks,
            and `reference_of` then holds the weights as they are multiplied out.
        temp: Where to make it.
        changes: Config fields to set.
        images: Make the whole checkpoint of a model of images and text. `reference_of` then is
            its text part alone.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cls = getattr(transformers, name, None)
    if cls is None or getattr(cls, "config_class", None) is None:
        raise NotJudged("no-reference", f"transformers {transformers.__version__} has no {name}")
    if not generates(cls) and not name.endswith(("Model", "MaskedLM")):
        why = f"no twin of {name}: neither a language model nor an encoder"
        raise NotJudged("no-reference", why)
    quantized = encoding == "float8_e4m3fn"
    dtype = torch.bfloat16 if quantized else getattr(torch, encoding)
    try:
        if images:
            folder = save_whole(cls, temp, dtype, changes)
        else:
            config = copy.deepcopy(twin_of(name))
            with_changes(config, {**PUBLISHED_SIZES.get(config.model_type, {}), **changes})
            config.architectures = [name]
            folder = save(cls, config, temp / "twin", dtype)
    except MaxportError as error:
        raise NotJudged("no-reference", f"no twin of {name}: {error}") from error
    rename_tensors(folder, PUBLISHED_PATTERNS.get(cls.config_class.model_type, []))
    path = folder / "config.json"
    written = json.loads(path.read_text("utf-8"))
    published = {**PUBLISHED_KEYS, **PUBLISHED_ROUTING.get(cls.config_class.model_type, {})}
    added = {key: value for key, value in published.items() if key not in written}
    added |= {key: value for key, value in derived_keys(written).items() if key not in written}
    if images:
        text = PUBLISHED_TEXT.get(cls.config_class.model_type, {})
        added["text_config"] = {**text, **written["text_config"]}
    written["architectures"] = [name]
    path.write_text(json.dumps(coherent({**written, **added}), indent=2), "utf-8")
    if quantized:
        quantize(folder)
    return folder


def quantize(folder: Path) -> None:
    """Turn a bfloat16 twin into the float8 form in which DeepSeek and others publish.

    The layers' weights become float8_e4m3fn with a float32 scale for each block of 128 x 128.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors, plain = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors[name] = plain[name] = value
        if value.ndim != 2 or not name.endswith(".weight") or any(k in name for k in UNQUANTIZED):
            continue
        sizes = value.shape
        counts = [-(-size // BLOCK) for size in sizes]
        padded = torch.zeros(*(count * BLOCK for count in counts))
        padded[: sizes[0], : sizes[1]] = value
        blocks = padded.reshape(counts[0], BLOCK, counts[1], BLOCK)
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
        small = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = small.reshape(padded.shape)[: sizes[0], : sizes[1]].contiguous()
        tensors[f"{name}_scale_inv"] = scales
        whole = (small.float() * scales[:, None, :, None]).reshape(padded.shape)
        plain[name] = whole[: sizes[0], : sizes[1]].contiguous()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    apart = folder.with_name("reference")
    apart.mkdir()
    (apart / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(plain, apart / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")


def with_changes(config: Any, changes: Mapping[str, Any]) -> Any:
    """`config` with fields set."""
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def reference_of(folder: Path) -> Path:
    """What transformers reads for a twin: a folder of its own where it has one, else the twin."""
    apart = folder.with_name("reference")
    return apart if apart.is_dir() else folder


def save_whole(cls: Any, temp: Path, dtype: Any, changes: Mapping[str, Any]) -> Path:
    """Write a model of images and text to `twin`, and its text part to `reference`."""
    from maxport.twin import causal_lm_class, twin_config
    from maxport.twin.model import randomise

    whole = cls.config_class()
    text = with_changes(twin_config(whole.get_text_config(decoder=True), 0), changes)
    vision = whole.vision_config or whole.sub_configs["vision_config"]()
    for key, value in VISION_SIZES.items():
        if hasattr(vision, key):
            setattr(vision, key, value)
    if hasattr(vision, "output_proj_dims"):
        vision.output_proj_dims = text.hidden_size
    config = cls.config_class(text_config=text.to_dict(), vision_config=vision.to_dict())
    config.architectures = [cls.__name__]
    config.tie_word_embeddings = text.tie_word_embeddings
    model = cls._from_config(config, attn_implementation="eager", dtype=dtype).eval()
    randomise(model, 1)
    model.save_pretrained(temp / "twin")
    language = causal_lm_class(text)._from_config(text, attn_implementation="eager", dtype=dtype)
    language.model.load_state_dict(model.model.language_model.state_dict())
    language.lm_head.load_state_dict(model.lm_head.state_dict())
    language.config.architectures = [type(language).__name__]
    language.save_pretrained(temp / "reference")
    return temp / "twin"


def rename_tensors(folder: Path, patterns: Sequence[tuple[str, str]] = ()) -> None:
    """Give tensors the names and dtypes of published checkpoints; transformers saves others."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {}
    for name, value in load_file(path).items():
        new = PUBLISHED_NAMES.get(name, name)
        for pattern, replacement in patterns:
            new = re.sub(pattern, replacement, new)
        tensors[new] = value.float() if name.endswith(PUBLISHED_FLOAT32) else value
    save_file(tensors, path, metadata={"format": "pt"})


def derived_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of published configs that follow from others."""
    keys: dict[str, Any] = {}
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        keys["rope_theta"] = rope["rope_theta"]
    if "hidden_size" in config and "num_attention_heads" in config:
        keys["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return keys


def coherent(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its window period as its layer kinds have it; twins keep fewer layers."""
    # DeepSeek V4 is published with a count of layers that route by hash, before MAX's own class.
    routing = config.get("mlp_layer_types") or []
    if "hash_moe" in routing:
        config["num_hash_layers"] = routing.count("hash_moe")
        del config["mlp_layer_types"]
    kinds = config.get("layer_types") or []
    if config.get("compress_rates"):
        del config["rope_parameters"]
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        }
        config["compress_ratios"] = [config["compress_rates"].get(kind, 0) for kind in kinds]
    if "full_attention" in kinds and "sliding_attention" in kinds:
        for key in ("_sliding_window_pattern", "sliding_window_pattern"):
            if config.get(key):
                config[key] = kinds.index("full_attention") + 1
    return config


def save(cls: Any, config: Any, folder: Path, dtype: Any) -> Path:
    """Write the twin; encoders are no causal LMs, which is what `save_twin` writes."""
    import transformers

    from maxport.twin import save_twin
    from maxport.twin.model import randomise

    if generates(cls):
        return Path(save_twin(config, folder, dtype=dtype))
    # Embedding checkpoints are published as the bare encoder, whatever class they name.
    model = transformers.AutoModel.from_config(config).to(dtype).eval()
    randomise(model, 1)
    model.save_pretrained(folder)
    return folder
