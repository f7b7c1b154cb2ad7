"""Published Hugging Face configs of well-known models, for planning without the model on disk."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _config(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type} | dict(zip(_SIZES, sizes, strict=True)) | more


def _qwen2(*sizes: int, tied: bool = False) -> dict[str, Any]:
    return _config("qwen2", *sizes, tie_word_embeddings=tied, rope_theta=1e6)


def _qwen3(*sizes: int, tied: bool = False) -> dict[str, Any]:
    return _config("qwen3", *sizes, 151936, head_dim=128, tie_word_embeddings=tied, rope_theta=1e6)


def _llama(*sizes: int, factor: float | None = 8.0, tied: bool = False) -> dict[str, Any]:
    scaling = _LLAMA3_ROPE | {"factor": factor} if factor else None
    return _config("llama", *sizes, 128256, tie_word_embeddings=tied, rope_theta=5e5, rope_scaling=scaling)


# layers, hidden, feed-forward, heads, key-value heads (, vocabulary)
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _qwen2(24, 896, 4864, 14, 2, 151936, tied=True),
    "Qwen2.5-1.5B": _qwen2(28, 1536, 8960, 12, 2, 151936, tied=True),
    "Qwen2.5-3B": _qwen2(36, 2048, 11008, 16, 2, 151936, tied=True),
    "Qwen2.5-7B": _qwen2(28, 3584, 18944, 28, 4, 152064),
    "Qwen2.5-14B": _qwen2(48, 5120, 13824, 40, 8, 152064),
    "Qwen2.5-32B": _qwen2(64, 5120, 27648, 40, 8, 152064),
    "Qwen2.5-72B": _qwen2(80, 8192, 29568, 64, 8, 152064),
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, 8, tied=True),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, 8, tied=True),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, 8, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32, 8),
    "Qwen3-14B": _qwen3(40, 5120, 17408, 40, 8),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64, 8),
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32, 8, factor=32.0, tied=True) | {"head_dim": 64},
    "Llama-3.2-3B": _llama(28, 3072, 8192, 24, 8, factor=32.0, tied=True) | {"head_dim": 128},
    "Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8),
    "Llama-3.1-70B": _llama(80, 8192, 28672, 64, 8),
    "Llama-3.3-70B": _llama(80, 8192, 28672, 64, 8),
    "Meta-Llama-3-8B": _llama(32, 4096, 14336, 32, 8, factor=None),
}

CONFIGS |= {
    "Qwen3-30B-A3B": _qwen3(48, 2048, 6144, 32, 4)
    | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Mixtral-8x7B-v0.1": _config("mixtral", 32, 4096, 14336, 32, 8, 32000, rope_theta=1e6)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "DeepSeek-V3": _config("deepseek_v3", 61, 7168, 18432, 128, 128, 129280, rope_theta=1e4)
    | {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _config("nemotron_h", 52, 2688, 1856, 32, 2, 131072, head_dim=128)
    | {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "max_position_embeddings": 262144,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
}

# Models that `grpo-mcore demo` (data/arithmetic.py) and examples/sliding_puzzle/make_model.py create.
_DEMO = _config("qwen3", 4, 128, 576, 4, 2, 30, head_dim=32, tie_word_embeddings=True)
_PUZZLE = _config("qwen3", 3, 64, 256, 2, 2, 64, head_dim=32, tie_word_embeddings=True)
FOLDERS = {
    "results/demo/base/hf": _DEMO,
    "results/demo/untrained": _DEMO,
    "results/puzzle/base/hf": _PUZZLE,
    "results/puzzle/untrained": _PUZZLE,
}

_VARIANTS = ("-Instruct", "-Base", "-Math", "-Coder", "-Chat", "-2507", "-0324-BF16")


def known_config(name: str) -> dict[str, Any] | None:
    """Return the config of a hub name such as "Qwen/Qwen2.5-1.5B-Instruct", or None. Suffixes of variants of the same
    shape (-Instruct, -Base) are ignored."""
    if name in FOLDERS:
        return FOLDERS[name]
    base = PurePosixPath(name).name
    for variant in _VARIANTS:
        base = base.replace(variant, "")
    if base.startswith("Meta-Llama-3.1"):
        base = base.removeprefix("Meta-")
    return CONFIGS.get(base)
