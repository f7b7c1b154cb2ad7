"""What the driver makes of the answers of the policy's ranks."""

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.algorithms.grpo import train_on_groups
from grpo_mcore.cluster import LocalCluster
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.parallel.policy import TrainReport
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.step.step_batch import TrainTargets
from tests.unit.step.step_cases import config, group


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


class Trained:
    """Notes when it trains."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def train(self, loss: Any, targets: TrainTargets) -> list[TrainReport]:
        self.happened.append("train")
        return [TrainReport({}, grad_norm=2.0, learning_rate=0.1)]


def test_the_driver_has_something_to_do_while_the_ranks_train() -> None:
    """It begins once all ranks have been asked, and before any answer is waited for."""
    happened: list[str] = []

    class Late(LocalCluster):
        def ready(self, *args: Any, **settings: Any) -> Any:
            happened.append("wait")
            return super().ready(*args, **settings)

    nothing: Any = None
    ranks = [LocalWorker(f"policy-{i}", Trained(happened)) for i in range(2)]
    policy = PolicyGroup(Late(), ranks, PolicyLayout(1, 1, 1), nothing, "", "float32", nothing)
    targets = TrainTargets(torch.ones(1), valid_seqs=(1,), valid_toks=(1,))
    metrics = policy.train(nothing, targets, meanwhile=lambda: happened.append("meanwhile"))
    assert happened[:4] == ["train", "train", "meanwhile", "wait"]
    assert (metrics["grad_norm"], policy.updates) == (2.0, 1)


class Recorder:
    """A policy that notes what it is called for."""

    ready_for = PolicyGroup.ready_for

    def __init__(self, *, offloads_for_logprobs: bool) -> None:
        self.offloads_for_logprobs = offloads_for_logprobs
        self.layout, self.shares_prefixes, self.teachers, self.updates = PolicyLayout(1, 1, 1), False, None, 0
        self.calls: list[str] = []

    def infer_logprobs(self, count: int, **asked: Any) -> dict[str, torch.Tensor]:
        self.calls.append("log-probs")
        return {"valid_toks": torch.arange(6, 6 + count // 2).repeat(2)}

    def train(self, *_: Any) -> dict[str, float]:
        self.calls.append("train")
        return {}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def train(policy: Any, recipe: MasterConfig, samples: Any = None) -> None:
    engines: Any = SimpleNamespace(release=lambda **_: None, pauses=False)
    clock: Any = SimpleNamespace(phase=lambda _: nullcontext())
    nothing: Any = None
    groups = [group("a", [1, 0, 0, 1]), group("b", [0, 1, 1, 0])]
    train_on_groups(policy, engines, groups, nothing, recipe, clock, samples)


@pytest.mark.parametrize(("critic", "updates", "trains"), [(True, 1, False), (True, 2, True), (False, 1, True)])
def test_steps_of_the_critic_alone_are_recorded_and_need_a_critic(critic: bool, updates: int, trains: bool) -> None:
    policy: Any = Recorder(offloads_for_logprobs=False)
    policy.updates, ones = updates, torch.ones(8, dtype=torch.float64)
    policy.infer_values = lambda *_: {"gae_sum": ones, "gae_square": ones, "tokens": ones}
    policy.train_critic, policy.token_logprobs = (lambda *_: {}), lambda: ["log-probs"]
    recorded: list[Any] = []
    samples = SimpleNamespace(wants_logprobs=True, trained=lambda *given: recorded.append(given[-1]))
    ppo = {"enabled": critic, "policy_training_start_step": 2}
    train(policy, MasterConfig.model_validate(config().model_dump() | {"ppo": ppo}), samples)
    assert policy.calls[-1] == ("train" if trains else "skip")
    assert recorded == [["log-probs"] if trains else []]


def test_rewards_are_shaped_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_shaping.py").write_text(
        "CALLS = []\ndef shape(samples):\n    CALLS.append(1)\n    return samples.rewards\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy: Any = Recorder(offloads_for_logprobs=False)
    ones = torch.ones(8, dtype=torch.float64)
    policy.infer_values = lambda *_: {"gae_sum": ones, "gae_square": ones, "tokens": ones}
    policy.train_critic = lambda *_: {}
    shaping = {"enabled": True, "path": "own_shaping:shape"}
    recipe = config(reward_shaping=shaping).model_dump() | {"ppo": {"enabled": True}}
    train(policy, MasterConfig.model_validate(recipe))
    assert import_module("own_shaping").CALLS == [1]


@pytest.mark.parametrize("offloads", [False, True])
def test_the_optimizer_may_stay_away_until_the_update(offloads: bool) -> None:
    policy: Any = Recorder(offloads_for_logprobs=offloads)
    train(policy, config())
    before = "offload" if offloads else "onload"
    assert policy.calls == [before, "receive", "log-probs", "onload", "train"]
