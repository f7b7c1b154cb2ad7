"""The functions that test_optimizer.py runs on the ranks."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import MegatronConfig
from grpo_mcore.tools.parity.rank import LayoutCase, compared_loss
from tests.distributed.policy_cases import COUNTS, few_rows
from tests.distributed.policy_state_cases import adam_config

BUCKET = 4000
"""Elements of a bucket, so that a tiny model has several. Megatron-Core's are 40 million."""


def train_gathering(
    address: Address, model: str, case: LayoutCase, overlap: bool, lora: bool
) -> tuple[list[tuple[float, Tensor]], int]:
    """Train three optimizer steps of one RL step, with the gathering of weights overlapped or not: for each the
    gradient norm, and this rank's weights as they lie in memory right after it; and the number of buckets."""
    from grpo_mcore.parallel import optimizer

    original = optimizer.ddp_config

    def in_buckets(settings: MegatronConfig, platform: Platform) -> Any:
        return replace(original(settings, platform), overlap_grad_reduce=True, bucket_size=BUCKET)

    config = adam_config(model, case)
    megatron = config.megatron_cfg
    megatron.distributed_data_parallel_config.overlap_param_gather = overlap
    if lora:
        megatron.peft = megatron.peft.model_copy(update={"enabled": True, "dim": 4})
    with patch.object(optimizer, "ddp_config", in_buckets):
        policy = Policy(config, address, seed=1, timeout_s=60, reference=False)
    steps = []
    for number in range(3):
        report = policy.train_step(few_rows(policy), compared_loss(), **COUNTS, last=number == 2)
        weights = [weight.detach().flatten() for chunk in policy.chunks for weight in chunk.parameters()]
        steps.append((report.grad_norm, torch.cat(weights).clone()))
    buckets = [chunk.bucket_groups + chunk.expert_parallel_bucket_groups for chunk in policy.chunks]
    return steps, sum(map(len, buckets))
