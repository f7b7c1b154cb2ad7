"""Sliding puzzles as a dataset: prompts for GRPO, and games to imitate."""

import pytest

from examples.sliding_puzzle.puzzle import direction_of, find_action, moves, solved_board, write_board
from grpo_mcore.data import DataError, build_task_data, load_response_dataset
from grpo_mcore.recipe import DatasetEntry


def entry(**fields) -> DatasetEntry:
    return DatasetEntry(dataset_name="examples.sliding_puzzle.dataset:SlidingPuzzleDataset", **fields)


def rows(**fields) -> list[dict]:
    return list(load_response_dataset(entry(**fields)).dataset)


def test_the_seed_determines_every_puzzle() -> None:
    options = {"size": 3, "num_puzzles": 50, "shuffle_moves": 20}
    first = rows(seed=1, dataset_kwargs=options)
    assert first == rows(seed=1, dataset_kwargs=options)
    assert first[:20] == rows(seed=1, dataset_kwargs=options | {"num_puzzles": 20})
    boards = [tuple(row["board"]) for row in first]
    others = [tuple(row["board"]) for row in rows(seed=2, dataset_kwargs=options)]
    assert len(set(boards)) > 30 and sum(a == b for a, b in zip(boards, others, strict=True)) < 10
    assert solved_board(3) not in boards
    assert [row["uid"] for row in first] == [f"sliding-puzzle:{number}" for number in range(50)]


def test_all_2_x_2_boards_come_up() -> None:
    options = {"size": 2, "num_puzzles": 200, "shuffle_moves": 6}
    assert len({tuple(row["board"]) for row in rows(dataset_kwargs=options)}) == 11


def test_names_of_earlier_recipes(tokenizer) -> None:
    options = {"size": 2, "num_puzzles": 3}
    named = DatasetEntry(dataset_name="SlidingPuzzle", processor="sliding_puzzle_processor", dataset_kwargs=options)
    assert list(load_response_dataset(named).dataset) == rows(dataset_kwargs=options)
    assert build_task_data([named], [], tokenizer, 512).train[0]["stop_strings"] == ["</action>"]


def test_prompts(tokenizer) -> None:
    made = entry(env_name="sliding_puzzle", dataset_kwargs={"size": 2, "num_puzzles": 8, "rules": False})
    data = build_task_data([made], [], tokenizer, 64)
    assert data.env_names == {"sliding-puzzle": "sliding_puzzle"}
    datum = data.train[0]
    board = tuple(datum["extra_env_info"]["board"])
    assert datum["message_log"][0]["content"] == f"<bos><user>{write_board(board)}<assistant>"
    assert datum["stop_strings"] == ["</action>"] and datum["loss_multiplier"] == 1.0
    fields = {name: value for name, value in datum["extra_env_info"].items() if name != "messages"}
    assert fields == {"board": list(board), "ground_truth": "1 2\n3 _"}


def test_the_rules_come_before_the_board() -> None:
    (row,) = rows(dataset_kwargs={"num_puzzles": 1})
    (message,) = row["messages"]
    assert message["role"] == "user" and message["content"].endswith("\n\n" + write_board(tuple(row["board"])))
    for action in ("up", "down", "left", "right", "slide N"):
        assert f"<action>{action}</action>" in message["content"]


def test_demonstrations_are_games(tokenizer) -> None:
    options = {"size": 2, "num_puzzles": 40, "shuffle_moves": 6, "rules": False, "demonstrations": True}
    made = entry(dataset_kwargs=options | {"demonstration_moves": 5, "right_share": 0.6})
    solved = 0
    for row in load_response_dataset(made).dataset:
        board, messages = tuple(row["board"]), row["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert len(messages) <= 10
        for shown, said in zip(messages[::2], messages[1::2], strict=True):
            assert shown["content"] == write_board(board) and board != solved_board(2)
            direction = direction_of(board, find_action(said["content"]) or "")
            assert direction is not None
            board = moves(board)[direction]
        solved += board == solved_board(2)
    assert 5 < solved < 35
    datum = build_task_data([made], [], tokenizer, 256).train[0]
    assert {message["role"] for message in datum["message_log"]} == {"user", "assistant"}


def test_validation_split_and_repetition() -> None:
    data = load_response_dataset(entry(split_validation_size=3, repeat=2, dataset_kwargs={"num_puzzles": 10}))
    assert (len(data.dataset), len(data.val_dataset or [])) == (14, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shuffel_moves": 3},
            "dataset_kwargs.shuffel_moves: Extra inputs .* got 3; known keys: num_puzzles, size, shuffle_moves",
        ),
        ({"size": 1}, "dataset_kwargs.size: .*greater than or equal to 2, got 1"),
        ({"right_share": 2}, "dataset_kwargs.right_share"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(DataError, match=message):
        load_response_dataset(entry(dataset_kwargs=options))


def test_other_datasets_have_no_options(write_jsonl) -> None:
    path = write_jsonl("train.jsonl", [{"input": "a", "output": "b"}])
    with pytest.raises(DataError, match="'ResponseDataset': dataset_kwargs have no effect"):
        load_response_dataset(DatasetEntry(data_path=path, dataset_kwargs={"size": 2}))
