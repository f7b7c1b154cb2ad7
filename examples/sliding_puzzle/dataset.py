"""Sliding puzzles as a dataset, generated from a seed and always solvable; and the processor of its prompts."""

from __future__ import annotations

import random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from examples.sliding_puzzle.puzzle import (
    ACTION_END,
    RULES,
    demonstration,
    shuffled,
    solved_board,
    write_action,
    write_board,
)
from grpo_mcore.data import DataError, DatumSpec, TaskDataSpec
from grpo_mcore.data.datasets import Entry, MappedDataset, Source, setting
from grpo_mcore.data.processors import math_hf_data_processor


class PuzzleOptions(BaseModel):
    """The `dataset_kwargs` of the recipe's entry."""

    model_config = ConfigDict(extra="forbid")

    num_puzzles: int = Field(1000, ge=1)
    """Number of rows. Boards may repeat: a 2 x 2 board has only 12 states."""
    size: int = Field(3, ge=2)
    """The n of the n x n board."""
    shuffle_moves: int = Field(10, ge=1)
    """A board is 1 to this many random moves away from the solved one."""
    rules: bool = True
    """Explain the game in the first message. false: show the board alone."""
    demonstrations: bool = False
    """Rows are games to imitate (for `grpo-mcore sft`), not prompts."""
    right_share: float = Field(0.5, ge=0, le=1)
    """Demonstrations: probability that a move is the next of a known solution; else it is random."""
    demonstration_moves: int = Field(8, ge=1)
    """Demonstrations: maximum number of moves."""


class SlidingPuzzleDataset(MappedDataset):
    """`num_puzzles` rows {"messages", "board", "ground_truth"}. The entry's `seed` determines every puzzle."""

    def __init__(self, entry: Entry) -> None:
        options, seed = _options(setting(entry, "dataset_kwargs", {})), setting(entry, "seed", 42)

        def to_chat(row: dict[str, Any]) -> dict[str, Any]:
            draw = random.Random(f"{seed}/{row['number']}")
            board, home = shuffled(options.size, draw.randint(1, options.shuffle_moves), draw)
            messages = [_message("user", (RULES if options.rules else "") + write_board(board))]
            if options.demonstrations:
                game = demonstration(board, home, options.right_share, options.demonstration_moves, draw)
                for direction, after in game:
                    messages += [_message("assistant", write_action(direction)), _message("user", write_board(after))]
                messages.pop()
            goal = write_board(solved_board(options.size))
            return {"messages": messages, "board": list(board), "ground_truth": goal}

        numbers = range(options.num_puzzles)
        rows = [{"number": number} for number in numbers]
        processor = "sft_processor" if options.demonstrations else f"{__name__}:sliding_puzzle_processor"
        super().__init__(
            entry,
            Source(rows, numbers, lambda index: f"SlidingPuzzle, puzzle {index}"),
            to_chat,
            task_name="sliding-puzzle",
            default_processor=processor,
        )


def sliding_puzzle_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: Any,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Tokenise a row like the built-in processor, and stop generation at the end of an action."""
    datum = math_hf_data_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)
    datum["stop_strings"] = [ACTION_END]
    return datum


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _options(section: dict[str, Any]) -> PuzzleOptions:
    try:
        return PuzzleOptions(**section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(PuzzleOptions.model_fields)
        raise DataError(f"dataset_kwargs.{key}: {first['msg']}, got {first['input']!r}; known keys: {known}") from error
