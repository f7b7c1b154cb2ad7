"""Objectives of a user's own: the examples against formulas, and what is refused before a run starts."""

from __future__ import annotations

import math
import pickle
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.custom_objective import objective as example
from grpo_mcore.objective import (
    AdvantageEstimate,
    ClippedPGLossFn,
    CustomLoss,
    CustomPart,
    StepSamples,
    build_loss,
    check_custom_objective,
    combine_metrics,
    custom_advantages,
    custom_shaping,
    estimate_advantages,
    step_metrics,
)
from grpo_mcore.objective.custom import LOSS_INPUTS, CustomCodeError
from grpo_mcore.objective.kl import kl_estimate
from grpo_mcore.recipe import ClippedPGLossConfig, CustomCode

EXAMPLE = "examples.custom_objective.objective:"
HERE = f"{__name__}:"


def samples(rewards: list[float], groups: list[int], lengths: list[int] | None = None) -> StepSamples:
    values = torch.tensor(rewards, dtype=torch.float64)
    lengths = lengths or [4] * len(rewards)
    return StepSamples(
        rewards=values,
        group_ids=torch.tensor(groups),
        valid=~values.isnan(),
        rewards_by_name={},
        prompt_lengths=torch.ones(len(rewards), dtype=torch.int64),
        generated_lengths=torch.tensor(lengths),
        truncated=torch.zeros(len(rewards), dtype=torch.bool),
        turns=torch.ones(len(rewards), dtype=torch.int64),
        trained=~values.isnan(),
    )


