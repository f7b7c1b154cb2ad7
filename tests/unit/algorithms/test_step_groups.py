"""Which groups inform, and what a step reports of those that it did not train on."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from grpo_mcore.algorithms.grpo import schedule_config
from grpo_mcore.algorithms.step_groups import StepGroups, is_informative
from grpo_mcore.rollout.schedule import Train
from tests.unit.algorithms.step_cases import config, group


@pytest.mark.parametrize(
    ("rewards", "informs"),
    [
        ([1, 0, 0, 1], True),
        ([0, 0, 0, 0], False),
        ([1, 1, None, 1], False),
        ([1, 0, None, None], True),
        ([None, None, None, 1], False),  # one scored sample has nothing to be compared with
        ([0.1, 0.1 + 1e-9, 0.1, 0.1 - 1e-9], False),  # float32 rounding
        ([-2.0, -2.0, -2.0, -1.9], True),
    ],
)
def test_a_group_informs_where_rewards_differ(rewards: list[float | None], informs: bool) -> None:
    assert is_informative(group("a", rewards)) == informs


def test_named_rewards_count_only_where_they_are_learned_from_by_themselves() -> None:
    parts = [{"correct": 1.0, "format": 0.0}, {"correct": 0.0, "format": 1.0}]
    balanced = group("a", [1, 1], parts=parts)
    assert not is_informative(balanced) and is_informative(balanced, by_name=True)
    assert not is_informative(group("a", [1, 1], parts=parts[:1] * 2), by_name=True)
    assert not is_informative(group("a", [1, None], parts=parts), by_name=True)
    for estimator, kept in (("grpo", False), ("gdpo", True)):
        step = StepGroups(config(use_dynamic_sampling=True, adv_estimator={"name": estimator}))
        assert step.add(balanced) == kept


def test_the_metrics_are_of_all_that_was_generated() -> None:
    step = StepGroups(config(use_dynamic_sampling=True, batch_multiplier=1.5))
    groups = [
        group("a", [0, 0, 0, None]), group("b", [1, 0, 0, 0]), group("c", [1, 1, 1, 1]),
        group("d", [2, 0, None, 0]), group("e", [1, 1, 1, 0]),
    ]  # fmt: skip
    assert [step.add(g) for g in groups] == [False, True, False, True, True]
    trained, surplus, metrics = step.take(Train(1, ("b", "d"), ("e",), filtered=2))
    assert trained == [groups[1], groups[3]] and surplus == [groups[4].prompt]
    assert metrics == {
        "reward": pytest.approx((0 + 1 + 4 + 2 + 3) / 18),
        "accuracy": pytest.approx((1 + 4 + 1 + 3) / 18),
        "filtered_reward": pytest.approx((1 + 2) / 7),
        "num_failed_samples": 2.0,
        "num_generated_samples": 20.0,
        "num_filtered_prompts": 2.0,
        "num_surplus_prompts": 1.0,
        "num_gen_batches": 2.0,
    }
    step.add(group("f", [1, 0, 1, 0]))  # the next step has its own
    assert step.take(Train(2, ("f",)))[2]["num_generated_samples"] == 4


def test_without_dynamic_sampling_every_group_trains_and_no_metric_is_added() -> None:
    step = StepGroups(config())
    equal = group("a", [1, 1, 1, 1])
    assert step.add(equal)
    assert step.take(Train(1, ("a",))) == ([equal], [], {})


def test_what_is_not_trained_on_is_let_go() -> None:
    class Object:
        """A trajectory in the store."""

    def with_object(found, thing):
        return replace(found, samples=tuple(replace(sample, ref=thing) for sample in found.samples))

    step = StepGroups(config(use_dynamic_sampling=True))
    dull, extra = Object(), Object()
    seen = [weakref.ref(dull), weakref.ref(extra)]
    step.add(with_object(group("a", [1, 1, 1, 1]), dull))
    step.add(with_object(group("b", [1, 0, 1, 1]), extra))
    step.add(group("c", [1, 0, 1, 1]))
    del dull
    gc.collect()
    assert seen[0]() is None and seen[1]() is not None
    step.take(Train(1, ("c",), ("b",), 1))
    del extra
    gc.collect()
    assert seen[1]() is None


def test_the_schedule_knows_the_size_of_a_generation_batch() -> None:
    plain = schedule_config(config(), None)
    assert plain.prompts_per_dispatch is None
    grpo = {"use_dynamic_sampling": True, "batch_multiplier": 1.25, "dynamic_sampling_max_gen_batches": 4}
    dynamic = schedule_config(config(**grpo), None)
    assert (dynamic.num_prompts, dynamic.prompts_per_dispatch, dynamic.max_gen_batches) == (2, 3, 4)
