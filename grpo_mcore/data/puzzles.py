"""Sliding puzzles as a dataset: made from a seed, always solvable, no file needed."""

from __future__ import annotations

import difflib
import random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.mapped import MappedDataset, setting
from grpo_mcore.data.source import Source
from grpo_mcore.rollout.sliding_puzzle import (
    RULES,
    demonstration,
    shuffled,
    solved_board,
    write_action,
    write_board,
)


class PuzzleOptions(BaseModel):
    """`dataset_kwargs` of a dataset entry with `dataset_name: SlidingPuzzle`."""

    model_config = ConfigDict(extra="forbid")

    num_puzzles: int = Field(1000, ge=1)
    """Rows. Boards may occur more than once: a 2 x 2 board has only 12 states."""
    size: int = Field(3, ge=2)
    """The n of the n x n board."""
    shuffle_moves: int = Field(10, ge=1)
    """A board is 1 to so many random moves away from the solved one."""
    rules: bool = True
    """The first message explains the game. false: it shows the board alone."""
    demonstrations: bool = False
    """Rows are games to imitate (for `grpo-mcore sft`), not prompts."""
    right_share: float = Field(0.5, ge=0, le=1)
    """Demonstrations: how often a move is one on a known way to the solved board; else it is a random one."""
    demonstration_moves: int = Field(8, ge=1)
    """Demonstrations: the longest."""


def sliding_puzzles(entry: Any, default_processor: str) -> MappedDataset:
    """The dataset of an entry; its `seed` decides about every puzzle. Rows: "messages", "board", "ground_truth"."""
    options, seed = _options(setting(entry, "dataset_kwargs", {})), setting(entry, "seed", 42)

    def to_chat(row: dict[str, Any]) -> dict[str, Any]:
        draw = random.Random(f"{seed}/{row['number']}")
        board, home = shuffled(options.size, draw.randint(1, options.shuffle_moves), draw)
        messages = [_said("user", (RULES if options.rules else "") + write_board(board))]
        if options.demonstrations:
            game = demonstration(board, home, options.right_share, options.demonstration_moves, draw)
            for direction, after in game:
                messages += [_said("assistant", write_action(direction)), _said("user", write_board(after))]
            messages.pop()
        goal = write_board(solved_board(options.size))
        return {"messages": messages, "board": list(board), "ground_truth": goal}

    numbers = range(options.num_puzzles)
    return MappedDataset(
        entry,
        Source([{"number": number} for number in numbers], numbers, lambda index: f"SlidingPuzzle, puzzle {index}"),
        to_chat,
        task_name="sliding-puzzle",
        default_processor=default_processor if options.demonstrations else "sliding_puzzle_processor",
    )


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _options(section: dict[str, Any]) -> PuzzleOptions:
    for key in section:
        if key not in PuzzleOptions.model_fields:
            near = difflib.get_close_matches(key, PuzzleOptions.model_fields, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = ", ".join(PuzzleOptions.model_fields)
            raise DataError(f"dataset_kwargs.{key} of SlidingPuzzle: unknown key; {hint}known: {known}")
    try:
        return PuzzleOptions(**section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(f"dataset_kwargs.{key} of SlidingPuzzle: {first['msg']}, got {first['input']!r}") from error
