"""The sliding puzzle as an environment, one move per turn: reward 1 when the board is solved, else 0.

An illegal action is answered with the reason and counts as a move. The board travels in the metadata; the environment
keeps no state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from examples.sliding_puzzle.puzzle import (
    ACTION_END,
    DIRECTIONS,
    Board,
    direction_of,
    find_action,
    moves,
    size_of,
    solved_board,
    write_board,
)
from grpo_mcore.environments.config import EnvConfig
from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class SlidingPuzzleConfig(EnvConfig):
    """The recipe's section `env.sliding_puzzle`. The dataset decides the board's size and shuffling."""

    section: ClassVar[str] = "env.sliding_puzzle"

    max_moves: int = Field(50, ge=1)
    """Number of moves after which a game is over. A smaller grpo.max_rollout_turns ends it earlier."""


class _Turn(NamedTuple):
    board: Board
    moves: int
    action: str | None
    reason: str
    observation: str
    over: bool


class SlidingPuzzleEnvironment(EnvironmentInterface):
    """Plays the games. A conversation's metadata holds `board`, and `moves`, their number, once one was made."""

    config_class = SlidingPuzzleConfig
    config: SlidingPuzzleConfig

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        turns = [
            self._turn(messages[-1]["content"], entry)
            for messages, entry in zip(message_log_batch, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": turn.observation} for turn in turns],
            metadata=[
                {**entry, "board": list(turn.board), "moves": turn.moves}
                for entry, turn in zip(metadata, turns, strict=True)
            ],
            next_stop_strings=[[ACTION_END] for _ in turns],
            rewards=[float(_is_solved(turn.board)) for turn in turns],
            terminateds=[turn.over for turn in turns],
            answers=[turn.action for turn in turns],
            reasons=[turn.reason for turn in turns],
        )

    def _turn(self, said: str, entry: Mapping[str, Any]) -> _Turn:
        board, made = _board(entry), entry.get("moves", 0) + 1
        action = find_action(said)
        direction = None if action is None else direction_of(board, action)
        after = board if direction is None else moves(board)[direction]
        observation = write_board(after)
        if direction is None:
            reason = "no <action>...</action> in it" if action is None else f"{action!r} is no move here"
            observation = f"{reason}; possible: {', '.join(d for d in DIRECTIONS if d in moves(board))}\n{observation}"
        else:
            reason = f"solved in {made} moves" if _is_solved(after) else f"not solved after {made} moves"
        return _Turn(after, made, action, reason, observation, _is_solved(after) or made >= self.config.max_moves)


def _is_solved(board: Board) -> bool:
    return board == solved_board(size_of(board))


def _board(metadata: Mapping[str, Any]) -> Board:
    if "board" not in metadata:
        raise ValueError(
            f"the sliding puzzle needs 'board' in extra_env_info, got {sorted(metadata)}; its data is "
            "dataset_name: examples.sliding_puzzle.dataset:SlidingPuzzleDataset"
        )
    board = tuple(metadata["board"])
    size_of(board)
    return board
