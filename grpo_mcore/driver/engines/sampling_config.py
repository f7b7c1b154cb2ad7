"""The recipe's sampling parameters and length limits."""

from typing import Any

from grpo_mcore.recipe import GenerationConfig, MasterConfig
from grpo_mcore.rollout.life import TurnLimits
from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.rollout.turn_end import turn_ends


def turn_limits(config: MasterConfig) -> TurnLimits:
    """Return the limits of a sample's turns."""
    together = (config.grpo.turns or ("together" if config.cluster.backend == "local" else "free")) == "together"
    return TurnLimits(config.grpo.max_rollout_turns, config.policy.generation.vllm_cfg.max_model_len, together)


def sampling_of(generation: GenerationConfig, tokenizer: Any, *, validation: bool = False) -> Sampling:
    """Return the sampling parameters of policy.generation, for training or for validation. An answer ends with the
    tokens of policy.generation.stop_token_ids, or else those that end one in the chat template, and end of sequence."""
    stop_ids = generation.stop_token_ids
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.val_temperature if validation else generation.temperature,
        top_p=generation.val_top_p if validation else generation.top_p,
        top_k=generation.val_top_k if validation else generation.top_k,
        stop_token_ids=turn_ends(tokenizer).stop_ids if stop_ids is None else tuple(stop_ids),
        stop_strings=tuple(generation.stop_strings or ()),
    )
