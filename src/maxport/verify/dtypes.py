"""The dtypes a checkpoint's weights are stored in, and a copy of it in another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def stored_dtypes(folder: Path) -> set[str]:
    """Dtypes of the floating weights in a checkpoint folder, from the safetensors headers."""
    found = set()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        codes = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
        found |= {_NAMES.get(code, code) for code in codes if not code.startswith(("I", "U", "B"))}
        found |= {"bfloat16"} if "BF16" in codes else set()
    return found


def converted(folder: Path, target: Path, dtype: str) -> Path:
    """Copy a checkpoint folder to `target` with its floating weights cast to `dtype`.

    Returns:
        `target`.
    """
    import torch
    from safetensors.torch import load_file, save_file

    wanted = getattr(torch, dtype)
    target.mkdir(parents=True)
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".safetensors":
            tensors = {
                name: tensor.to(wanted) if tensor.is_floating_point() else tensor
                for name, tensor in load_file(path).items()
            }
            save_file(tensors, target / path.name, metadata={"format": "pt"})
        elif path.is_file():
            shutil.copy(path, target / path.name)
    config = json.loads((target / "config.json").read_text("utf-8"))
    for key in {"dtype", "torch_dtype"} & config.keys():
        config[key] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    return target