def test_ranks_by_hand() -> None:
    step = samples([0.1, 5.0, 0.2, math.nan, 1.0, 1.0], [0, 0, 0, 0, 1, 1])
    found = custom_advantages(EXAMPLE + "rank_advantages", step, {"scale": 2.0})
    assert found.advantages.tolist() == [-2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert found.groups.size.tolist() == [3, 2]


def test_brevity_by_hand() -> None:
    step = samples([1.0, 1.0, 0.0, math.nan], [0, 0, 0, 0], [5, 9, 2, 1])
    found = custom_shaping(EXAMPLE + "brevity", step, {"penalty": 0.1})
    assert found[:3].tolist() == pytest.approx([1.0, 0.6, 0.0]) and found[3].isnan()


def test_hellinger_is_the_distance_in_expectation() -> None:
    p, q = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    found = (p * kl_estimate(p.log(), q.log(), CustomCode(path=EXAMPLE + "hellinger"))).sum()
    assert float(found) == pytest.approx(2 * float((p.sqrt() - q.sqrt()).square().sum()), rel=1e-12)


def batch(**more: Any) -> tuple[Tensor, dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    curr = torch.randn(2, 5, generator=draw, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], dtype=torch.float64)
    advantages = torch.tensor([[0.7], [-1.3]], dtype=torch.float64).expand(2, 5)
    return curr, {"token_mask": mask, "sample_mask": torch.ones(2), "advantages": advantages} | more


def test_the_class_of_the_example_against_its_formula() -> None:
    curr, inputs = batch()
    inputs["prev_logprobs"] = curr.detach() + 0.3
    cfg = ClippedPGLossConfig(
        path=EXAMPLE + "SoftGateLoss", options={"up": 2.0, "down": 3.0}, reference_policy_kl_penalty=0.0
    )
    loss, metrics = build_loss(cfg)(curr, inputs, 2, 6)
    ratio = math.exp(-0.3)
    terms = [-advantage * 4 / t / (1 + math.exp(-t * (ratio - 1))) * 3 for advantage, t in ((0.7, 2.0), (-1.3, 3.0))]
    assert loss.item() == pytest.approx(sum(terms) / 6, rel=1e-12)
    assert {"probs_ratio", "policy_loss"} <= set(metrics)


def test_a_function_gets_all_it_needs_and_its_metrics_a_prefix() -> None:
    """Also without prev_logprobs, which a step with one optimizer step does not compute."""
    curr, inputs = batch()
    cfg = ClippedPGLossConfig(path=EXAMPLE + "reinforce", options={"weight": 2.0})
    own = pickle.loads(pickle.dumps(build_loss(cfg, prev_equals_curr=True, max_age=0)))
    assert isinstance(own, CustomLoss) and not own.needs_entropy
    loss, metrics = own(curr, inputs, 2, 6)
    loss.backward()  # type: ignore[no-untyped-call]
    plain = ClippedPGLossFn({"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0}, prev_equals_curr=True)
    other, by_class = batch()
    expected, _ = plain(other, by_class, 2, 6)
    (2 * expected).backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(2 * expected.item(), rel=1e-12)
    assert curr.grad is not None and other.grad is not None and torch.allclose(curr.grad, other.grad)
    assert set(metrics) == {"loss", "custom/nll"}
    step = step_metrics([combine_metrics([metrics, metrics])])
    assert step["custom/nll"] == pytest.approx(2 * float(metrics["custom/nll"]))


def needs_prev(curr_logprobs: Tensor, batch: dict[str, Any], global_valid_seqs: int, global_valid_toks: int) -> Any:
    return (batch["prev_logprobs"] - curr_logprobs).sum(), {"max_gap": torch.tensor(3.0)}


def too_many(samples: StepSamples, rewards: Tensor) -> Tensor:
    return samples.rewards * rewards


def mean_only(samples: StepSamples) -> Tensor:
    return samples.rewards.mean()


def not_finite(samples: StepSamples) -> Tensor:
    return samples.rewards / 0


def changes_its_arguments(samples: StepSamples) -> Tensor:
    rewards = samples.rewards.nan_to_num_(0.0)
    rewards -= rewards.mean()
    return rewards


def raises(samples: StepSamples) -> Tensor:
    return samples.rewards_by_name["no such part"]


def exits(samples: StepSamples) -> Tensor:
    sys.exit("no key")


def nan_estimate(samples: StepSamples) -> AdvantageEstimate:
    return replace(group_relative(samples), advantages=samples.rewards / 0)


def short_estimate(samples: StepSamples) -> AdvantageEstimate:
    return replace(group_relative(samples), advantages=torch.zeros(1))


def group_relative(samples: StepSamples) -> AdvantageEstimate:
    return estimate_advantages("dr_grpo", samples.rewards, samples.group_ids, samples.valid)


def detached(curr_logprobs: Tensor, batch: Any, global_valid_seqs: int, global_valid_toks: int) -> Any:
    return curr_logprobs.detach().sum(), {}


def metric_by_token(curr_logprobs: Tensor, batch: Any, global_valid_seqs: int, global_valid_toks: int) -> Any:
    return curr_logprobs.sum(), {"gap": curr_logprobs.detach(), "entropy": torch.tensor(1.0)}


def no_loss(curr_logprobs: Tensor, batch: Any, global_valid_seqs: int, global_valid_toks: int) -> Tensor:
    return curr_logprobs.sum()


def constant_kl(log_ratio: Tensor) -> Tensor:
    return torch.ones_like(log_ratio)


def with_slashes(curr_logprobs: Tensor, batch: Any, global_valid_seqs: int, global_valid_toks: int) -> Any:
    return curr_logprobs.sum(), {"ppo/clip": torch.tensor(2.0), "mine/age_1": torch.tensor(4.0)}


def test_metrics_with_slashes_are_custom_ones() -> None:
    curr, inputs = batch()
    _, metrics = build_loss(ClippedPGLossConfig(path=HERE + "with_slashes"), prev_equals_curr=True)(curr, inputs, 2, 6)
    step = step_metrics([combine_metrics([metrics]), combine_metrics([metrics])])
    assert step["custom/ppo/clip"] == 2.0 and step["custom/mine/age_1"] == 4.0


def test_previous_logprobs_are_there_when_the_step_has_none() -> None:
    curr, inputs = batch()
    cfg = ClippedPGLossConfig(path=HERE + "needs_prev")
    loss, metrics = build_loss(cfg, prev_equals_curr=True)(curr, inputs, 2, 6)
    assert loss.item() == 0.0
    assert combine_metrics([metrics, metrics])["custom/max_gap"] == 3.0


@pytest.mark.parametrize(
    ("key", "path", "takes", "options", "message"),
    [
        ("grpo.adv_estimator.path", "nowhere:x", ("samples",), {}, "cannot import the code of grpo.adv_estimator.path"),
        ("grpo.adv_estimator.path", HERE + "LOSS_INPUTS", ("samples",), {}, "is tuple; expected a function"),
        ("grpo.adv_estimator.path", HERE + "too_many", ("samples",), {}, r"is called with \(samples\), but it takes"),
        ("grpo.reward_shaping.path", EXAMPLE + "brevity", ("samples",), {"fine": 1}, "called with .samples, fine=."),
        ("loss_fn.path", HERE + "mean_only", LOSS_INPUTS, {}, "but it takes"),
        ("loss_fn.path", HERE + "StepSamples", LOSS_INPUTS, {}, "a class derived from"),
        (
            "loss_fn.path",
            EXAMPLE + "SoftGateLoss",
            LOSS_INPUTS,
            {"upp": 1},
            "argument 'upp'; the recipe's options have 'upp': `grpo-mcore",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(
    key: str, path: str, takes: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CustomCodeError, match=message):
        CustomPart(key, path, takes, options).check()


def test_the_example_is_accepted() -> None:
    check_custom_objective(
        [
            CustomPart("grpo.adv_estimator.path", EXAMPLE + "rank_advantages", ("samples",), {"scale": 1.0}),
            CustomPart("loss_fn.path", EXAMPLE + "SoftGateLoss", LOSS_INPUTS, {"up": 1.0}),
            CustomPart("loss_fn.path", EXAMPLE + "reinforce", LOSS_INPUTS),
        ],
        CustomCode(path=EXAMPLE + "hellinger"),
    )
    assert example.hellinger(torch.zeros(1)).item() == 0


@pytest.mark.parametrize("path", [HERE + "constant_kl", HERE + "mean_only"])
def test_a_kl_estimator_is_tried(path: str) -> None:
    with pytest.raises(CustomCodeError, match="loss_fn.reference_policy_kl_type"):
        check_custom_objective([], CustomCode(path=path))


def test_a_function_may_change_its_arguments_in_place() -> None:
    step = samples([1.0, 0.0, math.nan], [0, 0, 0])
    assert custom_advantages(HERE + "changes_its_arguments", step, {}).advantages.tolist() == pytest.approx(
        [2 / 3, -1 / 3, 0.0]
    )
    assert custom_shaping(HERE + "changes_its_arguments", step, {})[2].isnan()
    assert step.rewards[:2].tolist() == [1.0, 0.0] and step.rewards[2].isnan()


def test_an_estimate_keeps_its_statistics_and_gives_failed_samples_0() -> None:
    step = samples([1.0, 0.0, math.nan], [0, 0, 0])
    found = custom_advantages(HERE + "group_relative", step, {})
    assert found.advantages.tolist() == [0.5, -0.5, 0.0] and found.groups.size.tolist() == [2]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mean_only", r"returned a tensor of shape \(\); expected"),
        ("not_finite", r"not finite, for samples \[0\]"),
        ("nan_estimate", r"not finite, for samples \[0\]"),
        ("short_estimate", r"returned a tensor of shape \(1,\); expected"),
        ("exits", r"raised RuntimeError: it called sys.exit\('no key'\) \(.*/test_custom.py:\d+\)"),
        ("raises", r"raised KeyError: 'no such part' \(.*/test_custom.py:\d+\)"),
    ],
)
def test_wrong_values_name_the_key(path: str, message: str) -> None:
    step = samples([1.0, math.nan], [0, 0])
    with pytest.raises(CustomCodeError, match=message):
        custom_advantages(HERE + path, step, {})
    with pytest.raises(CustomCodeError, match="reward_shaping"):
        custom_shaping(HERE + path, step, {})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_loss", r"must return \(loss, metrics\)"),
        ("detached", "returned a loss without a gradient: compute it from curr_logprobs"),
        ("metric_by_token", r"returned a tensor of shape \(2, 5\) as the metric 'gap'; expected a scalar"),
    ],
)
def test_a_loss_without_gradient_or_scalar_metrics_is_refused(path: str, message: str) -> None:
    curr, inputs = batch()
    with pytest.raises(CustomCodeError, match=message):
        build_loss(ClippedPGLossConfig(path=HERE + path))(curr, inputs, 2, 6)
