"""Batch sizes must divide into optimizer steps, ranks and micro-batches."""

import math
from collections.abc import Iterator

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import (
    data_parallel_size,
    has_greedy_baseline,
    model_parallel_size,
    samples_per_step,
    token_budget,
    world_size,
)
from grpo_mcore.recipe.schema.master import RecipeSections, runs_grpo


def check_batches(config: RecipeSections) -> Iterator[Finding]:
    """Samples must divide into optimizer steps, data-parallel ranks and micro-batches."""
    policy, grpo = config.policy, config.grpo
    gbs_key, cluster_keys = "policy.train_global_batch_size", ("cluster.gpus_per_node", "cluster.num_nodes")
    gbs, dp = policy.train_global_batch_size, max(data_parallel_size(config), 1)
    samples = samples_per_step(config) if runs_grpo(config) else gbs
    trained = samples - grpo.num_prompts_per_step  # with remax
    product = f"{grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} generations = {samples}"
    if samples % gbs:
        yield Finding(
            (gbs_key, "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"),
            f"{product} samples do not divide into optimizer steps of {gbs} samples; {_advice(config, dp)}",
        )
    elif gbs % dp:
        equation = f"{product} samples = {samples // gbs} x {gbs}" if runs_grpo(config) else f"{gbs} samples"
        ranks = f"{world_size(config)} ranks / {model_parallel_size(config)} per copy"
        yield Finding(
            (gbs_key, *cluster_keys), f"{equation} do not divide over DP {dp} = {ranks}; {_advice(config, dp)}"
        )
    elif runs_grpo(config) and has_greedy_baseline(config) and trained < samples // gbs * dp:
        yield Finding(
            ("grpo.adv_estimator.name", "grpo.num_generations_per_prompt", gbs_key, *cluster_keys),
            f"{product} samples, of which remax trains on {trained}: fewer than {samples // gbs} optimizer steps x "
            f"DP {dp}",
        )
    elif not token_budget(policy) and (gbs // dp) % policy.train_micro_batch_size:
        sizes = _around(policy.train_micro_batch_size, _divisors(gbs // dp))
        yield Finding(
            ("policy.train_micro_batch_size", gbs_key),
            f"the {gbs // dp} samples of a data-parallel rank do not divide into micro-batches of "
            f"{policy.train_micro_batch_size}; nearest size that does: {_either(sizes)}",
        )
    if config.loss_fn.force_on_policy_ratio and samples != gbs:
        yield Finding(
            ("loss_fn.force_on_policy_ratio", gbs_key),
            f"requires exactly one optimizer step per RL step: train_global_batch_size {samples}, got {gbs}",
        )


def _advice(config: RecipeSections, dp: int) -> str:
    """Return the nearest batch sizes that divide."""
    gbs, grpo = config.policy.train_global_batch_size, config.grpo
    if not runs_grpo(config):
        return f"nearest train_global_batch_size that does: {_either(_multiples_around(gbs, dp))}"
    sizes = [size for size in _divisors(samples_per_step(config)) if size % dp == 0]
    unit = gbs if gbs % dp == 0 else dp
    prompts = _multiples_around(grpo.num_prompts_per_step, unit // math.gcd(unit, grpo.num_generations_per_prompt))
    parts = [f"nearest train_global_batch_size that does: {_either(_around(gbs, sizes))}"] if sizes else []
    if unit == gbs or not sizes:
        parts.append(f"nearest num_prompts_per_step: {_either(prompts)}")
    return "; ".join(parts)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _around(number: int, sizes: list[int]) -> list[int]:
    """Return the nearest of the sorted sizes below and above a number."""
    return [*[size for size in sizes if size < number][-1:], *[size for size in sizes if size > number][:1]]


def _multiples_around(number: int, unit: int) -> list[int]:
    below = number // unit * unit
    return [size for size in (below, below + unit) if size]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
