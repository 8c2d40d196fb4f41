"""A port through MAX's own pipeline, without a server: next-token logits after given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxport.engine import registry
from maxport.errors import MaxportError


class PipelineRun:
    """A compiled pipeline of a port; compiling happens on construction.

    Args:
        port_dir: The port directory.
        model_dir: Folder with config, tokenizer and weights.
        encoding: MAX's name of the working precision.
        max_length: Longest sequence; the model's own limit if None.

    Raises:
        MaxportError: MAX cannot load the port, or its own architecture answers instead.
    """

    def __init__(
        self,
        port_dir: Path,
        model_dir: Path,
        *,
        encoding: str = "float32",
        max_length: int | None = None,
    ) -> None:
        registry.check_max_version()
        from max.driver import DeviceSpec
        from max.pipelines import PIPELINE_REGISTRY
        from max.pipelines.lib import PipelineArgs, PipelineConfig
        from max.pipelines.modeling.types import PipelineTask

        arguments: dict[str, Any] = {"max_length": max_length} if max_length else {}
        try:
            config = PipelineConfig.from_args(
                PipelineArgs(
                    model_path=str(model_dir),
                    quantization_encoding=encoding,
                    device_specs=[DeviceSpec.cpu()],
                    runtime={
                        "custom_architectures": [str(port_dir.resolve())],
                        "prefer_module_v3": _is_suffixed(port_dir),
                        "max_batch_size": 1,
                        "device_graph_capture": False,
                    },
                    **arguments,
                )
            )
            _tokenizer, self.pipeline = PIPELINE_REGISTRY.retrieve(
                config, task=PipelineTask.TEXT_GENERATION
            )
        except MaxportError:
            raise
        except Exception as error:
            raise MaxportError(
                f"MAX's pipeline does not load the port: {type(error).__name__}: {error}",
                where=str(port_dir),
                fix="run `maxport gates` on the port directory",
                code=1,
            ) from error

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of the token after `ids`, float32 (1, vocab)."""
        from max.pipelines.lib.generate import generate

        result = generate(
            self.pipeline,
            [list(ids)],
            max_new_tokens=1,
            temperature=0,
            ignore_eos=True,
            output_logits=True,
        )
        assert result.logits is not None
        return np.asarray(result.logits[0], np.float32).reshape(1, -1)


def _is_suffixed(port_dir: Path) -> bool:
    with registry.loaded_port(port_dir) as architectures:
        return any(str(a.name).endswith(registry.V3_SUFFIX) for a in architectures)
