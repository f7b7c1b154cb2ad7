"""Rows of files and tables, and the errors for files that cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import datasets as hf_datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_mcore.data import DataError, build_task_data, load_preference_dataset, load_response_dataset
from grpo_mcore.data.datasets import DATASET_CLASSES, PREFERENCE_CLASSES
from grpo_mcore.data.datasets.files import settings_for
from grpo_mcore.data.datasets.rows import Joined, Repeated
from grpo_mcore.data.datasets.source import open_source
from grpo_mcore.data.interfaces import TaskDataSpec
from grpo_mcore.data.processors import find_processor, math_data_processor, math_hf_data_processor, sft_processor
from grpo_mcore.recipe import DATASETS, load_recipe
from tests.unit.data.conftest import sums


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "bad", "label": False},
        {"prompt": [{"role": "user", "content": "q"}], "completion": "bad", "label": False},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bad"}], "label": False},
        {"instruction": "q", "output": "bad", "kto_tag": False},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "bad"}], "kto_tag": False},
    ],
)
def test_an_answer_that_is_marked_as_bad_is_left_out(write_jsonl, row):
    mark = "label" if "label" in row else "kto_tag"
    path = write_jsonl("kto.jsonl", [row, {**row, mark: True}])
    bad, good = load_response_dataset({"data_path": path, **settings_for(row)}).dataset
    assert bad["messages"] == [] and mark in bad["unusable"]
    assert len(good["messages"]) == 2


def test_rows_become_conversations_with_task_uid_and_other_fields(write_jsonl):
    path = write_jsonl(
        "train.jsonl",
        [{"question": "1+1=", "answer": "2", "level": 3}, "", {"question": "1+2=", "answer": 3, "ground_truth": "3.0"}],
    )
    keys = {"input_key": "question", "output_key": "answer", "task_name": "sums", "env_name": "math"}
    data = load_response_dataset({"data_path": path, **keys})
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


def test_a_question_may_be_a_conversation_and_a_ground_truth_may_replace_the_answer(write_jsonl):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    data = load_response_dataset({"data_path": write_jsonl("a.jsonl", [{"input": messages, "ground_truth": "2"}])})
    assert data.dataset[0]["messages"] == messages
    assert data.dataset[0]["ground_truth"] == "2"


def test_an_answer_that_is_no_text_is_a_ground_truth(write_jsonl):
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    path = write_jsonl("code.jsonl", [{"input": "write add", "output": tests}])
    [row] = load_response_dataset({"data_path": path}).dataset
    assert row["messages"] == [{"role": "user", "content": "write add"}] and row["ground_truth"] == tests


def test_openai_format(write_jsonl):
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    path = write_jsonl("chat.jsonl", [{"chat": messages, "rules": "add"}, {"chat": messages}])
    entry = {"dataset_name": "openai_format", "data_path": path, "chat_key": "chat", "system_key": "rules"}
    rows = load_response_dataset({**entry, "system_prompt": "sum"}).dataset
    assert rows[0]["messages"] == [{"role": "system", "content": "add"}, *messages]
    assert rows[1]["messages"] == [{"role": "system", "content": "sum"}, *messages]
    assert "chat" not in rows[0]


ONE = [{"role": "user", "content": "1"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def test_openai_format_with_tools(write_jsonl):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1="}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "2"},
    ]
    path = write_jsonl("chat.jsonl", [{"messages": messages, "tools": tools} for tools in (TOOLS, json.dumps(TOOLS))])
    entry = {"dataset_name": "openai_format", "data_path": path, "use_preserving_dataset": True}
    for row in load_response_dataset(entry).dataset:
        assert row["tools"] == TOOLS
        assert row["messages"][0] == {"role": "user", "content": "1+1="}
        call = row["messages"][1]
        assert (call["content"], call["tool_calls"][0]["function"]["arguments"]) == ("", {"a": 1, "b": None})
        assert row["messages"][2:] == messages[2:]


def test_roles_and_tools_of_published_conversations(write_jsonl):
    """LLaMA-Factory's, glaive's and Gemini's roles, a system prompt and tools in fields of their own."""
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    turns = [("human", "1+1="), ("function-call", call), ("observation", "2"), ("gpt", "2"), ("model", "3")]
    said = [{"from": role, "value": text} for role, text in turns]
    row = {"conversations": said, "system": "add", "tools": [{"name": "add", "parameters": {}}]}
    path = write_jsonl("chat.jsonl", [row, {"conversations": [{"role": "developer", "content": "sum"}, *said[:1]]}])
    entry = {"dataset_name": "openai_format", "data_path": path, "chat_key": "conversations"}
    first, second = load_response_dataset(entry).dataset
    assert [
        message["role"] for message in first["messages"]
    ] == "system user assistant tool assistant assistant".split()
    assert first["messages"][2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    assert first["tools"] == [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert second["messages"][0] == {"role": "system", "content": "sum"}
    results = [{"temp": 3}, [{"temp": 3}], 5, "5", [{"type": "text", "text": "5"}]]
    said = [{"role": "User", "content": "1"}, *({"role": "tool", "content": result} for result in results)]
    (row,) = load_response_dataset(
        {"dataset_name": "openai_format", "data_path": write_jsonl("b.jsonl", [{"messages": said}])}
    ).dataset
    assert [message["content"] for message in row["messages"]] == ["1", '{"temp": 3}', '[{"temp": 3}]', "5", "5", "5"]
    assert row["messages"][0]["role"] == "user"


def test_a_prompt_may_be_text_in_the_form_of_hh_rlhf(write_jsonl):
    """As in Dahoas/full-hh-rlhf; its marks had been asked as a part of the question."""
    row = {
        "prompt": "\n\nHuman: 1+1=\n\nAssistant: 3\n\nHuman: Sure?\n\nAssistant:",
        "chosen": " No, 2",
        "rejected": " Yes",
    }
    path = write_jsonl("a.jsonl", [row])
    (pair,) = load_preference_dataset({"dataset_name": "BinaryPreferenceDataset", "data_path": path}).dataset
    asked = [
        {"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "3"), ("user", "Sure?"))
    ]
    assert pair["messages"] == asked and pair["chosen"] == [{"role": "assistant", "content": " No, 2"}]
    keys = {"input_key": "prompt", "output_key": "chosen"}
    (prompt,) = load_response_dataset({"data_path": path, **keys}).dataset
    assert prompt["messages"] == [*asked, {"role": "assistant", "content": " No, 2"}]


def test_a_hint_may_lie_in_a_record(write_jsonl):
    """As the solution does in verl's rows of GSM8K."""
    path = write_jsonl("a.jsonl", [{"input": "1+1=", "output": "2", "extra_info": {"answer": "One more than 1"}}])
    (row,) = load_response_dataset({"data_path": path, "hint_key": "extra_info.answer"}).dataset
    assert row["extra_info.answer"] == "One more than 1"


@pytest.mark.parametrize("text", [None, "I add."])
def test_calls_and_tools_in_openais_older_form(write_jsonl, text):
    """A call beside a text had been left out."""
    function = {"name": "add", "parameters": {}}
    asked = {"role": "assistant", "content": text, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    said = [{"role": "user", "content": "1+1="}, asked, {"role": "function", "name": "add", "content": "2"}]
    path = write_jsonl("chat.jsonl", [{"messages": said, "functions": [function]}])
    (row,) = load_response_dataset({"dataset_name": "openai_format", "data_path": path}).dataset
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert row["messages"][1] == {"role": "assistant", "content": text or "", "tool_calls": [call]}
    assert row["messages"][2]["role"] == "tool"
    assert row["tools"] == [{"type": "function", "function": function}]


def test_earlier_turns_beside_a_question(write_jsonl):
    """LLaMA-Factory's and ms-swift's `history`, which had been left out."""
    rows = [
        {"instruction": "and 3?", "input": "", "output": "three", "system": "add", "history": [["1+1?", "two"]]},
        {"instruction": "1+1?", "output": "two", "history": []},
        {"instruction": "1+1?", "output": "two", "history": ["of mathematics"]},
    ]
    path = write_jsonl("a.jsonl", rows)
    first, *others = load_response_dataset({"data_path": path, "input_key": "instruction"}).dataset
    assert [message["content"] for message in first["messages"]] == ["add", "1+1?", "two", "and 3?", "three"]
    assert [message["role"] for message in first["messages"]] == "system user assistant user assistant".split()
    assert all(len(row["messages"]) == 2 for row in others)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"input": 7}, "Add.\n\n7"),
        ({"input": 7.5}, "Add.\n\n7.5"),
        ({"input": {"a": 7}}, "'input' must be text, got an object"),
        ({"input": True}, "'input' must be text, got true or false"),
        ({"system": [{"type": "text", "text": "Be brief."}]}, "Be brief.|Add."),
        ({"system": {"text": "Be brief."}}, "'system': the content must be text or a list of parts, got an object"),
        ({"system_prompt": 5}, "'system_prompt': the content must be text or a list of parts, got a number"),
        ({"history": [["1+1?", None]]}, r"turn 0 of 'history' must be a question and its answer, both text, got \['1"),
        ({"history": [["1+1?", "2"], "3"]}, "turn 1 of 'history' must be a question"),
        ({"history": [{"role": "user", "content": "1+1?"}]}, "1+1?|Add."),
        ({"history": [{"role": "user", "content": None}]}, "message 0 of 'history' has no content"),
        ({"history": None, "input": None, "system": " "}, "Add."),
    ],
)
def test_no_part_of_a_question_vanishes(write_jsonl, fields, shown):
    entry = {"data_path": write_jsonl("a.jsonl", [{"instruction": "Add.", "output": "2", **fields}])}
    try:
        (row,) = load_response_dataset({**entry, "input_key": "instruction"}).dataset
    except DataError as error:
        assert re.search(shown, str(error))
    else:
        assert "|".join(message["content"] for message in row["messages"]) == f"{shown}|2"


