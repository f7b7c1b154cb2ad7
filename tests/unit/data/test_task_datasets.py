"""Several datasets for training and validation, and the tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import datasets as hf_datasets
import numpy as np
import pytest

from grpo_mcore.data import (
    AllTaskProcessedDataset,
    DataError,
    TaskDataSpec,
    build_dataloader,
    build_task_data,
    load_tokenizer,
    task_datasets,
)
from grpo_mcore.data.processors import math_hf_data_processor
from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from tests.unit.data.conftest import sums


def test_datasets_are_joined_and_keep_their_tasks(write_jsonl, tokenizer, tmp_path):
    (tmp_path / "prompt.txt").write_text("= {}")
    entries = [
        {"data_path": write_jsonl("a.jsonl", sums(6)), "split_validation_size": 2, "env_name": "math"},
        {"data_path": write_jsonl("b.jsonl", sums(3)), "prompt_file": str(tmp_path / "prompt.txt")},
    ]
    data = build_task_data(entries, [entries[1]], tokenizer, 32, stop_strings={"math": ["="]})
    a, b = f"{tmp_path.name}-a", f"{tmp_path.name}-b"
    assert [datum["task_name"] for datum in data.train] == [a] * 4 + [b] * 3
    assert data.train[4]["message_log"][0]["content"] == "<bos><user>= 0+1=<assistant>"
    assert data.env_names == {a: "math", b: None}
    assert [datum.get("stop_strings") for datum in data.train] == [["="]] * 4 + [None] * 3
    assert [datum.get("stop_strings") for datum in data.validation] == [["="], None, ["="], None, None]
    # Held-out rows of a alternate with b, which is loaded again under a name that no training prompt has.
    assert [datum["task_name"] for datum in data.validation] == [a, f"{b}-2", a, f"{b}-2", f"{b}-2"]
    assert data.val_env_names == {a: "math", f"{b}-2": None}
    uids = [datum["uid"] for part in (data.train, data.validation) for datum in part]
    assert len(set(uids)) == len(uids) == 12
    assert len(next(iter(build_dataloader(data.train, 7, shuffle=True, seed=0)))) == 7


def test_training_datasets_may_be_kept_separate(write_jsonl, tokenizer, tmp_path):
    entries = [{"data_path": write_jsonl(f"{name}.jsonl", sums(count))} for name, count in (("a", 4), ("b", 2))]
    data = build_task_data(entries, [], tokenizer, 32, separate=True)
    assert {name: len(rows) for name, rows in data.train.items()} == {f"{tmp_path.name}-a": 4, f"{tmp_path.name}-b": 2}
    assert [datum["uid"] for datum in data.train[f"{tmp_path.name}-b"]] == [f"{tmp_path.name}-b:{n}" for n in (1, 2)]
    assert set(data.env_names) == set(data.train)


def test_one_dataset_for_training_and_validation_keeps_its_split_in_its_name(write_jsonl, tokenizer):
    entry = {"data_path": write_jsonl("a.jsonl", sums(4)), "task_name": "t"}
    data = build_task_data([entry], [{**entry, "split": "test"}, {**entry, "split": "test"}], tokenizer, 32)
    assert set(data.val_env_names) == {"t-test", "t-2"}


def test_validation_on_the_rows_of_the_training_is_said(write_jsonl, tokenizer, tmp_path, package_log):
    rows, entry = hf_datasets.Dataset.from_list(sums(4)), {"data_path": str(tmp_path / "saved")}
    hf_datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(entry["data_path"])
    build_task_data([entry], [{**entry, "split": "test"}], tokenizer, 32)
    assert "so that the policy is validated" not in package_log.text
    assert "saved: the split train is read, of train, test; `split` names another" in package_log.text
    file = {"data_path": write_jsonl("a.jsonl", sums(4))}
    for both in (entry, file):
        build_task_data([both], [{**both, "split": "test"} if both is file else both], tokenizer, 32)
        said = f"reads the rows of {both['data_path']} that data.train reads, so that the policy is validated on"
        assert said in package_log.text


def test_a_pattern_that_includes_the_validation_file_is_found(write_jsonl, tokenizer, tmp_path, package_log):
    for name in ("a", "b"):
        write_jsonl(f"{name}.jsonl", sums(4))
    (tmp_path / "link").symlink_to(tmp_path)
    train, validation = str(tmp_path / "*.jsonl"), f"{tmp_path}/link/b.jsonl"
    build_task_data([{"data_path": train}], [{"data_path": validation}], tokenizer, 32)
    assert f"reads the rows of {tmp_path / 'b.jsonl'} that data.train reads" in package_log.text
    assert "a.jsonl that" not in package_log.text


def test_without_validation_there_is_none(write_jsonl, tokenizer):
    data = build_task_data([{"data_path": write_jsonl("a.jsonl", sums(2))}], [], tokenizer, 32)
    assert data.validation is None and data.val_env_names == {}


def test_no_training_data_is_an_error(tokenizer):
    with pytest.raises(DataError, match="data.train is empty"):
        build_task_data([], [], tokenizer, 32)


def test_the_tokenizer_gets_the_template_and_its_arguments(tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "1"}]
    template = "{{ messages[0].content }}{% if twice %}{{ messages[0].content }}{% endif %}"
    (tmp_path / "template.jinja").write_text(template)
    for given in (template, str(tmp_path / "template.jinja")):
        plain = load_tokenizer(str(tmp_path / "tokenizer"), given)
        assert plain.apply_chat_template(messages, tokenize=False) == "1"
        twice = load_tokenizer(str(tmp_path / "tokenizer"), given, {"twice": True})
        assert twice.apply_chat_template(messages, tokenize=False) == "11"


def test_a_tokenizer_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path / "nothing"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(DataError, match=r"it has no tokenizer.json, .* or set policy.tokenizer.name"):
        load_tokenizer(str(tmp_path / "model"), "{{ messages[0].content }}")
    make_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=r"chat_template no_such\.jinja: No such file"):
        load_tokenizer(str(tmp_path / "tokenizer"), "no_such.jinja")
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="has no chat template; set policy.tokenizer.chat_template"):
        load_tokenizer(str(tmp_path / "tokenizer"))


def rows_with(*uids: object) -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": f"{n}+1="}], "task_name": "t", "ground_truth": "2", "uid": uid}
        for n, uid in enumerate(uids)
    ]


def processed(tokenizer, rows):
    return AllTaskProcessedDataset(rows, tokenizer, TaskDataSpec("t"), math_hf_data_processor, max_seq_length=64)


def test_uids_are_text(tokenizer):
    uids = (0, 7, np.int64(8), "text", "~1", None, "", float("nan"))
    data = processed(tokenizer, rows_with(*uids))
    assert [datum["uid"] for datum in data] == ["0", "7", "8", "text", "~1", "t:5", "t:6", "t:7"]


@pytest.mark.parametrize(
    ("uid", "message"),
    [
        (1.5, "t:1: its uid must be text or a whole number, got float: 1.5"),
        (True, "must be text or a whole number, got bool"),
        ([1], "got list"),
        ({"a": 1}, "got dict"),
        ("x@2", "its uid 'x@2' ends as a prompt's does in a later epoch"),
    ],
)
def test_what_is_no_uid_is_refused_when_the_data_is_opened(tokenizer, uid, message):
    with pytest.raises(DataError, match=message):
        processed(tokenizer, rows_with("a", uid))


def test_repeated_uids_are_refused_with_their_rows(tokenizer):
    """They had ended the run with KeyError after its first step."""
    with pytest.raises(DataError, match="row 2: its uid 'a' is that of row 0; row 3: its uid '1' is that of row 1"):
        processed(tokenizer, rows_with("a", 1, "a", "1", "b"))


class Lazy(Sequence):
    """Rows that are made when they are read, so that no uid is known before."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_uids_of_large_data_are_checked_when_it_is_opened(tokenizer, monkeypatch):
    monkeypatch.setattr(task_datasets, "CHECK_AT_ONCE", 2)
    monkeypatch.setattr(task_datasets, "PROBED_ROWS", 1)
    for rows in (rows_with("a", "b", "a"), hf_datasets.Dataset.from_list(rows_with("a", "b", "a"))):
        with pytest.raises(DataError, match="row 2: its uid 'a' is that of row 0"):
            processed(tokenizer, rows)
    with pytest.raises(DataError, match="t:2: its uid 'x@1' ends as"):
        processed(tokenizer, rows_with("a", "b", "x@1"))


