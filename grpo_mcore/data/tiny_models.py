"""Tiny random models of every family, as Hugging Face folders, for tests and `grpo-mcore parity tiny:FAMILY`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

EOS = 1
SIZES: dict[str, Any] = {
    "vocab_size": 131,  # odd: padded under tensor parallelism
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


CLASSES = {
    "qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral",
    "deepseek_v3": "DeepseekV3",
    "nemotron_h": "NemotronH",
    "nemotron_h_moe": "NemotronH",
}  # fmt: skip
NEMOTRON = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    },
    "nemotron_h": NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    "nemotron_h_moe": NEMOTRON
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


ROUTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""DeepSeek-V3's routing as in published configs. vLLM reads it, transformers assumes it."""

ENGINE_SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {"hidden_size": 128},
    "llama": {"hidden_size": 128},
    "mixtral": {"hidden_size": 128},
    "deepseek_v3": ROUTED | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "nemotron_h": {"head_dim": 32},
}
"""Sizes that vLLM's CPU kernels support: heads of 32, 64 or 128, and one size of latents."""


class UnknownFamily(ValueError):
    """There is no tiny model of the family."""


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, words: bool = False, **overrides: Any) -> Path:
    """Write a model of `family` (one of CLASSES) with weights far from the usual small initial ones. With `words`, also
    write a tokenizer, in which token 1 ends a sequence and every other token is a word. Raises UnknownFamily."""
    import transformers

    if family not in CLASSES:
        raise UnknownFamily(f"no tiny model of {family!r}; there are {', '.join(CLASSES)}")
    if words:
        overrides = {"eos_token_id": EOS, "bos_token_id": None} | overrides
        _write_words(folder, (SIZES | overrides)["vocab_size"])
    config = getattr(transformers, f"{CLASSES[family]}Config")(**SIZES | FAMILY_SIZES.get(family, {}) | overrides)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("gate.weight"):
                parameter.normal_(0, 0.5)  # so that the router's choice is clear
            elif "conv1d" in name:
                parameter.normal_(0, 0.4)
            else:
                parameter.normal_(0, 0.08)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def _write_words(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose token n is the word "wn"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": EOS} | {f"w{number}": number for number in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
