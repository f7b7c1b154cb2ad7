"""dynamic_sampling and scale_rewards as a script of one's own calls them."""

import math
from typing import Any

import pytest
import torch

from grpo_mcore.algorithms.grpo import dynamic_sampling, scale_rewards
from grpo_mcore.data import BatchedDataDict
from grpo_mcore.objective import group_index, group_stats
from grpo_mcore.observe import Timeline
from grpo_mcore.recipe import GRPOConfig, MasterConfig, RewardScalingConfig

PROMPTS, GENERATIONS = 2, 3


def config(**grpo: Any) -> dict[str, Any]:
    """Plain dicts, as a script may hold them."""
    sizes = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": GENERATIONS}
    return {"grpo": sizes | {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 4} | grpo}


def generated(rewards: dict[str, list[float]], order: list[int] | None = None, **entries: Any) -> BatchedDataDict:
    """A generation batch: rewards by prompt. `order`: of its samples."""
    uids = [uid for uid, values in rewards.items() for _ in values]
    batch = BatchedDataDict(
        uid=uids,
        total_reward=torch.tensor([r for values in rewards.values() for r in values]),
        message_log=[[{"content": f"{uid} {i}"}] for i, uid in enumerate(uids)],
        input_ids=torch.arange(len(uids) * 2).reshape(-1, 2),
        **entries,
    )
    return batch if order is None else batch.select_indices(order)


def call(batch: BatchedDataDict, count: int = 1, cache: Any = None, cfg: Any = None) -> tuple[Any, bool, Any]:
    ids = group_index(batch["uid"]) if "uid" in batch else torch.arange(batch.size) // GENERATIONS
    stats = group_stats(batch["total_reward"], ids, ~batch["total_reward"].isnan())
    std, baseline = stats.std[stats.index], stats.mean[stats.index]
    return dynamic_sampling(batch, std, baseline, count, cfg or config(), Timeline(), cache)


def test_groups_with_equal_rewards_are_dropped() -> None:
    batch = generated({"a": [1, 1, 1], "b": [0.5, 0.5, 0], "c": [0, 0, 0], "d": [1, 0, 1]})
    found, complete, cache = call(batch)
    assert complete and cache is None
    assert found["uid"] == ["b"] * 3 + ["d"] * 3
    assert found["filtered_reward"].tolist() == found["total_reward"].tolist() == [0.5, 0.5, 0, 1, 0, 1]
    assert found["std"].tolist() == pytest.approx([12**-0.5] * 3 + [3**-0.5] * 3)
    assert found["baseline"].tolist() == pytest.approx([1 / 3] * 3 + [2 / 3] * 3)
    assert found["message_log"][0] == [{"content": "b 3"}] and found["input_ids"][0].tolist() == [6, 7]


def test_what_is_kept_waits_for_further_batches() -> None:
    first, complete, cache = call(generated({"a": [1, 0, 1], "b": [1, 1, 1]}))
    assert not complete and first is cache and cache["uid"] == ["a"] * 3
    second, complete, cache = call(generated({"c": [0, 0, 0], "d": [1, 1, 1]}), 2, cache)
    assert not complete and cache["uid"] == ["a"] * 3
    wider = generated({"e": [0, 0, 1], "f": [0, 1, 1]})
    wider["input_ids"] = torch.ones(6, 5, dtype=torch.int64)
    third, complete, cache = call(wider, 3, cache)
    assert complete and cache is None
    assert third["uid"] == ["a"] * 3 + ["e"] * 3  # of the exact size, what was found first comes first
    assert third["input_ids"].shape == (6, 5) and third["input_ids"][0].tolist() == [0, 1, 0, 0, 0]


def test_the_same_prompt_in_two_batches_is_two_groups() -> None:
    batch = generated({"a": [1, 0, 0]})
    _, complete, cache = call(batch)
    found, complete, _ = call(batch, 2, cache)
    assert complete and found.size == 6


def test_nothing_kept_yet() -> None:
    found, complete, cache = call(generated({"a": [1, 1, 1]}))
    assert (found.size, complete, cache) == (0, False, None)


def test_groups_stay_whole_in_any_order() -> None:
    rewards = {"a": [1, 0, 0], "b": [1, 1, 1], "c": [0, 1, 0], "d": [1, 1, 0]}
    batch = generated(rewards, order=[9, 0, 3, 6, 1, 10, 4, 7, 2, 5, 8, 11])
    found, complete, _ = call(batch)
    assert complete and found["uid"] == ["d"] * 3 + ["a"] * 3