def test_a_wrong_uid_in_large_data_that_is_made_lazily_costs_its_row(tokenizer, monkeypatch, package_log):
    monkeypatch.setattr(task_datasets, "CHECK_AT_ONCE", 2)
    data = processed(tokenizer, Lazy(rows_with("a", "b", "a", *range(30), "x@1")))
    assert [index for index in range(len(data)) if not data.usable(index)] == [2, 33]
    assert data.excluded.reasons["its uid 'a' is that of row 0"] == 1 and data.excluded.count == 2
    assert "prompt a is excluded: its uid 'a' is that of row 0" in package_log.text


NULL = {"messages": [{"role": "user", "content": "1+1="}], "task_name": "t"}  # without an answer


def test_a_row_that_cannot_be_a_prompt_costs_itself_up_to_a_share(tokenizer, package_log):
    data = processed(tokenizer, [*rows_with(*range(99)), NULL])
    assert [index for index in range(100) if not data.usable(index)] == [99]
    reason = "neither an answer ('output') nor a 'ground_truth' to check against"
    assert data.excluded.reasons == {reason: 1}
    assert f"1 of 100 prompts excluded as {reason}: t:99" in package_log.text
    few = rows_with(*range(9))
    with pytest.raises(DataError, match=r"1 of 10 rows cannot be used, more than data.max_unusable_share.*t:9: n"):
        processed(tokenizer, [*few, NULL])
    tolerant = [*few, NULL], tokenizer, TaskDataSpec("t"), math_hf_data_processor
    assert AllTaskProcessedDataset(*tolerant, max_unusable_share=0.1).excluded.count == 1


