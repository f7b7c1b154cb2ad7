"""Tiny random models of every family, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 131,  # odd: padded under tensor parallelism
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a model of `family` (qwen2, qwen3, llama) whose weights are far from their usual small start."""
    import transformers

    sizes = SIZES | ({"head_dim": 32} if family == "qwen3" else {}) | overrides
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    return folder