def test_one_sample_with_a_std_keeps_its_group() -> None:
    """A std by sample, as of the others of the group: the lone winner's is 0."""
    batch = generated({"a": [1, 0, 0], "b": [0, 1, 0]})
    std = torch.tensor([0.0, 0.7, 0.7, 0.7, 0.0, 0.7])
    found, complete, _ = dynamic_sampling(batch, std, torch.zeros(6), 1, config(), None)
    assert complete and found["total_reward"].tolist() == [1, 0, 0, 0, 1, 0]


def test_failed_samples() -> None:
    nan = math.nan
    found, complete, _ = call(generated({"a": [nan, 1, 1], "b": [nan] * 3, "c": [nan, 1, 0], "d": [1, 0, 1]}))
    assert complete and found["uid"] == ["c"] * 3 + ["d"] * 3


@pytest.mark.parametrize("by", ["idx", "task_name and idx", "place"])
def test_groups_without_uid(by: str) -> None:
    entries: dict[str, Any] = {
        "idx": {"idx": torch.tensor([7, 7, 7, 8, 8, 8])},
        "task_name and idx": {"idx": [7] * 6, "task_name": ["math"] * 3 + ["code"] * 3},
        "place": {},
    }[by]
    batch = generated({"a": [1, 1, 1], "b": [1, 0, 0]}, **entries)
    del batch["uid"]
    found, complete, cache = call(batch)
    assert not complete and found["total_reward"].tolist() == [1, 0, 0]


def test_groups_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group 'b' has 2 samples, grpo.num_generations_per_prompt is 3"):
        call(generated({"a": [1, 0, 1], "b": [1, 0]}))
    batch = generated({"a": [1, 0, 1]})
    with pytest.raises(ValueError, match="std 2, baseline 3"):
        dynamic_sampling(batch, torch.ones(2), torch.ones(3), 1, config(), None)


def test_too_many_batches() -> None:
    batch = generated({"a": [1, 0, 1], "b": [1, 1, 1]})
    _, complete, cache = call(batch, 3)
    assert not complete
    assert call(generated({"c": [0, 1, 1]}), 4, cache)[1]  # the last one that is allowed is enough
    with pytest.raises(ValueError) as error:
        call(generated({"c": [1, 1, 1]}), 4, cache)
    for words in (
        "4 generation batches gave too little", "1 of them informative", "2 are needed",
        "grpo.dynamic_sampling_max_gen_batches", "grpo.batch_multiplier",
    ):  # fmt: skip
        assert words in str(error.value)
    without = config()
    del without["grpo"]["dynamic_sampling_max_gen_batches"]  # the recipe's default
    assert not call(batch, 9, cfg=without)[1]
    with pytest.raises(ValueError, match="10 generation batches"):
        call(batch, 10, cfg=without)


def test_switched_off_the_batch_is_complete_as_it_is() -> None:
    batch = generated({"a": [1, 1, 1], "b": [1, 0, 1]})
    found, complete, cache = call(batch, cfg=config(use_dynamic_sampling=False))
    assert found is batch and complete and cache is None
    assert found.size == 6 and found["std"].tolist()[:3] == [0] * 3 and "filtered_reward" not in found


def test_with_our_config() -> None:
    grpo = GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=3, use_dynamic_sampling=True)
    cfg = MasterConfig.model_construct(grpo=grpo)
    found, complete, _ = call(generated({"a": [1, 1, 1], "b": [1, 0, 1], "c": [0, 0, 1]}), cfg=cfg)
    assert complete and found["uid"] == ["b"] * 3 + ["c"] * 3


@pytest.mark.parametrize("kind", [dict, BatchedDataDict])
@pytest.mark.parametrize("scaling", [dict, RewardScalingConfig.model_validate])
def test_scale_rewards(kind: Any, scaling: Any) -> None:
    rewards = torch.tensor([-1.0, 0.0, 0.5, 2.0, math.nan])
    batch = kind({"total_reward": rewards, "reward/format": torch.tensor([0.5, 0.0, 1.0, 9.0, math.nan])})
    cfg = {"enabled": True, "source_min": 0, "source_max": 1, "target_min": -1.0, "target_max": 1.0}
    found = scale_rewards(batch, scaling(cfg))
    assert found is batch
    assert found["total_reward"][:4].tolist() == [-1, -1, 0, 1] and found["total_reward"][4].isnan()
    assert found["unscaled_reward"] is rewards and found["reward/format"][:4].tolist() == [0, -1, 1, 1]
    off = kind(total_reward=rewards)
    assert scale_rewards(off, scaling({"enabled": False})) == {"total_reward": rewards}