def test_tools_of_a_table_lose_the_null_fields_of_other_rows(tmp_path):
    def tool(name, **properties):
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

    rows = [
        {"messages": sums_chat, "tools": [tool(name, **{name: {"type": "integer"}})]}
        for name in ("a", "b")
        for sums_chat in [[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]]
    ]
    path = str(tmp_path / "chat.parquet")
    hf_datasets.Dataset.from_list(rows).to_parquet(path)
    entry = {"dataset_name": "openai_format", "data_path": path, "download_dir": str(tmp_path / "cache")}
    assert [row["tools"] for row in load_response_dataset(entry).dataset] == [row["tools"] for row in rows]


@pytest.mark.parametrize(("size", "held_out"), [(0.05, 2), (0.5, 20), (7, 7), (1, 1)])
def test_the_split_is_disjoint_complete_in_order_and_has_the_requested_size(write_jsonl, size, held_out):
    path = write_jsonl("train.jsonl", sums(40))
    data = load_response_dataset({"data_path": path, "split_validation_size": size, "seed": 3})
    train, val = [[row["uid"] for row in part] for part in (data.dataset, data.val_dataset)]
    everything = [row["uid"] for row in load_response_dataset({"data_path": path}).dataset]
    assert len(val) == held_out
    assert sorted(train + val) == sorted(everything)
    assert train == [uid for uid in everything if uid not in set(val)]


