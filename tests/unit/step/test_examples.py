"""Examples of the data as trajectories and groups."""

from typing import Any

import pytest
import torch

from grpo_mcore.step.examples import as_group, as_trajectory, filled_up


def message(role: str, tokens: list[int], trained: list[int]) -> Any:
    return {"role": role, "content": "", "token_ids": torch.tensor(tokens), "token_loss_mask": torch.tensor(trained)}


LOG = [message("user", [1, 2, 3], [0, 0, 0]), message("assistant", [4, 5, 6, 7], [0, 1, 1, 0])]


def test_a_message_is_cut_where_its_tokens_begin_or_cease_to_be_trained_on() -> None:
    trajectory = as_trajectory("data:0", LOG, index=1)
    turns = [(turn.role, turn.token_ids.tolist(), turn.loss_mask) for turn in trajectory.turns]
    assert turns == [
        ("user", [1, 2, 3], False), ("assistant", [4], False), ("assistant", [5, 6], True), ("assistant", [7], False),
    ]  # fmt: skip
    assert trajectory.token_ids().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trajectory.loss_mask().tolist() == [False] * 4 + [True] * 2 + [False]
    assert (trajectory.name, trajectory.generated_length) == ("data:0#1", 2)


@pytest.mark.parametrize(("examples", "ranks", "weights"), [(3, 2, [1, 1, 1]), (2, 2, [1, 1]), (1, 4, [1, 0, 0, 0])])
def test_a_short_batch_is_filled_up_with_copies_that_do_not_count(
    examples: int, ranks: int, weights: list[float]
) -> None:
    batch: Any = [{"uid": f"data:{number}"} for number in range(examples)]
    filled, counts = filled_up(batch, ranks)
    assert counts == weights and filled[:examples] == batch
    assert all(copy is batch[0] for copy in filled[examples:])


def test_a_pair_is_a_group_of_two_samples_without_rewards() -> None:
    datum: Any = {"uid": "data:7", "task_name": "data", "extra_env_info": {}}
    answers = [as_trajectory(f"data:7/{name}", LOG, index) for index, name in enumerate(("chosen", "rejected"))]
    group = as_group(datum, answers, ["ref 0", "ref 1"], version=3)
    assert [(sample.uid, sample.generation_index, sample.ref) for sample in group.samples] == [
        ("data:7", 0, "ref 0"), ("data:7", 1, "ref 1"),
    ]  # fmt: skip
    assert [(sample.length, sample.generated_length, sample.weight_version) for sample in group.samples] == [
        (7, 2, 3)
    ] * 2
    assert [score.reward for score in group.scores] == [None, None]
