"""How the samples of a step are cut up: over optimizer steps, data-parallel ranks and micro-batches."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

from grpo_mcore.recipe.master import MasterConfig
from grpo_mcore.recipe.pools import policy_pool


def world_size(config: MasterConfig) -> int:
    """Ranks of the policy."""
    return policy_pool(config).ranks


def model_parallel_size(config: MasterConfig) -> int:
    """Ranks that hold one copy of the policy: TP x PP x CP."""
    megatron = config.policy.megatron_cfg
    return megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size


def data_parallel_size(config: MasterConfig) -> int:
    """Copies of the policy (DP)."""
    return world_size(config) // model_parallel_size(config)


def samples_per_step(config: MasterConfig) -> int:
    """Samples of one step."""
    return config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt


def prompts_per_generation_batch(config: MasterConfig) -> int:
    """Prompts that dynamic sampling generates at a time: num_prompts_per_step x batch_multiplier, rounded up."""
    multiplier = Fraction(str(config.grpo.batch_multiplier))  # as it is written: 10 x 1.1 is 11, not a little more
    return math.ceil(config.grpo.num_prompts_per_step * multiplier)


def batch_equation(config: MasterConfig, algorithm: Literal["grpo", "sft"] = "grpo") -> str:
    """One line, such as "32 prompts x 16 generations = 512 samples = 2 optimizer steps x 256 = 2 x DP 4 x 64
    samples, packed into bins of at most 2,048 tokens"."""
    policy, dp = config.policy, data_parallel_size(config)
    per_rank = policy.train_global_batch_size // dp
    if algorithm == "sft":
        head, factor = f"{policy.train_global_batch_size} samples", ""
    else:
        samples = samples_per_step(config)
        steps = samples // policy.train_global_batch_size
        head = (
            f"{_count(config.grpo.num_prompts_per_step, 'prompt')} x "
            f"{_count(config.grpo.num_generations_per_prompt, 'generation')} = {_count(samples, 'sample')} = "
            f"{_count(steps, 'optimizer step')} x {policy.train_global_batch_size}"
        )
        factor = f"{steps} x " if steps > 1 else ""
    equation = f"{head} = {factor}DP {dp} x "
    if policy.sequence_packing.enabled:
        capacity = policy.sequence_packing.train_mb_tokens
        return f"{equation}{_count(per_rank, 'sample')}, packed into bins of at most {capacity:,} tokens"
    micro = policy.train_micro_batch_size
    return f"{equation}{_count(per_rank // micro, 'micro-batch', 'es')} x {_count(micro, 'sample')}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
