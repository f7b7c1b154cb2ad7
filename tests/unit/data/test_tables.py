"""Tables and lists as files: what a run reads, and that `data check` reads the same."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets as hf_datasets
import numpy as np
import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.data import DataError, build_task_data, load_preference_dataset, load_response_dataset
from grpo_mcore.data.check import check_file
from grpo_mcore.recipe import DatasetEntry
from tests.checkout import ROOT
from tests.hub_server import hub
from tests.unit.data.conftest import sums

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function table(name, content) -> entry. The content is rows, or the bytes of a CSV file."""
    monkeypatch.setattr(hf_datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write(name: str, content: list[dict[str, Any]] | bytes, **keys: Any) -> dict[str, Any]:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".parquet":
            hf_datasets.Dataset.from_list(content).to_parquet(str(path))
        elif path.suffix == ".arrow":
            hf_datasets.Dataset.from_list(content).save_to_disk(str(tmp_path / "saved"))
            next((tmp_path / "saved").glob("*.arrow")).rename(path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(content, indent=1))
        else:
            hf_datasets.Dataset.from_list(content).save_to_disk(str(path))
        return {"data_path": str(path), "task_name": "t", "download_dir": str(tmp_path / "cache"), **keys}

    return write


def read(entry: dict[str, Any]) -> list[dict[str, Any]]:
    return list(load_response_dataset(entry).dataset)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.json", "saved_table"])
def test_check_and_run_read_the_same(table: Callable[..., dict[str, Any]], name: str, tokenizer: Any) -> None:
    rows = [*sums(40), {"input": None, "output": "2"}]
    entry = table(name, rows)
    report = check_file(Path(entry["data_path"]))
    data = build_task_data([entry], [], tokenizer, 32).train
    assert (report.rows, report.usable_rows, data.excluded.count) == (41, 40, 1)
    assert report.unit == {"a.json": "object"}.get(name, "row")
    assert report.problems == {"no conversation can be made of it": {"'input' is null": [40]}}
    assert data.excluded.reasons == {"'input' is null": 1}


def test_a_first_row_that_cannot_be_used_costs_itself(table: Callable[..., dict[str, Any]], tokenizer: Any) -> None:
    entry = table("a.parquet", [{"input": None, "output": "2"}, *sums(40)])
    data = build_task_data([entry], [], tokenizer, 32).train
    assert [data.usable(index) for index in (0, 1)] == [False, True]
    with pytest.raises(DataError, match=r"a\.parquet, row 0: no 'question' in it"):
        load_response_dataset({**entry, "input_key": "question"})


def test_a_line_of_a_json_file_that_is_no_row_costs_itself(write_jsonl: Any, tokenizer: Any) -> None:
    path = write_jsonl("a.jsonl", [*sums(40), {"output": "2"}])
    data = build_task_data([{"data_path": path}], [], tokenizer, 32).train
    assert data.excluded.reasons == {"no 'input' in it; it has ['output']": 1} and not data.usable(40)


CSV = b'input,output,note\r\n1+1=,2,NA\r\n007,0.50,None\r\n"a,""b""\r\nc",null,\r\n'
CELLS = [("1+1=", "2", "NA"), ("007", "0.50", "None"), ('a,"b"\r\nc', "null", None)]


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        ("a.csv", CSV, {}),
        ("a.csv", b"\xef\xbb\xbf" + CSV, {}),
        ("a.csv", CSV.replace(b",", b";").replace(b"a;", b"a,"), {"separator": ";"}),
        ("a.tsv", CSV.replace(b",", b"\t").replace(b"a\t", b"a,"), {}),
        ("a.tsv", CSV.replace(b",", b"|").replace(b"a|", b"a,"), {"separator": "|"}),
        ("a.csv.gz", gzip.compress(CSV, mtime=0), {}),
    ],
)
def test_cells_of_csv_files_are_the_text_that_they_hold(
    table: Callable[..., dict[str, Any]], name: str, text: bytes, keys: dict[str, str]
) -> None:
    entry = table(name, text, **keys)
    rows = read(entry)
    assert [(row["messages"][0]["content"], row["messages"][1]["content"], row["note"]) for row in rows] == CELLS


def test_text_files_of_a_folder_are_read_as_each_by_itself(
    table: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "f").mkdir()
    entry = table("f/train.csv", CSV) | {"data_path": str(tmp_path / "f")}
    (tmp_path / "f" / "test.jsonl").write_text('{"input": "When?", "output": "2024-01-02"}')
    assert [(row["messages"][0]["content"], row["messages"][1]["content"], row["note"]) for row in read(entry)] == CELLS
    assert [row["messages"][1]["content"] for row in read({**entry, "split": "test"})] == ["2024-01-02"]
    assert [row["note"] for row in read({**entry, "split": "train[1:2]"})] == ["None"]
    (tmp_path / "f" / "more_test.jsonl.zst").touch()
    with pytest.raises(DataError, match="more_test.jsonl.zst: not read in this form, in which types would be guessed"):
        read(entry)
    (tmp_path / "f" / "more_test.jsonl.zst").unlink()
    with pytest.raises(DataError, match="no split 'tset'; set split to one of .'test', 'train'.; nearest: test"):
        read({**entry, "split": "tset"})


