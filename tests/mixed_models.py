"""Models whose file holds most tensors in bfloat16 and some in float32, as published hybrid models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from grpo_mcore.tools.demo.tiny_models import make_tiny_model

WIDE = (
    "A_log",
    ".D",
    "dt_bias",
    ".gate.weight",
    "e_score_correction_bias",
    "mixer.norm.weight",
    "linear_attn.norm.weight",
)
"""Ends of the names of the tensors that are in float32."""
KEPT = {
    "qwen3_next": ("A_log",),
    "qwen3_5_moe_text": ("A_log",),
    "nemotron_h_moe": ("A_log", "e_score_correction_bias"),
    "glm4_moe": (".gate.weight", "e_score_correction_bias"),
    "minimax_m2": (".gate.weight", "e_score_correction_bias"),
    "deepseek_v3": ("e_score_correction_bias",),
}
"""By family, those that vLLM 0.32 keeps in float32 when it runs the model in bfloat16 on every device."""


def make_mixed_model(family: str, folder: Path, **overrides: Any) -> Path:
    """Make a tiny model of bfloat16 tensors, but for those of WIDE, whose values need float32."""
    make_tiny_model(family, folder, **overrides)
    generator = torch.Generator().manual_seed(5)

    def as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
        factors = 1 + 0.01 * torch.rand(tensor.shape, generator=generator)
        return tensor.float() * factors if name.endswith(WIDE) else tensor.bfloat16()

    for path in folder.glob("*.safetensors"):
        tensors = {name: as_stored(name, tensor) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder
