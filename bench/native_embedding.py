"""Judge MAX's embedding architectures: build the encoder, evaluate, compare the pooled rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from maxport.errors import MaxportError

#: Two texts of unequal length; the shorter one is padded where the graph takes a rectangle.
LENGTHS = (12, 7)


@dataclass
class Encoder:
    """A built encoder graph with its weights."""

    graph: Any
    weights: dict[str, Any]


class Recorded(BaseException):
    """Carries the recorded graphs out of the build, before it looks for a decoder's inputs."""

    def __init__(self, staged: list[Any]) -> None:
        super().__init__()
        self.staged = staged


def build_embedding(name: str, folder: Path, lane: str, device: str, encoding: str) -> Encoder:
    """Build the encoder as serving does.

    `build_native` does everything but the last step, which is about decoders: an encoder has no
    cache, and its inputs are a padded rectangle or a ragged batch.

    Raises:
        MaxportError: MAX refuses the checkpoint.
    """
    from maxport.engine import build

    def stop(recorded: list[Any], *rest: Any) -> None:
        raise Recorded(recorded)

    try:
        with mock.patch.object(build, "_decoder", stop):
            build.build_native(
                name, folder, lane=lane, device=device, encoding=encoding, max_length=64
            )
    except Recorded as found:
        if found.staged:
            return Encoder(found.staged[-1].graph, dict(found.staged[-1].weights))
    raise MaxportError("the graph does not build: nothing was compiled")


def embedding_model(built: Encoder, folder: Path) -> tuple[float, float, int, str]:
    """Largest difference, tolerance, rows, and the pooling that the graph agrees with best."""
    import torch
    import transformers

    from maxport.engine.evaluator import Program
    from maxport.engine.runner import torch_weights

    program = Program(built.graph, widen=True)
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, 60, size=length) for length in LENGTHS]
    outputs = program.run(_inputs(program, texts), torch_weights(built.weights))
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        states = [model(torch.tensor(text)[None]).last_hidden_state[0] for text in texts]
    got = outputs[0].float()
    best = (float("inf"), "", 1.0)
    for pooling, want in _poolings(states).items():
        if want.shape == got.shape:
            best = min(best, (float((got - want).abs().max()), pooling, float(want.abs().max())))
    if not best[1]:
        want = {pooling: list(value.shape) for pooling, value in _poolings(states).items()}
        raise MaxportError(
            f"the graph gives {list(got.shape)}, no pooling of the reference: {want}"
        )
    return best[0], 2e-5 * max(best[2], 1.0), len(texts), f"{best[1]} embeddings"


def _inputs(program: Any, texts: list[np.ndarray]) -> list[np.ndarray]:
    """Token ids and mask as a padded rectangle, or tokens and offsets of a ragged batch."""
    longest = max(map(len, texts))
    values: list[np.ndarray] = []
    for name, spec in program.inputs:
        kind = spec.dtype.name
        if len(spec.dims) == 2 and kind == "int64":
            values.append(np.stack([np.pad(text, (0, longest - len(text))) for text in texts]))
        elif len(spec.dims) == 2:
            mask = [np.arange(longest) < len(text) for text in texts]
            values.append(np.stack(mask).astype(kind if kind != "bfloat16" else "float32"))
        elif kind == "int64" and "offset" not in str(spec):
            values.append(np.concatenate(texts))
        elif kind == "uint32":
            values.append(np.cumsum([0, *map(len, texts)]).astype(np.uint32))
        else:
            raise MaxportError(f"the encoder input {name} ({spec}) has no known meaning")
    return values


def _poolings(states: list[Any]) -> dict[str, Any]:
    """What an embedding may be of a text's last hidden states, [texts, width] each."""
    import torch

    plain = {
        "mean": torch.stack([state.mean(0) for state in states]),
        "first-token": torch.stack([state[0] for state in states]),
        "last-token": torch.stack([state[-1] for state in states]),
        "summed": torch.stack([state.sum(0) for state in states]),
    }
    unit = {
        f"normalised {name}": value / value.norm(dim=-1, keepdim=True)
        for name, value in plain.items()
    }
    return {**plain, **unit}
