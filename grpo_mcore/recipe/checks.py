"""What must hold between keys. Each check yields findings; the first key of a finding that a file or the
command line sets gives it its place."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_mcore.recipe import batch_sizes, layout_checks, not_yet
from grpo_mcore.recipe.data import FILE_DATASETS
from grpo_mcore.recipe.errors import Finding, in_yaml, nearest
from grpo_mcore.recipe.master import MasterConfig


def findings(config: MasterConfig) -> list[Finding]:
    """All that is wrong with a configuration whose keys and types are right."""
    checks = (
        not_yet.find,
        check_layout,
        layout_checks.check_stages,
        layout_checks.check_experts,
        check_batches,
        check_lengths,
        check_loss,
        check_grpo,
        check_optimizer,
        check_data,
    )
    return [finding for check in checks for finding in check(config)]


def runs_grpo(config: MasterConfig) -> bool:
    """Does the recipe describe a GRPO run: not when it has a section `sft` and none `grpo`."""
    return "grpo" in config.model_fields_set or "sft" not in config.model_fields_set


def check_layout(config: MasterConfig) -> Iterator[Finding]:
    """Ranks, stages and the cluster."""
    megatron, cluster = config.policy.megatron_cfg, config.cluster
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    at = "policy.megatron_cfg."
    world, needed = batch_sizes.world_size(config), batch_sizes.model_parallel_size(config)
    layout = f"TP {tp} x PP {pp} x CP {megatron.context_parallel_size} = {needed} ranks"
    offer = f"num_nodes {cluster.num_nodes} x gpus_per_node {cluster.gpus_per_node} = {world}"
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
    product = (
        f"{grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} generations = {samples}"
    )
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
    prompts = _multiples_around(
        grpo.num_prompts_per_step, unit // math.gcd(unit, grpo.num_generations_per_prompt)
    )
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


def check_loss(config: MasterConfig) -> Iterator[Finding]:
    """Terms of the loss that exclude or need each other."""
    loss, at = config.loss_fn, "loss_fn."
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        yield Finding(
            (at + "sequence_level_importance_ratios", at + "token_level_loss"),
            "needs token_level_loss: false, because one ratio a sequence goes with a mean over sequences",
        )
    for name, clashes in (
        ("disable_ppo_ratio", loss.disable_ppo_ratio),
        ("force_on_policy_ratio", loss.force_on_policy_ratio),
        ("sequence_level_importance_ratios", loss.sequence_level_importance_ratios),
        ("ratio_clip_c", loss.ratio_clip_c is not None),
        ("token_level_loss", not loss.token_level_loss),
    ):
        if loss.use_cispo and clashes:
            yield Finding((at + "use_cispo", at + name), f"does not go with {name}: {in_yaml(loss[name])}")
    kind, kind_key = loss.truncated_importance_sampling_type, at + "truncated_importance_sampling_type"
    high, low = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    if kind is not None:
        if not loss.use_importance_sampling_correction:
            yield Finding(
                (kind_key, at + "use_importance_sampling_correction"),
                f"{kind} needs use_importance_sampling_correction: true",
            )
        if high is None:
            yield Finding((kind_key,), f"{kind} needs an upper bound: truncated_importance_sampling_ratio")
        if low is None and kind != "tis":
            yield Finding((kind_key,), f"{kind} needs a lower bound: truncated_importance_sampling_ratio_min")
        if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
            yield Finding(
                (kind_key, at + "sequence_level_importance_ratios"),
                "seq-mask-tis does not go with sequence_level_importance_ratios",
            )
    elif high is not None or low is not None:
        name = "truncated_importance_sampling_ratio" + ("_min" if high is None else "")
        yield Finding(
            (at + name, kind_key), "has no effect without truncated_importance_sampling_type (such as tis)"
        )
    if high is not None and low is not None and low > high:
        yield Finding(
            (at + "truncated_importance_sampling_ratio_min", at + "truncated_importance_sampling_ratio"),
            f"the lower bound {low:g} is above the upper bound {high:g}",
        )


def check_grpo(config: MasterConfig) -> Iterator[Finding]:
    """The RL loop's keys among each other."""
    grpo = config.grpo
    if runs_grpo(config) and grpo.num_generations_per_prompt == 1:
        yield Finding(
            ("grpo.num_generations_per_prompt",),
            "a group of 1 has nothing to be compared with: every advantage would be 0; take 2 or more",
        )
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield Finding(
            ("grpo.advantage_clip_low", "grpo.advantage_clip_high"),
            f"the lower bound {low:g} is above the upper bound {high:g}",
        )
    scaling = grpo.reward_scaling
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield Finding(
            ("grpo.reward_scaling.source_min", "grpo.reward_scaling.source_max"),
            f"the source interval [{scaling.source_min:g}, {scaling.source_max:g}] is empty",
        )
    if grpo.skip_reference_policy_logprobs_calculation and config.loss_fn.reference_policy_kl_penalty > 0:
        yield Finding(
            ("grpo.skip_reference_policy_logprobs_calculation", "loss_fn.reference_policy_kl_penalty"),
            "the KL penalty needs reference log-probs: set loss_fn.reference_policy_kl_penalty to 0",
        )


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


def check_data(config: MasterConfig) -> Iterator[Finding]:
    """Datasets have what they need, and their environments exist."""
    if not config.data.train:
        yield Finding(
            ("data.train",),
            "no training dataset; give data.train, or data.dataset_name and data.train_data_path",
        )
    for part, entries in (("train", config.data.train), ("validation", config.data.validation)):
        for position, entry in enumerate(entries):
            at = f"data.{part}.{position}."
            if entry.dataset_name in FILE_DATASETS and not entry.data_path:
                yield Finding(
                    (at + "data_path", at + "dataset_name"), f"{entry.dataset_name} needs a data_path"
                )
            if entry.env_name is None and runs_grpo(config) and len(config.env) > 1:
                yield Finding(
                    (at + "env_name", f"data.{part}"), f"which of env scores it: {', '.join(config.env)}?"
                )
            if entry.env_name is not None and entry.env_name not in config.env:
                near = nearest(entry.env_name, config.env)
                hint = f"; nearest: {near}" if near else ""
                known = ", ".join(config.env) or "nothing"
                yield Finding(
                    (at + "env_name",), f"{in_yaml(entry.env_name)} is not in env, which has {known}{hint}"
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
