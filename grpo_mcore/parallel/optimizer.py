"""Megatron-Core's optimizer and learning-rate schedule, from the recipe's values."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
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
        overlap_param_gather=False,  # refit and export read the weights right after the step
        use_distributed_optimizer=True,
        average_in_collective=False,  # the loss is already normalised by global counts
        check_for_nan_in_grad=False,  # train_step checks the gradients itself and names the samples
    )


def wrap_model(model: Module, settings: MegatronConfig, platform: Platform) -> DistributedDataParallel:
    """Give the model contiguous gradient buffers that are reduced over data-parallel ranks."""
    wrapped = DistributedDataParallel(model.config, ddp_config(settings, platform), model)
    # Its gradient hooks keep it alive through C++, which Python's garbage collector cannot follow. Without this, the
    # process groups that it refers to would stay alive, each with its polling threads.
    on_leave(vars(wrapped).clear)
    return wrapped


def optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """Return Megatron-Core's settings for the optimizer."""
    config, bf16 = policy.megatron_cfg.optimizer, policy.precision == "bfloat16"
    return OptimizerConfig(
        optimizer=config.optimizer,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        sgd_momentum=config.sgd_momentum,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        clip_grad=policy.max_grad_norm or 0.0,
    )


def build_optimizer(chunks: list[DistributedDataParallel], policy: PolicyConfig) -> MegatronOptimizer:
    """Build the distributed optimizer over the model chunks."""
    return get_megatron_optimizer(optimizer_config(policy), chunks, use_gloo_process_groups=False)


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
