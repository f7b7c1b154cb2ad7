"""A model's folder that is awkward on purpose."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make_awkward(folder: Path) -> None:
    """Put a model's weights into two shards of different types, with a stale shard beside their index, and other forms
    of weights that are not the model's."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where: dict[str, str] = {}
    for number, dtype in enumerate((torch.bfloat16, torch.float32)):
        names, file = sorted(tensors)[number::2], f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name].to(dtype) for name in names}, folder / file)
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    stale = {name: torch.full_like(tensor, 0.3) for name, tensor in tensors.items()}
    (folder / "original").mkdir()
    for name in ("model-00003-of-00003", "consolidated", "original/model"):
        save_file(stale, folder / f"{name}.safetensors")