def test_rows_of_one_prompt_are_split_together(write_jsonl, package_log):
    rows = [{"input": f"{number % 10} + 1 =", "output": str(number)} for number in range(40)]
    data = load_response_dataset({"data_path": write_jsonl("train.jsonl", rows), "split_validation_size": 4, "seed": 3})
    train, val = ({row["messages"][0]["content"] for row in part} for part in (data.dataset, data.val_dataset))
    assert not train & val and len(data.val_dataset) == 4 * len(val) and len(data.dataset) + len(data.val_dataset) == 40
    assert f"{len(data.val_dataset) - 4} more rows are held out" in package_log.text
    same = write_jsonl("same.jsonl", [{"input": "1 + 1 =", "output": "2"}] * 4)
    data = load_response_dataset({"data_path": same, "split_validation_size": 1})
    assert (len(data.dataset), len(data.val_dataset)) == (3, 1)
    assert "every row has one of the prompts that it takes" in package_log.text


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


def test_joined_concatenates_all_parts():
    parts = [[{"n": 0}], [{"n": 1}, {"n": 2}], [{"n": 3}]]
    joined = Joined(parts)
    assert [row["n"] for row in joined] == [0, 1, 2, 3] and len(joined) == 4
    assert joined[-1] == {"n": 3}
    assert [row["uid"] for row in Repeated([{"uid": "a"}], 2)] == ["a", "a~1"]


