"""What the driver makes of the answers of the policy's ranks."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mcore.algorithms.training_step.policy_group import PolicyGroup
from grpo_mcore.cluster import LocalCluster
from grpo_mcore.cluster.local_cluster import LocalWorker


class Rank:
    """Answers whether the checkpoint that it loads holds the optimizer."""

    def __init__(self, optimizer: bool) -> None:
        self.optimizer = optimizer

    def load(self, folder: str) -> bool:
        return self.optimizer


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_without_the_optimizer_is_told(caplog: pytest.LogCaptureFixture, optimizer: bool) -> None:
    nothing: Any = None
    ranks = [LocalWorker(f"policy-{i}", Rank(optimizer)) for i in range(2)]
    group = PolicyGroup(LocalCluster(), ranks, nothing, nothing, "", "float32", nothing)
    with caplog.at_level("INFO", "grpo_mcore"):
        group.load("step_2/policy")
    told = "step_2/policy holds no optimizer (checkpointing.save_optimizer): its moments start at 0"
    assert caplog.messages == ([] if optimizer else [told])