CARD = """---
configs:
- config_name: default
  sep: ";"
  data_files: [{split: train, path: train.csv}, {split: test, path: test.csv}]
---
"""
PARTS = {"train": CELLS, "test": [("When?", "2024-01-02", "1e5")], "train[1:]": CELLS[1:]}
PARTS |= {"train[:34%]+test": [*CELLS[:1], *PARTS["test"]]}


def cells(path: str, split: str | None) -> list[tuple[str, str, str]]:
    entry = DatasetEntry(data_path=path, split=split)
    return [
        (row["messages"][0]["content"], row["messages"][1]["content"], row["note"])
        for row in load_response_dataset(entry).dataset
    ]


@pytest.fixture
def with_card(tmp_path: Path) -> Path:
    """Return the folder of a data set whose card names its splits and the separator of its tables."""
    folder = tmp_path / "carded"
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    (folder / "train.csv").write_bytes(CSV.replace(b",", b";").replace(b"a;", b"a,"))
    (folder / "test.csv").write_text("input;output;note\nWhen?;2024-01-02;1e5\n")
    return folder


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("split", PARTS)
def test_text_files_of_a_folder_with_a_card_are_read_as_each_by_itself(with_card: Path, split: str) -> None:
    assert cells(str(with_card), split) == PARTS[split]


def test_text_files_on_the_hub_are_read_as_each_by_itself(with_card: Path, tmp_path: Path) -> None:
    """With the hub, and then with its cache alone."""
    code = f"from {__name__} import *; print(json.dumps([cells('own/rows', part) for part in PARTS]))"
    right = json.loads(json.dumps(list(PARTS.values())))
    with hub({"datasets/own/rows": with_card}) as address:
        for offline in "01":
            keys = {"HF_ENDPOINT": address if offline == "0" else "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
            keys |= {"HF_HUB_OFFLINE": offline, "HF_DATASETS_OFFLINE": offline, "PYTHONPATH": str(ROOT)}
            words = [sys.executable, "-c", code]
            done = subprocess.run(
                words, env=os.environ | keys, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout) == right


def test_a_csv_file_as_the_check_sees_it(table: Callable[..., dict[str, Any]], capsys: Any) -> None:
    entry = table("a.csv", CSV)
    assert main(["data", "check", entry["data_path"]]) == 0
    out = capsys.readouterr().out
    assert "3 rows, 3 usable" in out and "row 0\n" in out


def test_an_index_that_pandas_wrote_is_a_column_and_a_ragged_row_is_named(table: Callable[..., dict[str, Any]]) -> None:
    (row,) = read(table("a.csv", b",input,output\n0,1+1=,2\n"))
    assert row["Unnamed: 0"] == "0"
    with pytest.raises(DataError, match="no 'input' in it; it has .'input;output'."):
        read(table("c.csv", b"input;output\n1;2\n"))
    with pytest.raises(DataError, match=r"e.csv: the column 'output' occurs twice in its first line"):
        read(table("e.csv", b"input,output,output\n1,2,3\n"))
    with pytest.raises(DataError, match="Expected 2 fields in line 3, saw 3"):
        read(table("b.csv", b"input,output\n1,2\n1,2,3\n"))
    with pytest.raises(
        DataError, match="its first row has 3 cells for the 2 columns of its first line; a cell with ','"
    ):
        read(table("d.csv", b"input,output\n\n1, 2?,3\n1,2\n"))  # read as the question 2? with the answer 3


VERL = {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"style": "rule", "ground_truth": "2"}}


@pytest.mark.parametrize("name", ["a.parquet", "a.json"])
def test_dotted_keys_lead_into_records(table: Callable[..., dict[str, Any]], name: str) -> None:
    keys = {"input_key": "prompt", "output_key": "reward_model.ground_truth"}
    (row,) = read(table(name, [VERL], **keys))
    assert row["messages"] == [*VERL["prompt"], {"role": "assistant", "content": "2"}]
    assert row["reward_model"] == VERL["reward_model"]
    with pytest.raises(DataError, match=r"no 'ground_truht' in 'reward_model'; it has .*; nearest: 'ground_truth'"):
        read(table(name, [VERL], **{**keys, "output_key": "reward_model.ground_truht"}))