def test_in_turn_shares_the_first_rows_evenly():
    rows = Joined([[{"n": 0}], [{"n": 1}, {"n": 2}, {"n": 3}], [{"n": 4}, {"n": 5}]], in_turn=True)
    assert [row["n"] for row in rows] == [0, 1, 4, 2, 5, 3] and len(rows) == 6


def test_numbers_of_single_precision_are_those_that_were_written(tmp_path: Path) -> None:
    """0.1 of float32 is 0.10000000149011612 as a Python number, which no answer equals."""
    single, half, double = pa.float32(), pa.float16(), pa.float64()
    columns = {
        "truth": pa.array([0.1, None], single),
        "reward_model": pa.array(
            [{"ground_truth": 1234.56, "other": 0.1}] * 2, pa.struct({"ground_truth": single, "other": double})
        ),
        "answers": pa.array([[0.3], []], pa.list_(single)),
        "steps": pa.array([[{"x": 0.7}], []], pa.list_(pa.struct({"x": single}))),
        "half": pa.array(np.array([0.1, 2.5], np.float16), half),
        "double": pa.array([0.1 + 0.2, 1e300], double),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    first, second = open_source(str(tmp_path / "rows.parquet")).rows
    assert first == {
        "truth": 0.1, "reward_model": {"ground_truth": 1234.56, "other": 0.1}, "answers": [0.3], "steps": [{"x": 0.7}],
        "half": 0.1, "double": 0.1 + 0.2,
    }  # fmt: skip
    assert second["truth"] is None and second["double"] == 1e300


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


def test_a_null_in_a_table_names_the_row(tmp_path):
    rows = [{"input": "1", "output": "2", "ground_truth": None}, {"input": None, "output": "2", "ground_truth": "3"}]
    hf_datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    data = load_response_dataset({"data_path": str(tmp_path / "saved"), "task_name": "t"})
    assert data.dataset[0]["messages"][1]["content"] == "2"
    with pytest.raises(DataError, match="saved, row 1: 'input' is null"):
        data.dataset[1]


def test_an_unknown_split_names_the_known_ones(tmp_path):
    tables = hf_datasets.DatasetDict({name: hf_datasets.Dataset.from_list(sums(2)) for name in ("train", "test")})
    tables.save_to_disk(str(tmp_path / "saved"))
    path = str(tmp_path / "saved")
    assert len(load_response_dataset({"data_path": path, "split": "test"}).dataset) == 2
    part = load_response_dataset({"data_path": path, "split": "train[1:]+test[:1]"}).dataset
    assert [row["messages"][0]["content"] for row in part] == ["1+1=", "0+1="]
    with pytest.raises(DataError, match=r"no split 'tests'; set split to one of \['test', 'train'\]; nearest: test"):
        load_response_dataset({"data_path": path, "split": "tests"})


def test_a_file_is_its_own_split(tmp_path):
    path = str(tmp_path / "rows.parquet")
    hf_datasets.Dataset.from_list(sums(3)).to_parquet(path)
    entry = {"data_path": path, "download_dir": str(tmp_path / "cache")}
    assert len(load_response_dataset({**entry, "split": "test"}).dataset) == 3
    assert len(load_response_dataset({**entry, "split": "train[:2]"}).dataset) == 2
    hf_datasets.Dataset.from_list(sums(3)).save_to_disk(str(tmp_path / "saved"))
    for split, count in (("test", 3), ("train[:2]", 2), ("test[:34%]", 1)):
        assert len(load_response_dataset({"data_path": str(tmp_path / "saved"), "split": split}).dataset) == count


CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]


