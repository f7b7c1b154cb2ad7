"""The puzzle as an environment: games are played turn by turn, with all state in the metadata."""

import random

import pytest
import torch

from examples.sliding_puzzle.puzzle import moves, shuffled, solved_board, write_action, write_board
from grpo_mcore.environments import create_env
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.rollout.trajectory import Trajectory, Turn


def said(*texts: str) -> Trajectory:
    """Return a trajectory with these generated turns."""
    turns = [Turn("user", torch.tensor([1]), text="the board <action>left</action>")]
    for text in texts:
        turns += [Turn("assistant", torch.tensor([2]), torch.zeros(1), loss_mask=True, text=text)]
        turns += [Turn("user", torch.tensor([3]), text="a board")]
    return Trajectory("p", 0, tuple(turns[:-1]), (), "stop", truncated=False)


def test_a_game_from_start_to_end() -> None:
    env = create_env("sliding_puzzle", {"max_moves": 10})
    board, home = shuffled(3, 4, random.Random(1))
    metadata, texts = {"board": list(board), "other": "kept"}, []
    for number, direction in enumerate(home, start=1):
        texts.append(write_action(direction))
        before = dict(metadata)
        (outcome,) = env.advance([metadata], said(*texts))
        assert metadata == before  # the samples of a group share it
        assert outcome.metadata is not None and outcome.stop_strings == ("</action>",)
        metadata = outcome.metadata
        board = moves(board)[direction]
        assert metadata == {"board": list(board), "moves": number, "other": "kept"}
        last = number == 4
        assert (outcome.reward, outcome.terminated, outcome.answer) == (float(last), last, direction)
        assert outcome.observation == write_board(board)
    assert board == solved_board(3) and outcome.reason == "solved in 4 moves"


def test_an_illegal_action_counts_as_a_move() -> None:
    env = create_env("sliding_puzzle", {"max_moves": 3})
    metadata = {"board": [1, 2, 0, 3]}
    expected = [
        ("I do not know", "no <action>...</action> in it; possible: down, left\n1 2\n_ 3", None),
        ("<action>up</action>", "'up' is no move here; possible: down, left\n1 2\n_ 3", "up"),
        ("<action>slide 2</action>", "'slide 2' is no move here; possible: down, left\n1 2\n_ 3", "slide 2"),
    ]
    for number, (text, observation, answer) in enumerate(expected, start=1):
        (outcome,) = env.advance([metadata], said(text))
        metadata = outcome.metadata
        assert metadata == {"board": [1, 2, 0, 3], "moves": number}
        assert (outcome.reward, outcome.answer, outcome.terminated) == (0.0, answer, number == 3)
        assert outcome.observation == observation


def test_a_game_is_over_when_its_moves_are_used_up() -> None:
    env = create_env("sliding_puzzle", {"max_moves": 1})
    (wrong,) = env.advance([{"board": [1, 2, 0, 3]}], said(write_action("down")))
    assert (wrong.reward, wrong.terminated, wrong.reason) == (0.0, True, "not solved after 1 moves")
    (right,) = env.advance([{"board": [1, 2, 0, 3]}], said("<action>slide 3</action>"))
    assert (right.reward, right.terminated) == (1.0, True)


def test_games_are_independent() -> None:
    env = create_env("sliding_puzzle")
    games = [{"board": [1, 2, 0, 3]}, {"board": [1, 0, 3, 2], "moves": 4}]
    outcomes = env.advance(games, said("<action>down</action>"), said("<action>up</action>"))
    assert [outcome.metadata for outcome in outcomes] == [
        {"board": [0, 2, 1, 3], "moves": 1},
        {"board": [1, 2, 3, 0], "moves": 5},
    ]
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"max_move": 5}, "env.sliding_puzzle.max_move: unknown key; did you mean 'max_moves'"),
        ({"size": 3}, "env.sliding_puzzle.size: unknown key; known: solved_at, max_moves"),
        ({"max_moves": 0}, "env.sliding_puzzle.max_moves: .*greater than or equal to 1, got 0"),
    ],
)
def test_a_wrong_section(section, message) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        create_env("sliding_puzzle", section)


def test_data_of_another_task() -> None:
    env = create_env("sliding_puzzle")
    with pytest.raises(ValueError, match="needs 'board' in extra_env_info, got .'ground_truth'"):
        env.advance([{"ground_truth": "82"}], said("82"))
    with pytest.raises(ValueError, match="no n x n board"):
        env.advance([{"board": [1, 2, 3]}], said("82"))