def test_a_key_may_have_dots_in_its_name_and_lead_into_lists(table: Callable[..., dict[str, Any]]) -> None:
    row = {"a.b": "1+1=", "answers": {"text": ["2", "two"]}}
    (read_row,) = read(table("a.json", [row], input_key="a.b", output_key="answers.text.0"))
    assert [message["content"] for message in read_row["messages"]] == ["1+1=", "2"]
    with pytest.raises(DataError, match="'answers.text.5' leads to nothing"):
        read(table("a.json", [row], input_key="a.b", output_key="answers.text.5"))


def test_nulls_of_tables_reach_no_template(table: Callable[..., dict[str, Any]]) -> None:
    asked = {"role": "user", "content": "1+1=", "tool_calls": None, "name": None}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    said = {"role": "assistant", "content": "2", "tool_calls": []}
    for name in ("a.parquet", "a.json"):
        (row,) = read(table(name, [{"input": [asked, called], "output": "2"}]))
        assert [sorted(message) for message in row["messages"]] == [
            ["content", "role"], ["content", "role", "tool_calls"], ["content", "role"]
        ]  # fmt: skip
        pair = table(name, [{"prompt": [asked], "chosen": [said], "rejected": "3"}])
        (row,) = load_preference_dataset(pair).dataset
        assert row["messages"] == [{"role": "user", "content": "1+1="}]
        assert row["chosen"] == [{"role": "assistant", "content": "2"}]


def test_conversations_and_tools_may_be_json_text(table: Callable[..., dict[str, Any]]) -> None:
    messages, tools = [{"role": "user", "content": "1+1="}], [{"type": "function", "function": {"name": "add"}}]
    text = {"messages": json.dumps(messages), "tools": json.dumps(tools)}
    each = {**text, "tools": [json.dumps(tool) for tool in tools]}
    for row in (text, each):
        (chat,) = read(table("a.parquet", [row], dataset_name="openai_format"))
        assert (chat["messages"], chat["tools"]) == (messages, tools)
    (chat,) = read(table("b.parquet", [{"input": "1", "output": "2", "tools": text["tools"]}]))
    assert chat["tools"] == tools


@pytest.mark.parametrize("write", [json.dumps, str])
def test_questions_and_answers_may_be_messages_as_text(
    table: Callable[..., dict[str, Any]], write: Callable[[Any], str]
) -> None:
    """As pandas writes them to a CSV file. The model had been asked the JSON itself."""
    question, answer = [{"role": "user", "content": "1+1="}], [{"content": "2", "role": "assistant"}]
    (row,) = read(table("a.parquet", [{"input": write(question), "output": write(answer)}]))
    assert row["messages"] == [*question, *answer]
    with pytest.raises(DataError, match="'input' is text that begins as a list of messages and is neither JSON nor"):
        read(table("b.parquet", [{"input": write(question)[:-3], "output": "2"}]))
    (row,) = read(table("c.parquet", [{"input": "[{1, 2}]", "output": '[{"role_of": 1}]'}]))
    assert [message["content"] for message in row["messages"]] == ["[{1, 2}]", '[{"role_of": 1}]']


def test_values_of_tables_are_as_in_json(table: Callable[..., dict[str, Any]]) -> None:
    values = {
        "day": date(2026, 1, 2),
        "moment": datetime(2026, 1, 2, 3),
        "lasted": timedelta(seconds=90),
        "price": Decimal("1.50"),
        "data": b"\x00\xff",
        "text": b"caf\xc3\xa9",
        "large": 2**63 - 1,
        "nested": {"a": None, "b": [{"c": None, "d": 1}]},
        "empty": None,
    }
    (row,) = read(table("a.parquet", [{"input": "1", "output": "2", **values}]))
    assert {key: row[key] for key in values} == {
        **values,
        "text": "café", "day": "2026-01-02", "moment": "2026-01-02T03:00:00", "lasted": "0:01:30", "price": "1.50",
        "nested": {"b": [{"d": 1}]},
    }  # fmt: skip


class Custom:
    """A dataset class whose rows hold values of numpy and nulls."""

    def __init__(self, entry: Any) -> None:
        self.task_name = "own"
        rows = [{"messages": [{"role": "user", "content": "1"}], "n": np.int64(3), "a": np.ones(2), "none": None}]
        self.dataset = hf_datasets.Dataset.from_list([{"messages": rows[0]["messages"], "n": 3}]) if entry else rows


def test_values_of_numpy_in_custom_datasets_become_plain() -> None:
    data = load_response_dataset({"dataset_name": f"{__name__}:Custom", "task_name": "x"})
    assert data.dataset[0]["messages"][0]["content"] == "1"
    from grpo_mcore.data.datasets.registry import completed

    (row,) = completed(Custom({}), {}, "sft_processor").dataset
    assert (row["n"], row["a"], row["none"], type(row["n"])) == (3, [1.0, 1.0], None, int)
