"""Second look at native.py's differences: a line of MAX patched, and the row judged again.

A difference is MAX's, and its cause is known, if changing the line that the cause names makes the
graph equal to transformers. The patches say in code what each architecture does differently.

    python bench/native_confirm.py                 all rows that differ
    python bench/native_confirm.py Qwen3ForCausalLM:v2
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ARCHITECTURES = "max.pipelines.architectures"
Config = Mapping[str, Any]
Patch = Callable[[Config], Iterator[Any]]


@dataclass(frozen=True)
class Cause:
    """Why a row differs.

    Attributes:
        why: One sentence: what MAX's source does and transformers does not.
        patches: Yields context managers that undo it, given the twin's config.json.
        changes: Config fields to set besides, where transformers is what cannot be patched.
    """

    why: str
    patches: Patch
    changes: Mapping[str, Any] = field(default_factory=dict)


def module(name: str) -> Any:
    """A module of MAX's architectures, or of MAX."""
    return importlib.import_module(name if name.startswith("max.") else f"{ARCHITECTURES}.{name}")


def argument(owner: Any, **values: Any) -> Any:
    """`owner.__init__` called with these keyword arguments, whatever the caller says."""
    original = owner.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, **values})

    return mock.patch.object(owner, "__init__", init)


def truncated(value: float) -> float:
    """A float cut down to bfloat16, as MAX's `ops.constant` makes one; not rounded."""
    import numpy as np

    bits = np.array([value], np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return float(bits.view(np.float32)[0])


def cut_scalars(model: Any) -> None:
    """Cut the reference's scalar buffers as MAX's constants are."""
    for buffer in model.buffers():
        if buffer.numel() == 1 and buffer.is_floating_point():
            buffer.fill_(truncated(float(buffer)))


def llama_rope(config: Config) -> Iterator[Any]:
    """Tell the rope how wide a head is."""
    source = module("llama3.model_config")
    with_width = functools.partial(source.Llama3RotaryEmbedding, head_dim=config["head_dim"])
    yield mock.patch.object(source, "Llama3RotaryEmbedding", with_width)


def mistral_window(config: Config) -> Iterator[Any]:
    """Attend within the window."""
    source = module("max.nn.attention.attention_with_rope")
    from max.nn.attention import MHAMaskVariant

    original = source.flash_attention_ragged

    def windowed(*args: Any, **kwargs: Any) -> Any:
        kwargs["mask_variant"] = MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK
        kwargs["local_window_size"] = config["sliding_window"]
        return original(*args, **kwargs)

    yield mock.patch.object(source, "flash_attention_ragged", windowed)


def qwen3_eps(config: Config) -> Iterator[Any]:
    """Give the head norms the config's epsilon."""
    attention = module("qwen3.layers.attention").Qwen3Attention
    yield argument(attention, qk_norm_eps=config["rms_norm_eps"])


def olmo2_eps(config: Config) -> Iterator[Any]:
    """The same in Olmo 2."""
    attention = module("olmo2.layers.attention").Olmo2Attention
    yield argument(attention, rms_norm_eps=config["rms_norm_eps"])


def minimax_m2_eps(config: Config) -> Iterator[Any]:
    """The same in MiniMax M2."""
    attention = module("minimax_m2.layers.attention").MiniMaxM2Attention
    yield argument(attention, qk_norm_eps=config["rms_norm_eps"])


def qwen3_moe(config: Config) -> Iterator[Any]:
    """Leave the chosen experts' weights as they are, besides the epsilon."""
    from max.dtype import DType
    from max.graph import ops

    yield from qwen3_eps(config)
    gate = module("qwen3.layers.moe").Qwen3MoEGate

    def forward(self: Any, states: Any) -> Any:
        scores = ops.softmax(self.gate_score(states).cast(DType.float32), axis=-1)
        weights, chosen = ops.top_k(scores, k=self.num_experts_per_token, axis=-1)
        return chosen, weights.cast(states.dtype)

    if not config["norm_topk_prob"]:
        yield mock.patch.object(gate, "__call__", forward)


def gemma3_scale(lane: str) -> Patch:
    """Scale the scores by query_pre_attn_scalar."""

    def patches(config: Config) -> Iterator[Any]:
        import native_row

        source = module(f"gemma3{lane}.layers.attention")
        yield mock.patch.object(native_row, "round_scalars", cut_scalars)
        yield argument(source.Gemma3Attention, scale=config["query_pre_attn_scalar"] ** -0.5)

    return patches


def deepseek_v2(lane: str) -> Patch:
    """No mscale in the scores, and the scaling factor in greedy routing too."""

    def patches(config: Config) -> Iterator[Any]:
        if lane:
            rope = module("deepseekV2_modulev3.layers.rotary_embedding")
            gate = module("deepseekV2_modulev3.layers.moe_gate")
        else:
            rope, gate = module("max.nn.rotary_embedding"), module("deepseekV2.layers.moe_gate")
        owner = rope.DeepseekYarnRotaryEmbedding
        plain = lambda self, user_scale=None: user_scale  # noqa: E731
        yield mock.patch.object(owner, "compute_scale", plain)
        cls = gate.DeepSeekV2MoEGate
        name = "forward" if lane else "__call__"
        original = getattr(cls, name)

        def scaled(self: Any, *args: Any) -> Any:
            chosen, weights = original(self, *args)
            return chosen, weights * self.routed_scaling_factor

        if config["topk_method"] == "greedy":
            yield mock.patch.object(cls, name, scaled)

    return patches


def gpt_oss_truncate(lane: str) -> Patch:
    """Leave yarn's range unrounded where the config says truncate = false."""

    def v2(low: float, high: float, dim: int, base: float, positions: int) -> tuple[Any, Any]:
        from max.dtype import DType
        from max.graph import DeviceRef, ops

        source = module("max.nn.rotary_embedding")
        at = [
            source._yarn_find_correction_dim(
                ops.constant(turns, DType.float32, DeviceRef.CPU()), dim, base, positions
            )
            for turns in (low, high)
        ]
        return ops.max(at[0], 0), ops.min(at[1], dim - 1)

    def v3(self: Any, low: float, high: float, dim: int, base: float, positions: int) -> Any:
        from max.dtype import DType
        from max.experimental import functional as F

        at = [
            self._yarn_find_correction_dim(
                F.constant(turns, dtype=DType.float32, device=self.device), dim, base, positions
            )
            for turns in (low, high)
        ]
        return F.max(at[0], 0), F.min(at[1], dim - 1)

    def patches(config: Config) -> Iterator[Any]:
        name = "_yarn_find_correction_range"
        if lane == "v2":
            yield mock.patch.object(module("max.nn.rotary_embedding"), name, v2)
            # 1.702 is a bfloat16 constant in the graph, made by cutting bits off.
            from transformers.models.gpt_oss import modeling_gpt_oss

            original = modeling_gpt_oss.GptOssExperts.__init__

            def rounded(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                self.alpha = truncated(1.702)

            yield mock.patch.object(modeling_gpt_oss.GptOssExperts, "__init__", rounded)
        else:
            source = module("max.experimental.nn.common_layers.rotary_embedding")
            yield mock.patch.object(source.YarnRotaryEmbedding, name, v3)

    return patches


def olmo3_rope(config: Config) -> Iterator[Any]:
    """One yarn rope for all layers, as transformers 5.12.1 has it, and its factor for mscale."""
    source = module("olmo3.olmo3")
    yarn, built = source.YarnRotaryEmbedding, []

    def keep(*args: Any, **kwargs: Any) -> Any:
        built.append(yarn(*args, **kwargs))
        return built[-1]

    yield mock.patch.object(source, "YarnRotaryEmbedding", keep)
    yield mock.patch.object(source, "RotaryEmbedding", lambda *args, **kwargs: built[-1])
    # mscale and mscale_all_dim are equal, which makes transformers' attention factor 1.
    yield mock.patch.object(yarn, "_yarn_get_mscale", lambda *args: 1.0)


def nothing(config: Config) -> Iterator[Any]:
    """MAX stays as it is; the cause's changes make transformers compute the same."""
    yield contextlib.nullcontext()


def nemotron_router(config: Config) -> Iterator[Any]:
    """Round the reference's router weights to bfloat16, as MAX's weight adapter does."""
    import torch

    from maxport.verify import reference

    original = reference.load_reference

    def rounded(*args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        with torch.no_grad():
            for key, value in loaded.model.named_parameters():
                if key.endswith(".gate.weight"):
                    value.copy_(value.to(torch.bfloat16))
        return loaded

    yield mock.patch.object(reference, "load_reference", rounded)


def deepseek_v4_rounding(config: Config) -> Iterator[Any]:
    """Keep latents, entries and the indexer's queries as they are computed."""
    from maxport.engine.evaluator.kernels import compressed

    same = lambda x, block_size=0: x  # noqa: E731
    for layer, name in (
        ("attention", "fp8_qat_quantize"),
        ("compressor", "fp8_qat_quantize"),
        ("compressor", "fp4_qat_quantize"),
        ("indexer", "fp4_qat_quantize"),
    ):
        yield mock.patch.object(module(f"deepseekV4.layers.{layer}"), name, same)
    for name in ("snap_to_fp8", "snap_to_fp4"):  # the compressor's kernel rounds by itself
        yield mock.patch.object(compressed, name, same)


CAUSES: dict[str, Cause] = {
    # Rows in the order of the table.
    "LlamaForCausalLM v2": Cause(
        "llama3/model_config.py builds the rope table without head_dim, so it is hidden_size / "
        "heads wide, and the kernel reads it in rows of head_dim",
        llama_rope,
    ),
    "MistralForCausalLM v2": Cause(
        "mistral/mistral.py attends without sliding_window", mistral_window
    ),
    "Qwen3ForCausalLM v2": Cause(
        "qwen3/qwen3.py leaves the head norms' epsilon at 1e-6, whatever rms_norm_eps says",
        qwen3_eps,
    ),
    "Qwen3MoeForCausalLM v2": Cause(
        "qwen3/layers/moe.py normalises the chosen experts' weights also where norm_topk_prob is "
        "false, and the head norms' epsilon is 1e-6",
        qwen3_moe,
    ),
    "Olmo2ForCausalLM v2": Cause(
        "olmo2.py leaves the q and k norms' epsilon at 1e-6, whatever rms_norm_eps says", olmo2_eps
    ),
    "MiniMaxM2ForCausalLM v2": Cause(
        "minimax_m2/layers/attention.py leaves the q and k norms' epsilon at 1e-6, whatever "
        "rms_norm_eps says (judged on two GPUs: on one it asks for expert parallelism)",
        minimax_m2_eps,
    ),
    "Gemma3ForCausalLM v2": Cause(
        "gemma3.py scales scores by head_dim, not by query_pre_attn_scalar, and the embedding's "
        "scale becomes a bfloat16 constant by truncation (ops.constant), not rounding",
        gemma3_scale(""),
    ),
    "Gemma3ForCausalLM v3": Cause(
        "gemma3_modulev3/gemma3.py scales scores by head_dim, not by query_pre_attn_scalar",
        gemma3_scale("_modulev3"),
    ),
    "GptOssForCausalLM v2": Cause(
        "yarn's range is always rounded (nn/rotary_embedding.py), also where truncate is false, "
        "and the activation's 1.702 becomes a bfloat16 constant by truncation (ops.constant)",
        gpt_oss_truncate("v2"),
    ),
    "GptOssForCausalLM v3": Cause(
        "yarn's range is always rounded (experimental/nn/common_layers/rotary_embedding.py), also "
        "where truncate is false",
        gpt_oss_truncate("v3"),
    ),
    "NemotronHForCausalLM v2": Cause(
        "transformers' own Mamba-2 depends on chunk_size once a prompt is longer than a chunk, and "
        "clamps the time step at time_step_min, MAX does neither; MAX rounds float32 router "
        "weights to bfloat16",
        nemotron_router,
        {"chunk_size": 256, "time_step_min": 1e-12},
    ),
    "NemotronHForCausalLM v3": Cause(
        "transformers' own Mamba-2 depends on chunk_size once a prompt is longer than a chunk, and "
        "clamps the time step at time_step_min, MAX does neither",
        nothing,
        {"chunk_size": 256, "time_step_min": 1e-12},
    ),
    "DeepseekV4ForCausalLM v2": Cause(
        "deepseekV4/layers round latents and compressed entries to float8 and the indexer's "
        "queries and keys to float4, transformers does not",
        deepseek_v4_rounding,
    ),
    "Olmo3ForCausalLM v2": Cause(
        "olmo3.py rotates sliding layers without yarn, transformers all layers with it, and "
        "MAX's yarn multiplies by 0.1 ln(factor) + 1 whatever mscale and mscale_all_dim say",
        olmo3_rope,
    ),
    "DeepseekV2ForCausalLM v2": Cause(
        "MAX multiplies the scores by yarn's mscale squared, transformers does not, and "
        "deepseekV2/layers/moe_gate.py leaves routed_scaling_factor out of greedy routing",
        deepseek_v2(""),
    ),
    "DeepseekV2ForCausalLM v3": Cause(
        "MAX multiplies the scores by yarn's mscale squared, transformers does not, and "
        "deepseekV2_modulev3/layers/moe_gate.py leaves routed_scaling_factor out of greedy routing",
        deepseek_v2("_modulev3"),
    ),
}


def confirm(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Judge the row again with its cause patched away.

    Args:
        name: `CLASS lane`.
        row: As native.json has it.

    Returns:
        Verdict, difference and tolerance under the patch.
    """
    from native_row import IMAGES, judge
    from native_twin import make_twin

    cls, lane = name.split()
    changes = {**row.get("changes", {}), **CAUSES[name].changes}
    with tempfile.TemporaryDirectory(prefix="maxport-native-") as temp:
        fields = {key: value for key, value in changes.items() if key != IMAGES}
        folder = make_twin(cls, row["encoding"], Path(temp), fields, images=IMAGES in changes)
        config = json.loads((folder / "config.json").read_text("utf-8"))
    # Architectures must be imported before they are patched.
    from maxport.engine.registry import native_architecture

    native_architecture(cls, lane)
    with contextlib.ExitStack() as stack:
        for patch in CAUSES[name].patches(config):
            stack.enter_context(patch)
        again = judge(cls, lane, row["device"], row["encoding"], changes)
    keys = ("verdict", "max_diff", "tolerance", "why")
    return {"why": CAUSES[name].why, "patched": {key: again.get(key) for key in keys}}


def main() -> None:
    """Confirm rows one process each, and write what was found into native.json and native.md."""
    from native import RESULTS, Store

    if sys.argv[1:2] == ["--one"]:
        row = json.loads(sys.argv[3])
        print("ROW" + json.dumps(confirm(sys.argv[2], row)))
        return
    store = Store(RESULTS)
    asked = {name.replace(":", " ") for name in sys.argv[1:]}
    for name in CAUSES:
        row = store.rows.get(name, {})
        if (asked and name not in asked) or row.get("verdict") != "differs":
            continue
        command = [sys.executable, __file__, "--one", name, json.dumps(row)]
        ended = subprocess.run(command, capture_output=True, text=True)
        found = [line for line in ended.stdout.splitlines() if line.startswith("ROW")]
        if not found:
            print(f"{name}: {ended.stderr.strip()[-800:]}", flush=True)
            continue
        row["confirmed"] = json.loads(found[0][3:])
        store.add(row)
        print(f"{name}: {row['confirmed']['patched']}", flush=True)


if __name__ == "__main__":
    main()
