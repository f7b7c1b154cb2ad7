"""What must hold between keys. Each check yields findings; the first key of a finding that a file or the
command line sets gives it its place."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_mcore.recipe import batch_sizes, data_checks, gym_keys, layout_checks, not_yet, objective_checks
from grpo_mcore.recipe.errors import Finding, in_yaml, nearest
from grpo_mcore.recipe.master import MasterConfig, runs_grpo
from grpo_mcore.recipe.pools import check_pools, policy_pool


def findings(config: MasterConfig) -> list[Finding]:
    """All that is wrong with a configuration whose keys and types are right."""
    checks = (
        not_yet.find,
        check_pools,
        check_layout,
        layout_checks.check_stages,
        layout_checks.check_experts,
        layout_checks.check_engine_experts,
        layout_checks.check_router_replay,
        check_batches,
        check_lengths,
        objective_checks.check_loss,
        objective_checks.check_weights,
        objective_checks.check_kl,
        objective_checks.check_rewards,
        objective_checks.check_shaping_acts,
        objective_checks.check_advantages,
        check_dynamic_sampling,
        check_ages,
        check_early_stop,
        check_restarts,
        check_optimizer,
        data_checks.check_data,
        data_checks.check_loaders,
        gym_keys.check_endpoint,
    )
    return [finding for check in checks for finding in check(config)]


def check_restarts(config: MasterConfig) -> Iterator[Finding]:
    """A run that goes on by itself needs something to go on from."""
    if config.cluster.max_restarts and not config.checkpointing.enabled:
        yield Finding(
            ("cluster.max_restarts", "checkpointing.enabled"),
            "a run goes on from its newest checkpoint: set checkpointing.enabled, or max_restarts to 0",
        )


def check_layout(config: MasterConfig) -> Iterator[Finding]:
    """Ranks, stages and the cluster."""
    megatron, cluster = config.policy.megatron_cfg, config.cluster
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    at = "policy.megatron_cfg."
    pool, needed = policy_pool(config), batch_sizes.model_parallel_size(config)
    world = pool.ranks
    layout = f"TP {tp} x PP {pp} x CP {megatron.context_parallel_size} = {needed} ranks"
    offer = f"num_nodes {pool.nodes} x gpus_per_node {pool.per_node} = {world}"
    if not config.policy.generation.colocated.enabled:
        if not world:
            return  # check_pools says why
        offer += " (without the engines' own)"
    layout_keys = (
        at + "tensor_model_parallel_size",
        at + "pipeline_model_parallel_size",
        at + "context_parallel_size",
        "cluster.gpus_per_node",
        "cluster.num_nodes",
    )
    if needed > world:
        yield Finding(layout_keys, f"one copy of the policy takes {layout}, but the cluster has {offer}")
    elif world % needed:
        yield Finding(layout_keys, f"the cluster has {offer} ranks, which is not a multiple of {layout}")
    if megatron.sequence_parallel and tp == 1:
        yield Finding(
            (at + "sequence_parallel", at + "tensor_model_parallel_size"),
            "sequence parallelism needs tensor_model_parallel_size above 1",
        )
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if megatron[name] is not None and pp == 1:
            yield Finding(
                (at + name, at + "pipeline_model_parallel_size"),
                "an uneven split needs pipeline_model_parallel_size above 1",
            )
    if cluster.backend == "local" and world > 1:
        yield Finding(
            ("cluster.backend", "cluster.gpus_per_node", "cluster.num_nodes"),
            f"the local backend runs one rank in this process, but the cluster has {offer}",
        )


def check_batches(config: MasterConfig) -> Iterator[Finding]:
    """Samples over optimizer steps, data-parallel ranks and micro-batches."""
    policy, grpo = config.policy, config.grpo
    gbs_key, cluster_keys = "policy.train_global_batch_size", ("cluster.gpus_per_node", "cluster.num_nodes")
    gbs, dp = policy.train_global_batch_size, max(batch_sizes.data_parallel_size(config), 1)
    samples = batch_sizes.samples_per_step(config) if runs_grpo(config) else gbs
    product = f"{grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} generations = {samples}"
    if samples % gbs:
        yield Finding(
            (gbs_key, "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"),
            f"{product} samples do not divide into optimizer steps of {gbs} samples; {_advice(config, dp)}",
        )
    elif gbs % dp:
        equation = f"{product} samples = {samples // gbs} x {gbs}" if runs_grpo(config) else f"{gbs} samples"
        ranks = f"{batch_sizes.world_size(config)} ranks / {batch_sizes.model_parallel_size(config)} a copy"
        yield Finding(
            (gbs_key, *cluster_keys),
            f"{equation} do not divide over DP {dp} = {ranks}; {_advice(config, dp)}",
        )
    elif not policy.sequence_packing.enabled and (gbs // dp) % policy.train_micro_batch_size:
        sizes = _around(policy.train_micro_batch_size, _divisors(gbs // dp))
        yield Finding(
            ("policy.train_micro_batch_size", gbs_key),
            f"the {gbs // dp} samples of a data-parallel rank do not divide into micro-batches of "
            f"{policy.train_micro_batch_size}; nearest that does: {_either(sizes)}",
        )
    if config.loss_fn.force_on_policy_ratio and samples != gbs:
        yield Finding(
            ("loss_fn.force_on_policy_ratio", gbs_key),
            f"needs one optimizer step a step: train_global_batch_size {samples}, got {gbs}",
        )


def _advice(config: MasterConfig, dp: int) -> str:
    """The nearest batch sizes that divide."""
    gbs, grpo = config.policy.train_global_batch_size, config.grpo
    if not runs_grpo(config):
        return f"nearest train_global_batch_size that does: {_either(_multiples_around(gbs, dp))}"
    sizes = [size for size in _divisors(batch_sizes.samples_per_step(config)) if size % dp == 0]
    unit = gbs if gbs % dp == 0 else dp
    prompts = _multiples_around(grpo.num_prompts_per_step, unit // math.gcd(unit, grpo.num_generations_per_prompt))
    parts = [f"nearest train_global_batch_size that does: {_either(_around(gbs, sizes))}"] if sizes else []
    if unit == gbs or not sizes:
        parts.append(f"nearest num_prompts_per_step: {_either(prompts)}")
    return "; ".join(parts)


def check_lengths(config: MasterConfig) -> Iterator[Finding]:
    """Limits on tokens must admit the longest sequence, and no longer one."""
    policy, longest = config.policy, config.policy.max_total_sequence_length
    limit_key = "policy.max_total_sequence_length"
    for key, value in (
        ("policy.generation.max_new_tokens", policy.generation.max_new_tokens),
        ("policy.generation.vllm_cfg.max_model_len", policy.generation.vllm_cfg.max_model_len),
        ("data.max_input_seq_length", config.data.max_input_seq_length),
    ):
        if value is not None and value > longest:
            yield Finding((key, limit_key), f"{value} tokens are more than {limit_key} = {longest}")
    packing = policy.sequence_packing
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        if packing.enabled and packing[name] is not None and packing[name] < longest:
            yield Finding(
                (f"policy.sequence_packing.{name}", limit_key),
                f"a bin of {packing[name]} tokens cannot hold a sequence of {limit_key} = {longest}",
            )


def check_dynamic_sampling(config: MasterConfig) -> Iterator[Finding]:
    """It compares the rewards of a group, and only it generates more than is trained on."""
    grpo, use_key = config.grpo, "grpo.use_dynamic_sampling"
    if grpo.use_dynamic_sampling and grpo.num_generations_per_prompt == 1:
        yield Finding((use_key, "grpo.num_generations_per_prompt"), "the rewards of a group of 1 never differ")
    if grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling:
        yield Finding(("grpo.batch_multiplier", use_key), "has no effect without use_dynamic_sampling: true")


def check_ages(config: MasterConfig) -> Iterator[Finding]:
    """Generation ahead of training: what older trajectories need."""
    ahead, prompts = config.grpo.async_grpo, config.grpo.num_prompts_per_step
    at, enabled, age_key = "grpo.async_grpo.", "grpo.async_grpo.enabled", "grpo.async_grpo.max_trajectory_age_steps"
    if not ahead.max_age:
        return
    if not config.loss_fn.use_importance_sampling_correction:
        yield Finding(
            (enabled, age_key, "loss_fn.use_importance_sampling_correction"),
            f"trains on trajectories of age {ahead.max_age} (in weight versions), which needs "
            "loss_fn.use_importance_sampling_correction: true",
        )
    if ahead.max_groups_in_flight is not None and ahead.max_groups_in_flight < prompts:
        yield Finding(
            (at + "max_groups_in_flight", "grpo.num_prompts_per_step"),
            f"{ahead.max_groups_in_flight} groups are less than the {prompts} of a step",
        )
    if ahead.recompute_kv_cache_after_weight_updates and not ahead.in_flight_weight_updates:
        yield Finding(
            (at + "recompute_kv_cache_after_weight_updates", at + "in_flight_weight_updates"),
            "has no effect without in_flight_weight_updates: true: nothing is under way at a refit",
        )
    if ahead.min_samples_per_group is not None:
        samples = config.grpo.num_generations_per_prompt
        if ahead.min_samples_per_group > samples:
            yield Finding(
                (at + "min_samples_per_group", "grpo.num_generations_per_prompt"),
                f"{ahead.min_samples_per_group} samples are more than the {samples} of a group",
            )
        if config.grpo.max_rollout_turns > 1:
            yield Finding(
                (at + "min_samples_per_group", "grpo.max_rollout_turns"),
                "goes with samples of one turn only: set grpo.max_rollout_turns to 1",
            )
    if ahead.partial_rollouts and not ahead.in_flight_weight_updates:
        yield Finding(
            (at + "partial_rollouts", at + "in_flight_weight_updates"),
            "needs in_flight_weight_updates: true: without it a refit waits for every sample under way",
        )
    if ahead.partial_rollouts and not config.policy.generation.colocated.enabled:
        yield Finding(
            (at + "partial_rollouts", "policy.generation.colocated.enabled"),
            "engines with devices of their own need not stand still while the policy trains; switch it off",
        )


VALIDATION_METRICS = ("accuracy", "reward", "num_samples", "num_failed_samples", "generated_length", "truncation_rate")
"""What every validation reports, over all its data and by task (`TASK/accuracy`); and pass@k with several samples."""


def check_early_stop(config: MasterConfig) -> Iterator[Finding]:
    """A metric, its threshold, and validations to look at."""
    grpo, metric_key = config.grpo, "grpo.stop_at_validation_metric"
    threshold_key = "grpo.stop_at_validation_threshold"
    if grpo.stop_at_validation_metric is None:
        if grpo.stop_at_validation_threshold is not None:
            yield Finding((threshold_key, metric_key), "needs stop_at_validation_metric (such as accuracy)")
        return
    name = grpo.stop_at_validation_metric.removeprefix("val:").rpartition("/")[2]
    several = grpo.val_num_generations_per_prompt > 1
    if name not in VALIDATION_METRICS and not (several and name.startswith("pass@")):
        near = nearest(name, VALIDATION_METRICS)
        known = ", ".join((*VALIDATION_METRICS, *(["pass@k"] if several else [])))
        hint = f"; nearest: {near}" if near else ""
        yield Finding((metric_key,), f"{in_yaml(name)} is no validation metric; known: {known}{hint}")
    if grpo.stop_at_validation_threshold is None:
        yield Finding((metric_key, threshold_key), "needs stop_at_validation_threshold (such as 0.9)")
    if not grpo.val_period and not grpo.val_at_start:
        yield Finding((metric_key, "grpo.val_period"), "there is no validation before the end: set val_period above 0")
    if not config.data.validation and not any(entry.split_validation_size for entry in config.data.train):
        yield Finding((metric_key, "data.validation"), "there is nothing to validate on: set data.validation")


def check_optimizer(config: MasterConfig) -> Iterator[Finding]:
    """Optimizer and learning rate, as Megatron-Core demands them."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    optimizer, scheduler = megatron.optimizer, megatron.scheduler
    at = "policy.megatron_cfg.optimizer."
    schedule = "policy.megatron_cfg.scheduler."
    if optimizer.min_lr > optimizer.lr:
        yield Finding((at + "min_lr", at + "lr"), f"{optimizer.min_lr:g} is above lr = {optimizer.lr:g}")
    if scheduler.lr_warmup_init > optimizer.lr:
        yield Finding(
            (schedule + "lr_warmup_init", at + "lr"),
            f"{scheduler.lr_warmup_init:g} is above {at}lr = {optimizer.lr:g}",
        )
    if scheduler.lr_warmup_iters >= scheduler.lr_decay_iters:
        yield Finding(
            (schedule + "lr_warmup_iters", schedule + "lr_decay_iters"),
            f"{scheduler.lr_warmup_iters} steps of warm-up must be fewer than "
            f"lr_decay_iters = {scheduler.lr_decay_iters}",
        )
    if (optimizer.clip_grad or 0) != (policy.max_grad_norm or 0):
        yield Finding(
            (at + "clip_grad", "policy.max_grad_norm"),
            f"{optimizer.clip_grad} contradicts policy.max_grad_norm = {policy.max_grad_norm}; set only that",
        )
    if optimizer.bf16 != (policy.precision == "bfloat16"):
        yield Finding(
            (at + "bf16", "policy.precision"),
            f"{in_yaml(optimizer.bf16)} contradicts policy.precision = {policy.precision}; set only that",
        )
    if megatron.pipeline_dtype != policy.precision:
        yield Finding(
            ("policy.megatron_cfg.pipeline_dtype", "policy.precision"),
            f"{megatron.pipeline_dtype} contradicts policy.precision = {policy.precision}; set only that",
        )


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _around(number: int, sizes: list[int]) -> list[int]:
    """The nearest of the sorted sizes below and above a number."""
    return [*[size for size in sizes if size < number][-1:], *[size for size in sizes if size > number][:1]]


def _multiples_around(number: int, unit: int) -> list[int]:
    below = number // unit * unit
    return [size for size in (below, below + unit) if size]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