REFUSED: dict[str, list[tuple[bytes | str, str]]] = {  # lines of a.jsonl, and what is said of them
    "dataset_name=ResponseDataset": [
        ('{"input": "1", "output": "2"}\n\n{bad', r":3: not JSON \(Expecting property name.*column 2"),
        ('{"output": "1"}\n{"output": "2"}', r":1: no 'input' in it; it has \['output'\]"),
        ('{"input": "1"}', r":1: no 'output' in it; it has \['input'\]"),
        ('{"input": null, "output": "2"}', ":1: 'input' is null"),
        ('{"input": 5, "output": "2"}', ":1: 'input' must be text or a list of messages, got a number"),
        ("[1, 2]", ":1: expected a JSON object, got list; one JSON object a line"),
        ("", ": the dataset is empty"),
        ("\n  ", ": the dataset is empty"),
        (b'{"input": "\xff\xfe"}\n', r":1: not UTF-8 text \(invalid start byte, byte 11\)"),
    ],
    "input_key=messages output_key=answer": [
        (json.dumps({"messages": CHAT, "answer": "2"}),
         ":1: 'messages' ends with an answer of the assistant.*chat_key: messages"),
    ],
    "dataset_name=openai_format": [
        ('{"messages": "hello"}', ":1: 'messages' must be a list of messages, got text"),
        ('{"messages": [{"role": "user"}]}', ":1: message 0 of 'messages' has no content"),
        ('{"messages": [{"from": "function_call", "value": "f()"}]}', ':1: .*the call" is text that is not JSON'),
        (json.dumps({"messages": ONE, "images": ["a.png"]}), ":1: no file a.png for an image"),
        (json.dumps({"messages": ONE, "tools": "{"}), ":1: 'tools' is text that is not JSON"),
        (json.dumps({"messages": ONE, "tools": [1]}), ":1: 'tools' must be a list of tools, got a list with a number"),
        (json.dumps({"message": ONE}), ":1: no 'messages' in it; .*; nearest: 'message'"),
    ],
    "dataset_name=NemoGymDataset": [
        ('{"input": "q"}', ":1: .*responses_create_params"),
        ('{"responses_create_params": "q"}', ":1: 'responses_create_params' must be an object, got text"),
        ('{"responses_create_params": {"input": 3}}', ":1: 'responses_create_params': Expected `array`, got `int`"),
        ('{"responses_create_params": {"input": [{"type": "web_search"}]}}', ":1: .*an item of type 'web_search'"),
    ],
    "dataset_name=PreferenceDataset": [
        (json.dumps({"prompt": "2+2=", "chosen": CHAT, "rejected": CHAT}), ":1: .*begin with another prompt than 'pro"),
        (json.dumps({"chosen": ONE, "rejected": CHAT}), ":1: .*or conversations that begin alike"),
        ('{"chosen": "Human: 1+1= Assistant: 2", "rejected": "3"}',
         r":1: no 'prompt' in it; it has \['chosen', 'rejected'\]$"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "text", "message"), [(entry, *row) for entry, rows in REFUSED.items() for row in rows]
)
def test_a_bad_file_names_its_line(tmp_path, entry, text, message):
    (tmp_path / "a.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    keys = dict(pair.split("=") for pair in entry.split())
    load = load_preference_dataset if "Preference" in entry else load_response_dataset
    with pytest.raises(DataError, match=rf"a\.jsonl{message}"):
        load({**keys, "data_path": str(tmp_path / "a.jsonl")})


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"messages": CHAT}, "dataset_name: openai_format"),
        ({"conversations": CHAT}, "dataset_name: openai_format, chat_key: conversations"),
        ({"conversations": SHAREGPT}, "dataset_name: openai_format, chat_key: conversations"),
        ({"responses_create_params": {"input": "1+1="}}, "dataset_name: NemoGymDataset"),
        ({"question": "1+1=", "answer": "2"}, "dataset_name: ResponseDataset, input_key: question, output_key: answer"),
        ({"input": "1+1=", "label": "2"}, "dataset_name: ResponseDataset, output_key: label"),
        (
            {"prompt": CHAT[:1], "completion": CHAT[1:]},
            "dataset_name: ResponseDataset, input_key: prompt, output_key: completion",
        ),
        ({"instruction": "1+1=", "input": "", "output": "2"}, "dataset_name: ResponseDataset, input_key: instruction"),
        (
            {"prompt": "1+1=", "verification_info": '{"ground_truth": "2"}'},
            "dataset_name: ResponseDataset, input_key: prompt, output_key: verification_info.ground_truth",
        ),
        (
            {"prompt": CHAT[:1], "reward_model": {"style": "rule", "ground_truth": "2"}},
            "dataset_name: ResponseDataset, input_key: prompt, output_key: reward_model.ground_truth",
        ),
    ],
)
def test_rows_of_another_layout_say_how_they_are_read(write_jsonl, row, key):
    path = write_jsonl("a.jsonl", [json.dumps(row)])
    entry = {"data_path": path, "chat_key": "chat"}
    for name in ("ResponseDataset", "openai_format", "NemoGymDataset"):
        if name not in key or "chat_key" in key or ("_key" in key and row.get("input") != ""):
            with pytest.raises(DataError, match=rf"no '.*' in it; it has .*\. Read it with {key}$"):
                load_response_dataset({**entry, "dataset_name": name})
    read = load_response_dataset({"data_path": path, **dict(pair.split(": ") for pair in key.split(", "))})
    assert read.dataset[0]["messages"] == CHAT[: 1 if "Gym" in key else 2]


