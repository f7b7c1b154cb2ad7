"""How the policy's weights reach the engines: the recipe's settings of a refit."""

from dataclasses import dataclass

from grpo_mcore.families import AdapterShape, adapter_shape
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.refit.plan.proof import Verify

PARITY_LIMITS = {"bfloat16": 1.05, "float32": 1.001}
"""Limit of `refit verify` by the policy's precision, if the recipe sets none."""


@dataclass(frozen=True)
class ParityCheck:
    """How policy and engines are compared after a refit. `limit`: the largest allowed mean of exp|engine's log-prob -
    policy's|. `temperature`, `top_p`, `top_k`: those of the policy's log-probs. `max_length`: tokens of prompt and
    answer."""

    limit: float
    temperature: float
    max_length: int
    top_p: float = 1.0
    top_k: int | None = None


@dataclass(frozen=True)
class RefitSettings:
    """`buffer_gb`: size of the refit buffer in GiB. `parity`: compare log-probs after each refit, end the run at a
    difference. `adapters`: the adapters, if a refit sends nothing else; None: it sends the weights, merged with any
    adapters."""

    buffer_gb: float
    verify: Verify = "sample"
    parity: ParityCheck | None = None
    adapters: AdapterShape | None = None


def refit_settings(config: MasterConfig) -> RefitSettings:
    """Return the recipe's settings."""
    policy, peft = config.policy, config.policy.megatron_cfg.peft
    return RefitSettings(
        policy.refit_buffer_size_gb,
        policy.refit_verify,
        None if policy.refit_parity in ("sample", None) else parity_check(config),
        adapter_shape(peft) if peft.refit == "adapters" else None,
    )


def parity_check(config: MasterConfig) -> ParityCheck:
    """Return how policy and engines are compared after a refit: within policy.refit_parity, or within the limit of the
    policy's precision."""
    policy, generation = config.policy, config.policy.generation
    limit = policy.refit_parity
    if limit is None or limit == "sample":
        limit = PARITY_LIMITS[policy.precision]
    length = min(policy.max_total_sequence_length, generation.vllm_cfg.max_model_len)
    return ParityCheck(limit, generation.temperature, length, generation.top_p, generation.top_k)
