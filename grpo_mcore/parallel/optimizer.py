"""Megatron-Core's optimizer and learning-rate schedule, from the recipe's values."""

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.nn import Module

from grpo_mcore.parallel.mesh import on_leave
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.recipe import MegatronConfig, PolicyConfig


def ddp_config(settings: MegatronConfig, platform: Platform) -> DistributedDataParallelConfig:
    """Return Megatron-Core's settings for the gradient reduction over data-parallel ranks."""
    ddp = settings.distributed_data_parallel_config
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce and platform.on_gpu,
        overlap_param_gather=ddp.overlap_param_gather,
        use_distributed_optimizer=True,
        average_in_collective=False,  # the loss is already normalised by global counts
        check_for_nan_in_grad=False,  # train_step checks the gradients itself and names the samples
    )


def wrap_model(model: Module, settings: MegatronConfig, platform: Platform) -> DistributedDataParallel:
    """Give the model contiguous gradient buffers that are reduced over data-parallel ranks."""
    wrapped = DistributedDataParallel(model.config, ddp_config(settings, platform), model)
    if wrapped.use_forward_hook:
        _wait_by_layer(wrapped)
    # Its gradient hooks keep it alive through C++, which Python's garbage collector cannot follow. Without this, the
    # process groups that it refers to would stay alive, each with its polling threads.
    on_leave(vars(wrapped).clear)
    return wrapped


def _wait_by_layer(wrapped: DistributedDataParallel) -> None:
    """Let each layer wait for the gathering of all its weights before it runs, and the rest of the network before it
    starts.

    In Megatron-Core each module waits for its own weights. But some weights are read without their module being called,
    as the output layer's by the log-probs, and an expert without tokens may not be called: the ranks that gather
    together must do so in the same order.
    """
    wrapped.disable_forward_pre_hook(param_sync=False)
    network = wrapped.module
    weights = {layer: set(layer.parameters()) for layer in network.decoder.layers}
    if network.post_process:
        head = (network.decoder.final_layernorm, network.output_layer)
        weights[head[0]] = {weight for module in head for weight in module.parameters()}
    weights[network] = set(network.parameters()).difference(*weights.values())
    buckets = (*reversed(wrapped.bucket_groups), *reversed(wrapped.expert_parallel_bucket_groups))
    for module, needed in weights.items():
        module.register_forward_pre_hook(
            partial(_finish_gathering, [bucket for bucket in buckets if not bucket.params.isdisjoint(needed)])
        )


def _finish_gathering(buckets: Sequence[Any], *_: Any) -> None:
    for bucket in buckets:
        bucket.finish_param_sync()


def optimizer_config(policy: PolicyConfig, platform: Platform) -> OptimizerConfig:
    """Return Megatron-Core's settings for the optimizer."""
    config, bf16 = policy.megatron_cfg.optimizer, policy.precision == "bfloat16"
    in_fp32 = policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32
    # Megatron-Core takes weights on the host for a case of this: neither makes float32 copies on the device.
    precision_aware = config.use_precision_aware_optimizer or config.optimizer_cpu_offload
    return OptimizerConfig(
        optimizer=config.optimizer,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        clip_grad=0.0 if policy.deterministic else policy.max_grad_norm or 0.0,  # then sample_gradients.py clips
        use_precision_aware_optimizer=precision_aware,
        main_grads_dtype=torch.float32 if in_fp32 or not precision_aware else torch.bfloat16,
        # Megatron-Core cannot load them from whole parameters (dist_ckpt_optim_fully_reshardable).
        store_param_remainders=False,
        optimizer_cpu_offload=config.optimizer_cpu_offload,
        optimizer_offload_fraction=config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0,
        overlap_cpu_optimizer_d2h_h2d=config.optimizer_cpu_offload and config.overlap_cpu_optimizer_d2h_h2d,
        pin_cpu_grads=platform.pins_memory,
    )


def build_optimizer(
    chunks: list[DistributedDataParallel], policy: PolicyConfig, platform: Platform
) -> MegatronOptimizer:
    """Build the distributed optimizer over the model chunks.

    Weights that a bfloat16 policy holds in float32 have groups of their own: Megatron-Core 0.16 puts those of a group
    first, but looks up their state by their former places, and would save and load that of other weights.
    """
    config = optimizer_config(policy, platform)
    in_float32 = ParamPredicate("float32", lambda weight: weight.dtype is torch.float32)
    groups = get_standard_config_overrides(config)
    if config.bf16:
        groups[ParamKey(predicate=in_float32)] = {"number_format": "float32"}
    optimizer = get_megatron_optimizer(config, chunks, config_overrides=groups, use_gloo_process_groups=False)
    if policy.megatron_cfg.optimizer.optimizer_cpu_offload:
        gc.collect()  # a first one over whole weights, in place of this rank's share, is a cycle with copies of them
    return optimizer


def build_scheduler(optimizer: MegatronOptimizer, settings: MegatronConfig) -> OptimizerParamScheduler:
    """Build the schedule of learning rate and weight decay, counted in steps of the RL loop (or of SFT)."""
    config, scheduler = settings.optimizer, settings.scheduler
    weight_decay = config.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=scheduler.lr_warmup_iters,
        lr_decay_steps=max(scheduler.lr_decay_iters, scheduler.lr_warmup_iters + 1),
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=weight_decay if scheduler.start_weight_decay is None else scheduler.start_weight_decay,
        end_wd=weight_decay if scheduler.end_weight_decay is None else scheduler.end_weight_decay,
        wd_incr_steps=scheduler.lr_decay_iters,
        wd_incr_style=scheduler.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
