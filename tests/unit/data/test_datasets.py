"""Rows from files and tables, and every way in which a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import datasets as hf_datasets
import pytest

from grpo_mcore.data import DataError, load_response_dataset
from grpo_mcore.data.datasets import NAMED, named_entry
from grpo_mcore.data.interfaces import TaskDataSpec
from grpo_mcore.data.processors import math_data_processor, math_hf_data_processor, sft_processor
from grpo_mcore.data.rows import Joined, Repeated
from grpo_mcore.recipe import DatasetEntry, load_recipe
from tests.unit.data.conftest import sums


def test_rows_are_conversations_with_a_task_a_uid_and_their_other_fields(write_jsonl):
    path = write_jsonl(
        "train.jsonl",
        [
            {"question": "1+1=", "answer": "2", "level": 3},
            "",
            {"question": "1+2=", "answer": 3, "ground_truth": "3.0"},
        ],
    )
    entry = {
        "data_path": path,
        "input_key": "question",
        "output_key": "answer",
        "task_name": "sums",
        "env_name": "math",
    }
    data = load_response_dataset(entry)
    assert list(data.dataset) == [
        {
            "messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
            "task_name": "sums",
            "uid": "sums:1",
            "level": 3,
        },
        {
            "messages": [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}],
            "task_name": "sums",
            "uid": "sums:3",  # the line in the file: line 2 is blank
            "ground_truth": "3.0",
        },
    ]
    assert (data.task_name, data.env_name, data.val_dataset) == ("sums", "math", None)
    assert data.processor is math_hf_data_processor
    assert data.task_spec == TaskDataSpec("sums", input_key="question", output_key="answer", env_name="math")


def test_an_entry_may_be_an_object_and_names_its_task_after_its_file(write_jsonl, tmp_path):
    entry = SimpleNamespace(data_path=write_jsonl("train.jsonl", sums(2)), processor="math_data_processor", repeat=None)
    data = load_response_dataset(entry, default_processor="sft_processor")
    assert data.task_name == f"{tmp_path.name}-train"
    assert data.processor is math_data_processor
    assert load_response_dataset({"data_path": entry.data_path}, "sft_processor").processor is sft_processor


def test_questions_may_be_conversations_and_a_ground_truth_may_stand_for_the_answer(write_jsonl):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    data = load_response_dataset({"data_path": write_jsonl("a.jsonl", [{"input": messages, "ground_truth": "2"}])})
    assert data.dataset[0]["messages"] == messages
    assert data.dataset[0]["ground_truth"] == "2"


def test_openai_format(write_jsonl):
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path = write_jsonl("chat.jsonl", [{"chat": messages, "rules": "add"}, {"chat": messages}])
    entry = {"dataset_name": "openai_format", "data_path": path, "chat_key": "chat", "system_key": "rules"}
    rows = load_response_dataset({**entry, "system_prompt": "sum"}).dataset
    assert rows[0]["messages"] == [{"role": "system", "content": "add"}, *messages]
    assert rows[1]["messages"] == [{"role": "system", "content": "sum"}, *messages]
    assert "chat" not in rows[0]


@pytest.mark.parametrize(("size", "held_out"), [(0.05, 2), (0.5, 20), (7, 7), (1, 1)])
def test_split_is_disjoint_complete_in_order_and_of_the_size_asked(write_jsonl, size, held_out):
    path = write_jsonl("train.jsonl", sums(40))
    data = load_response_dataset({"data_path": path, "split_validation_size": size, "seed": 3})
    train, val = [[row["uid"] for row in part] for part in (data.dataset, data.val_dataset)]
    everything = [row["uid"] for row in load_response_dataset({"data_path": path}).dataset]
    assert len(val) == held_out
    assert sorted(train + val) == sorted(everything)
    assert train == [uid for uid in everything if uid not in set(val)]


def test_split_depends_on_its_seed_only(write_jsonl):
    path = write_jsonl("train.jsonl", sums(40))

    def held_out(seed):
        data = load_response_dataset({"data_path": path, "split_validation_size": 0.25, "seed": seed})
        return [row["uid"] for row in data.val_dataset]

    assert held_out(1) == held_out(1) != held_out(2)


def test_repeat_gives_each_occurrence_a_uid(write_jsonl):
    data = load_response_dataset({"data_path": write_jsonl("a.jsonl", sums(2)), "task_name": "t", "repeat": 3})
    assert [row["uid"] for row in data.dataset] == ["t:1", "t:2", "t:1~1", "t:2~1", "t:1~2", "t:2~2"]
    with pytest.raises(IndexError):
        data.dataset[6]


def test_joined_goes_through_all_parts():
    parts = [[{"n": 0}], [{"n": 1}, {"n": 2}], [{"n": 3}]]
    joined = Joined(parts)
    assert [row["n"] for row in joined] == [0, 1, 2, 3] and len(joined) == 4
    assert joined[-1] == {"n": 3}
    assert [row["uid"] for row in Repeated([{"uid": "a"}], 2)] == ["a", "a~1"]


@pytest.mark.parametrize("kind", ["folder", "saved", "parquet"])
def test_tables_of_the_datasets_library(write_jsonl, tmp_path, kind):
    table = hf_datasets.Dataset.from_list(sums(3, level=1))
    if kind == "folder":
        folder = tmp_path / "table"
        folder.mkdir()
        write_jsonl("table/train.jsonl", sums(3, level=1))
        path = str(folder)
    elif kind == "saved":
        path = str(tmp_path / "saved")
        table.save_to_disk(path)
    else:
        path = str(tmp_path / "rows.parquet")
        table.to_parquet(path)
    data = load_response_dataset({"data_path": path, "task_name": "t", "download_dir": str(tmp_path / "cache")})
    assert len(data.dataset) == 3
    row = data.dataset[1]
    assert (row["uid"], row["level"], row["messages"][0]["content"]) == ("t:1", 1, "1+1=")
    with pytest.raises(DataError, match=r"no 'question' in it; it has \['input', 'level', 'output'\]"):
        load_response_dataset({"data_path": path, "input_key": "question", "download_dir": str(tmp_path / "cache")})


def test_a_table_with_holes_names_the_row(tmp_path):
    rows = [
        {"input": "1", "output": "2", "ground_truth": None},
        {"input": None, "output": "2", "ground_truth": "3"},
    ]
    hf_datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    data = load_response_dataset({"data_path": str(tmp_path / "saved"), "task_name": "t"})
    assert data.dataset[0]["messages"][1]["content"] == "2"
    with pytest.raises(DataError, match="t, row 1: no 'input' in it"):
        data.dataset[1]


def test_a_split_that_is_not_there_names_those_that_are(tmp_path):
    tables = hf_datasets.DatasetDict({name: hf_datasets.Dataset.from_list(sums(2)) for name in ("train", "test")})
    tables.save_to_disk(str(tmp_path / "saved"))
    path = str(tmp_path / "saved")
    assert len(load_response_dataset({"data_path": path, "split": "test"}).dataset) == 2
    with pytest.raises(DataError, match=r"no split 'dev'; set split to one of \['test', 'train'\]"):
        load_response_dataset({"data_path": path, "split": "dev"})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ['{"input": "1", "output": "2"}', "", "{bad"],
            r"a\.jsonl:3: not JSON \(Expecting property name.*column 2",
        ),
        (
            ['{"input": "1", "output": "2"}', '{"output": "2"}'],
            r"a\.jsonl:2: no 'input' in it; it has \['output'\]",
        ),
        (['{"input": "1"}'], r"a\.jsonl:1: no 'output' in it; it has \['input'\]"),
        (['{"input": null, "output": "2"}'], r"a\.jsonl:1: no 'input' in it"),
        (['{"input": 5, "output": "2"}'], r"a\.jsonl:1: 'input' must be text or a list of messages, got int"),
        (["[1, 2]"], r"a\.jsonl:1: expected a JSON object, got list; one JSON object a line"),
        ([], r"a\.jsonl: the dataset is empty"),
        (["", "  "], r"a\.jsonl: the dataset is empty"),
    ],
)
def test_a_bad_file_names_its_line(write_jsonl, lines, message):
    with pytest.raises(DataError, match=message):
        load_response_dataset({"data_path": write_jsonl("a.jsonl", lines)})


def test_text_that_is_not_utf8_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"input": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1 or later: not UTF-8 text"):
        load_response_dataset({"data_path": str(tmp_path / "a.jsonl")})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"data_path": "no/such/train.jsonl"}, "data file not found: no/such/train.jsonl"),
        ({"data_path": "./no_such_folder"}, r"data not found: \./no_such_folder"),
        ({}, "data_path is missing"),
        ({"dataset_name": "DeepScaler"}, "dataset_name 'DeepScaler' is not known: use OpenMathInstruct-2, "),
        ({"dataset_name": "no_such.module:Data"}, "cannot import the dataset_name 'no_such.module:Data'"),
        ({"processor": "math"}, r"unknown processor 'math': known are \['default', "),
        ({"split_validation_size": 0.01}, "split_validation_size 0.01 takes 0 of 4 rows"),
        ({"split_validation_size": 4}, "split_validation_size 4 takes 4 of 4 rows"),
        ({"prompt_file": "no_such.txt"}, "prompt_file no_such.txt: No such file"),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(write_jsonl, entry, message):
    path = {"data_path": write_jsonl("a.jsonl", sums(4))} if entry and "data_path" not in entry else {}
    with pytest.raises(DataError, match=message):
        load_response_dataset({**path, **entry})


class OwnDataset:
    """A dataset class by import path: it gets the entry."""

    def __init__(self, entry):
        self.dataset = [{"messages": [{"role": "user", "content": entry["data_path"]}], "task_name": "own"}]
        self.val_dataset, self.task_name, self.env_name = None, "own", "math"
        self.task_spec, self.processor = TaskDataSpec("own"), math_hf_data_processor


def test_a_dataset_class_by_import_path():
    data = load_response_dataset({"dataset_name": f"{__name__}:OwnDataset", "data_path": "x"})
    assert data.dataset[0]["messages"][0]["content"] == "x"


def test_a_named_dataset_brings_its_path_and_columns_unless_the_entry_says_otherwise() -> None:
    plain = named_entry(DatasetEntry(dataset_name="OpenMathInstruct-2"), "OpenMathInstruct-2")
    assert (plain["data_path"], plain["split"]) == ("nvidia/OpenMathInstruct-2", "train_1M")
    assert (plain["input_key"], plain["output_key"]) == ("problem", "expected_answer")
    entry = DatasetEntry(dataset_name="OpenMathInstruct-2", output_key="generated_solution", split="train_2M")
    own = named_entry(entry, "OpenMathInstruct-2")
    assert (own["split"], own["output_key"]) == ("train_2M", "generated_solution")


def test_every_dataset_that_a_recipe_of_the_project_names_is_known() -> None:
    for file in Path(__file__).resolve().parents[3].glob("recipes/*.yaml"):
        config = load_recipe(str(file)).config
        for entry in [*config.data.train, *config.data.validation]:
            assert entry.dataset_name in {*NAMED, "ResponseDataset", "openai_format"}, file
