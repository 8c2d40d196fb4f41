"""What gpu_kernels.py runs both ways: a kernel's graph, or a whole native model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxport.engine.build import ensure_gpus
from maxport.engine.evaluator import Program
from maxport.migrate.twins import YARN

#: Sizes that suit the GPU kernels, on top of the class's own defaults.
SIZES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": 512,
    },
    "Gemma3ForCausalLM": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "intermediate_size": 512,
        "vocab_size": 512,
        "sliding_window": 20,
    },
    "GptOssForCausalLM": {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": 512,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "DeepseekV3ForCausalLM": {
        "hidden_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "rope_parameters": YARN,
        "v_head_dim": 128,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 512,
    },
    "Qwen3MoeForCausalLM": {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 512,
    },
}
#: Sequences in a batch. All matrix products of a model then have 64 or 512 rows, those of logits of
#: last tokens included: MAX 26.7's bfloat16 products on sm_90 write past their last row otherwise.
SEQUENCES = 64
#: Tokens of the first step: one sequence past the window and past 128 keys, 512 in all.
LENGTHS = (155, *([5, 6, 6] * 21))
#: Further steps of one token per sequence.
DECODED = 2
#: Tokens that the caches hold: every sequence fills pages of its own.
CAPACITY = 2 * 128 * SEQUENCES


#: Rows in one batch: matrix products take other kernels for few and for many.
ROWS = (1, 2, 7, 9, 30, 37, 100, 128, 129, 150)


class KernelSubject:
    """A case of gpu_cases.py."""

    def __init__(self, name: str) -> None:
        ensure_gpus(1)
        from gpu_cases import CASES
        from gpu_kit import Kit
        from max.graph import DeviceRef

        dtype, make = CASES[name]
        self.dtype = str(dtype).removeprefix("torch.")
        self.case = make(Kit(DeviceRef.GPU(), dtype))
        self.model: Any = None

    def kernels(self) -> list[str]:
        """Custom kernels that the graph calls."""
        return sorted({node.symbol for node in Program(self.case.graph).nodes if node.symbol})

    def evaluated(self, *, widen: bool) -> list[torch.Tensor]:
        """Outputs of all steps and what the buffers hold in the end."""
        return self._evaluated(self.case.graph, widen)

    def evaluated_wrong(self) -> list[torch.Tensor] | None:
        """The same of the nearby wrong computation."""
        return self._evaluated(self.case.wrong, False) if self.case.wrong else None

    def _evaluated(self, graph: Any, widen: bool) -> list[torch.Tensor]:
        program = Program(graph, widen=widen)
        half = widen and self.dtype == "bfloat16"
        rounded = widen and self.case.tf32
        first = self.case.steps[0]
        pools = {i: first[i].float() if half else first[i].clone() for i in self.case.buffers}
        outputs: list[torch.Tensor] = []
        for step in self.case.steps:
            values = [
                pools.get(i, tf32(value) if rounded else value) for i, value in enumerate(step)
            ]
            outputs += self.case.canonical(program.run(values, {}))
        return [*outputs, *pools.values()]

    def by_rows(self) -> None:
        """Only models are compared for several batch sizes."""
        return None

    def compile(self) -> None:
        """Compile for the GPU."""
        from max.driver import Accelerator
        from max.engine import InferenceSession

        self.device = Accelerator()
        self.model = InferenceSession(devices=[self.device]).load(self.case.graph)

    def compiled(self) -> list[torch.Tensor]:
        """As `evaluated`, on the GPU."""
        kinds = [value.type for value in self.case.graph.inputs]
        first = self.case.steps[0]
        pools = {i: self._buffer(first[i].clone(), kinds[i]) for i in self.case.buffers}
        outputs: list[torch.Tensor] = []
        for step in self.case.steps:
            values = [
                pools[i] if i in pools else self._buffer(value, kinds[i])
                for i, value in enumerate(step)
            ]
            outputs += self.case.canonical([on_host(v) for v in self.model.execute(*values)])
        return [*outputs, *map(on_host, pools.values())]

    def _buffer(self, value: torch.Tensor, kind: Any) -> Any:
        from max.driver import Buffer

        plain = value.dtype in (torch.uint32, torch.bool, torch.int32, torch.int64)
        host = Buffer.from_numpy(value.numpy()) if plain else Buffer.from_dlpack(value)
        return host if kind.device.is_cpu() else host.to(self.device)


class ModelSubject:
    """A whole model on a random checkpoint: MAX's own architecture, or the port that maxport emits.

    Args:
        name: Class of transformers.
        lane: `v2` or `v3` for MAX's own, `port` for maxport's.
        dtype: Of weights and computation.
    """

    def __init__(self, name: str, lane: str, dtype: str) -> None:
        from native_twin import make_twin

        ensure_gpus(1)
        self.dtype = dtype
        self._temp = tempfile.TemporaryDirectory(prefix="maxport-gpu-model-")
        folder = make_twin(name, dtype, Path(self._temp.name), SIZES[name])
        self.built = self._build(name, folder, lane)
        draw = np.random.default_rng(0)
        self.tokens = [draw.integers(5, 500, length + DECODED) for length in LENGTHS]
        self.runner: Any = None

    def _build(self, name: str, folder: Path, lane: str) -> Any:
        from maxport.engine.build import build_native, build_port

        options: dict[str, Any] = {"device": "gpu", "encoding": self.dtype, "max_length": 256}
        if lane != "port":
            return build_native(name, folder, lane=lane, **options)
        return build_port(emitted(folder), folder, **options)

    def kernels(self) -> list[str]:
        """Custom kernels that the graph calls."""
        return sorted({node.symbol for node in Program(self.built.graph).nodes if node.symbol})

    def evaluated(self, *, widen: bool) -> list[torch.Tensor]:
        """Logits of all steps."""
        runner = self._evaluator()
        if widen and self.dtype == "float32":
            runner.weights = {name: tf32(value) for name, value in runner.weights.items()}
        elif widen:
            runner.program = Program(self.built.graph, widen=True)
            for index, pool in runner.cache._pools.items():
                if pool.dtype == torch.bfloat16:
                    runner.cache._pools[index] = pool.float()
        return self._run(runner)

    def _evaluator(self) -> Any:
        from maxport.engine.runner import EvaluatedRunner

        runner = EvaluatedRunner(self.built, capacity=CAPACITY)
        runner.weights = {name: value.cpu() for name, value in runner.weights.items()}
        return runner

    def by_rows(self) -> dict[str, float]:
        """Largest difference of a first step's logits, by how many tokens it has."""
        evaluator, found = self._evaluator(), {}
        for rows in ROWS:
            evaluator.reset()
            self.runner.reset()
            batch = {0: self.tokens[0][:rows]}
            a, b = (_logits(runner, batch) for runner in (evaluator, self.runner))
            found[str(rows)] = float((a - b).abs().max())
        return found

    def evaluated_wrong(self) -> None:
        """No nearby wrong model; bench/mutants.py has those."""
        return None

    def compile(self) -> None:
        """Compile for the GPU."""
        from maxport.engine.compile import compile_graphs

        (self.runner,) = compile_graphs([self.built], capacity=CAPACITY)

    def compiled(self) -> list[torch.Tensor]:
        """As `evaluated`, on the GPU."""
        return self._run(self.runner)

    def _run(self, runner: Any) -> list[torch.Tensor]:
        batch = {key: self.tokens[key][:length] for key, length in enumerate(LENGTHS)}
        outputs = [_logits(runner, batch)]
        for step in range(DECODED):
            batch = {
                key: self.tokens[key][n + step : n + step + 1] for key, n in enumerate(LENGTHS)
            }
            outputs.append(_logits(runner, batch))
        return outputs


def emitted(checkpoint: Path) -> Path:
    """The port that `maxport port` writes for a checkpoint, beside it."""
    import transformers

    from maxport.emit.write import write_port
    from maxport.trace.port import make_port

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    port = make_port(config, slug="emitted")
    return write_port(checkpoint.parent, "emitted", port.files)


def _logits(runner: Any, batch: dict[int, Any]) -> torch.Tensor:
    """All rows where the graph gives them, else each sequence's last."""
    named = runner.outputs(batch).named
    rows = named.get("logits", named["next_token_logits"])
    return torch.from_numpy(np.array(rows, np.float32))


def tf32(value: torch.Tensor) -> torch.Tensor:
    """float32 values rounded to TF32's ten bits of mantissa."""
    if value.dtype != torch.float32:
        return value
    return ((value.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def on_host(buffer: Any) -> torch.Tensor:
    """A driver buffer as a torch tensor of its own."""
    from max.driver import CPU

    host = buffer.to(CPU())
    if host.dtype.name == "bfloat16":
        return torch.from_dlpack(host).clone()
    return torch.from_numpy(np.array(host.to_numpy()))