def test_pairs_say_who_reads_them(write_jsonl):
    path = write_jsonl("a.jsonl", ['{"question": "1+1=", "chosen": "2", "rejected": "3"}'])
    keys = "Read it with dataset_name: BinaryPreferenceDataset, prompt_key: question; pairs of answers are for"
    for load in (load_response_dataset, load_preference_dataset):
        with pytest.raises(DataError, match=keys):
            load({"data_path": path})
    assert load_preference_dataset({"data_path": path, "prompt_key": "question"}).dataset[0]["messages"] == CHAT[:1]


@pytest.mark.parametrize("prompt", [None, "1+1=", CHAT[:1]])
def test_pairs_of_whole_conversations_have_their_common_start_as_prompt(write_jsonl, prompt):
    """Otherwise the question would stand in the text twice."""
    before = [{"role": "system", "content": "add"}]
    row = {"prompt": prompt, "chosen": [*before, *CHAT], "rejected": [*before, CHAT[0], {**CHAT[1], "content": "3"}]}
    path = write_jsonl("a.jsonl", [json.dumps({key: value for key, value in row.items() if value})])
    (read,) = load_preference_dataset({"data_path": path}).dataset
    assert read["messages"] == [*before, CHAT[0]]
    assert (read["chosen"], read["rejected"]) == (CHAT[1:], [{**CHAT[1], "content": "3"}])


