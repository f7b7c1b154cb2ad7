"""Keys whose feature does not exist yet. Only the neutral value is accepted; delete a line when you add its feature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.errors import in_yaml
from grpo_mcore.recipe.schema.master import RecipeSections, value_at

# Key: (neutral value, missing feature).
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "policy.offload_optimizer_for_logprob": (False, "offloading the optimizer for the log-prob passes"),
    # Megatron-Core's distributed optimizer saves Adam's state only.
    "policy.megatron_cfg.optimizer.optimizer": ("adam", "SGD"),
    "policy.megatron_cfg.optimizer.use_distributed_optimizer": (True, "an optimizer that is not distributed"),
    "policy.generation.vllm_cfg.kv_cache_dtype": ("auto", "other number formats of the KV cache"),
}


def check_unsupported(config: RecipeSections) -> Iterator[Finding]:
    """No key may ask for a feature that does not exist."""
    for key, (neutral, feature) in UNSUPPORTED.items():
        value = value_at(config, key)
        if value != neutral:
            yield Finding(
                (key,), f"not supported yet ({feature}); got {in_yaml(value)}, leave it at {in_yaml(neutral)}"
            )
