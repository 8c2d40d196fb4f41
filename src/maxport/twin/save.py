"""Write a twin as a checkpoint folder that transformers and MAX load."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from maxport.errors import MaxportError
from maxport.quiet import quiet
from maxport.twin.model import own_config, twin_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def save_twin(
    config: PreTrainedConfig,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    force: bool = False,
) -> Path:
    """Write `config`'s random model as config.json, model.safetensors, generation_config.json.

    Args:
        config: A small config (`twin_config`).
        folder: The folder to make; must not exist or be empty unless `force`.
        seed: Random seed of the weights.
        dtype: Dtype of the weights; float32 if None.
        force: Replace a folder that is not empty.

    Returns:
        `folder`, after reading it back and finding every weight bit-equal.

    Raises:
        MaxportError: If the folder is taken, or the model does not survive the round trip.
    """
    import torch

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not force:
        raise MaxportError(
            "the twin's folder is not empty", where=str(folder), fix="choose another folder"
        )
    model = twin_model(config, seed=seed, dtype=dtype or torch.float32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet():
            model.save_pretrained(temp)
            _published(model, config).save_pretrained(temp)
            _copy_code(config, temp)
            _check(model, temp)
        if folder.exists():
            shutil.rmtree(folder)
        temp.chmod(0o755)
        temp.replace(folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder


def _published(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedConfig:
    """What config.json of such a checkpoint says: not what the model wrote into it when built."""
    own = copy.deepcopy(own_config(type(model), config))
    own.architectures = own.architectures or [type(model).__name__]
    own.dtype = model.dtype
    return own


def _copy_code(config: PreTrainedConfig, folder: Path) -> None:
    """Remote code travels with the twin: transformers finds it in the checkpoint's folder."""
    source = Path(getattr(config, "_name_or_path", "") or "/nonexistent")
    if getattr(config, "auto_map", None) and source.is_dir():
        for file in source.glob("*.py"):
            shutil.copy(file, folder / file.name)


def _check(model: PreTrainedModel, folder: Path) -> None:
    import torch

    loaded, info = type(model).from_pretrained(
        folder, dtype=model.dtype, attn_implementation="eager", output_loading_info=True
    )
    bad = {k: sorted(map(str, v))[:3] for k, v in info.items() if v and k.endswith("_keys")}
    if bad:
        raise MaxportError("the twin does not load back", where=str(bad))
    own, other = dict(model.named_parameters()), dict(loaded.named_parameters())
    for name, parameter in own.items():
        if name not in other or not torch.equal(parameter, other[name]):
            raise MaxportError("the twin's weights changed when read back", where=name)