def test_prompts_alone_are_for_rewards_that_need_no_answer(write_jsonl):
    path = write_jsonl("a.jsonl", ['{"prompt": "1+1="}'])
    keys = {"data_path": path, "input_key": "prompt"}
    with pytest.raises(DataError, match="no 'output' in it.* for rewards that need none: processor: chat_data_process"):
        load_response_dataset(keys)
    for processor in ("chat_data_processor", "grpo_mcore.data.processors:chat_data_processor"):
        assert load_response_dataset({**keys, "processor": processor}).dataset[0]["messages"] == CHAT[:1]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"data_path": "no/such/train.jsonl"}, "data file not found: no/such/train.jsonl"),
        ({"data_path": "./no_such_folder"}, r"data not found: \./no_such_folder"),
        ({}, "data_path is missing"),
        ({"dataset_name": "DeepScale"}, "dataset_name 'DeepScale' is not known; nearest: DeepScaler; known are "),
        ({"dataset_name": "BinaryPreferenceDataset"}, "pairs of answers are for DPO and Bradley-Terry reward models"),
        ({"input_key": "inputs"}, r"a\.jsonl:1: no 'inputs' in it; it has \['input', 'output'\]; nearest: 'input'"),
        ({"split": "train[:0]"}, r"a\.jsonl:1: the part of the split has no row"),
        ({"dataset_name": "no_such.module:Data"}, "cannot import the dataset_name 'no_such.module:Data'"),
        ({"processor": "math"}, r"unknown processor 'math': known are \['chat_data_processor', 'default', "),
        ({"split_validation_size": 0.01}, "split_validation_size 0.01 takes 0 of 4 rows"),
        ({"split_validation_size": 4}, "split_validation_size 4 takes 4 of 4 rows"),
        ({"prompt_file": "no_such.txt"}, "prompt_file no_such.txt: No such file"),
    ],
)
def test_a_wrong_entry_names_the_key(write_jsonl, entry, message):
    path = {"data_path": write_jsonl("a.jsonl", sums(4))} if entry and "data_path" not in entry else {}
    with pytest.raises(DataError, match=message):
        load_response_dataset({**path, **entry})


class OwnDataset:
    """A dataset class that a recipe names by import path; it gets the entry."""

    def __init__(self, entry):
        self.dataset = [{"messages": [{"role": "user", "content": entry["data_path"]}], "task_name": "own"}]
        self.val_dataset, self.task_name, self.env_name = None, "own", "math"
        self.task_spec, self.processor = TaskDataSpec("own"), math_hf_data_processor


def test_a_dataset_class_by_import_path():
    data = load_response_dataset({"dataset_name": f"{__name__}:OwnDataset", "data_path": "x"})
    assert data.dataset[0]["messages"][0]["content"] == "x"


@pytest.mark.parametrize("entry", [{"prompt_key": "p"}, {"prompt_key": "chat"}])
def test_pairs_of_answers(write_jsonl, entry):
    question = [{"role": "user", "content": "1+1="}]
    row = {"p": "1+1=", "chat": question, "good": "2", "bad": [{"role": "assistant", "content": "3"}], "level": 1}
    path = write_jsonl("pairs.jsonl", [row])
    keys = {"data_path": path, "chosen_key": "good", "rejected_key": "bad", "task_name": "t"}
    [found] = load_preference_dataset({**keys, **entry}).dataset
    assert found["messages"] == question and (found["task_name"], found["uid"], found["level"]) == ("t", "t:1", 1)
    assert found["chosen"] == [{"role": "assistant", "content": "2"}]
    assert found["rejected"] == [{"role": "assistant", "content": "3"}]
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: no 'chosen' in it; it has"):
        load_preference_dataset({"data_path": path, "prompt_key": "p"})
    with pytest.raises(
        DataError, match="'GSM8K' has no pairs of answers; BinaryPreferenceDataset, HelpSteer3, Tulu3Preference have"
    ):
        load_preference_dataset({"dataset_name": "GSM8K"})