def test_a_bad_row_of_large_data_costs_itself_and_bad_data_is_refused_at_the_start(tokenizer, monkeypatch):
    monkeypatch.setattr(task_datasets, "CHECK_AT_ONCE", 2)
    monkeypatch.setattr(task_datasets, "PROBED_ROWS", 5)
    data = processed(tokenizer, [*rows_with(*range(98)), NULL, NULL])
    loader = build_dataloader(data, 14, shuffle=True, seed=0)
    assert sum(len(batch) for batch in loader) == 98 and data.excluded.count == 2
    with pytest.raises(DataError, match="1 of 5 rows cannot be used"):
        processed(tokenizer, [NULL, *rows_with(*range(4))])
    late = processed(tokenizer, [*rows_with(*range(5)), NULL, *rows_with(*range(5, 9))])
    with pytest.raises(DataError, match="1 of 10 rows cannot be used"):
        list(build_dataloader(late, 1, shuffle=False, seed=0))


def test_a_processor_that_raises_costs_the_row(tokenizer):
    def careless(row, spec, tokenizer, max_seq_length, idx):
        return math_hf_data_processor({**row, "ground_truth": row["truth"]}, spec, tokenizer, max_seq_length, idx)

    rows = [{**row, "truth": "1"} for row in rows_with(*range(39))] + rows_with(39)
    data = AllTaskProcessedDataset(rows, tokenizer, TaskDataSpec("t"), careless)
    assert data.excluded.reasons == {"KeyError: 'truth'": 1}
    with pytest.raises(DataError, match="1 of 1 rows cannot be used.*KeyError: 'truth'") as raised:
        AllTaskProcessedDataset(rows[-1:], tokenizer, TaskDataSpec("t"), careless)
    assert isinstance(raised.value.__cause__, KeyError)

    def exits(row, spec, tokenizer, max_seq_length, idx):
        sys.exit("no key")

    with pytest.raises(DataError, match=r"rows cannot be used.*the processor called sys.exit\('no key'\) \("):
        AllTaskProcessedDataset(rows[-1:], tokenizer, TaskDataSpec("t"), exits)


def test_the_fingerprint_counts_an_unusable_row(write_jsonl, tokenizer, tmp_path):
    rows = [{"input": f"{n}+1=", "output": None if n == 0 else "1"} for n in range(40)]
    hf_datasets.Dataset.from_list([*rows[1:], rows[0]]).save_to_disk(str(tmp_path / "saved"))
    data = build_task_data([{"data_path": str(tmp_path / "saved")}], [], tokenizer, 32)
    assert data.train.excluded.reasons == {"'output' is null": 1} and len(data.train.fingerprint(40)) == 16