@pytest.mark.parametrize("name", ["PreferenceDataset", "BinaryPreferenceDataset"])
def test_pairs_of_ranked_completions(write_jsonl, name):
    """NeMo RL's form."""
    answers = [[{"role": "assistant", "content": text}] for text in "342"]
    ranked = [{"rank": rank, "completion": answer} for rank, answer in zip((2, 1, 0), answers, strict=True)]
    path = write_jsonl("a.jsonl", [{"context": CHAT[:1], "completions": ranked, "level": 1}])
    (row,) = load_preference_dataset({"dataset_name": name, "data_path": path}).dataset
    assert (row["messages"], row["chosen"], row["rejected"]) == (CHAT[:1], answers[2], answers[0])
    assert row["level"] == 1 and not {"context", "completions"} & set(row)
    tied = write_jsonl("b.jsonl", [{"context": CHAT[:1], "completions": [{**one, "rank": 0} for one in ranked]}])
    with pytest.raises(DataError, match="'completions' has no better and worse answer: all have the rank 0"):
        load_preference_dataset({"dataset_name": name, "data_path": tied})
    with pytest.raises(DataError, match="Read it with dataset_name: BinaryPreferenceDataset"):
        load_response_dataset({"data_path": path})


@pytest.mark.parametrize(
    "worse",
    [
        {"rejected_response": "3"},
        {"rejected_response": [{"role": "assistant", "content": "3"}]},
        {"rejected_messages": [*CHAT[:1], {"role": "assistant", "content": "3"}]},
    ],
)
def test_pairs_of_a_conversation_and_its_rejected_answer(write_jsonl, worse):
    """ms-swift's form."""
    path = write_jsonl("a.jsonl", [{"messages": CHAT, "system": "Count.", "level": 1} | worse])
    (row,) = load_preference_dataset({"dataset_name": "BinaryPreferenceDataset", "data_path": path}).dataset
    assert row["messages"] == [{"role": "system", "content": "Count."}, *CHAT[:1]]
    assert (row["chosen"], row["rejected"]) == (CHAT[1:], [{"role": "assistant", "content": "3"}])
    assert row["level"] == 1 and not set(worse) & set(row)
    assert settings_for({"messages": CHAT} | worse) == {"dataset_name": "BinaryPreferenceDataset"}


@pytest.mark.parametrize("processor", ["preference_processor", "reward_model_processor"])
def test_a_pair_of_equal_answers_is_left_out(write_jsonl, tokenizer, processor):
    rows = [{"prompt": f"{n}+1=", "chosen": "2", "rejected": str(n)} for n in range(4)]
    entry = {"dataset_name": "BinaryPreferenceDataset", "data_path": write_jsonl("a.jsonl", rows)}
    data = build_task_data([entry], [], tokenizer, 32, processor, load=load_preference_dataset).train
    assert [data.usable(index) for index in range(4)] == [True, True, False, True]
    assert data.excluded.reasons == {"chosen and rejected are the same": 1}


def test_each_name_of_a_recipe_has_a_class() -> None:
    assert {*DATASET_CLASSES, *PREFERENCE_CLASSES, "SlidingPuzzle"} == set(DATASETS)


def test_datasets_of_the_projects_recipes_are_known() -> None:
    for file in Path(__file__).resolve().parents[3].glob("recipes/*.yaml"):
        config = load_recipe(str(file)).config
        for entry in [*config.data.train, *config.data.validation]:
            assert entry.dataset_name in DATASET_CLASSES or load_response_dataset(entry).dataset, file


def test_tasks_of_nemo_gym_stay_unchanged(write_jsonl):
    tool = {"type": "function", "name": "look", "parameters": {}, "strict": True}
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
    ]
    params = {"input": items, "tools": [tool], "metadata": None}
    rows = [
        {"responses_create_params": params, "agent_ref": {"name": "a"}, "expected_answer": 4},
        {"responses_create_params": {"input": "plain", "instructions": "rules"}},
        {"responses_create_params": {"input": None}},
    ]
    path = write_jsonl("tasks.jsonl", rows)
    data = load_response_dataset({"dataset_name": "nemo_gym", "data_path": path})
    first, second, third = data.dataset
    assert first["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    assert first["tools"][0]["function"]["name"] == "look" and first["agent_task"] == rows[0]
    assert [message["content"] for message in second["messages"]] == ["rules", "plain"]
    assert third["messages"] == [] and third["agent_task"] == rows[2]
    assert data.processor is find_processor("nemo_gym_data_processor")
