"""Published datasets by name, on rows of their published schemas, served by a fake hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import datasets as hf
import pyarrow
import pyarrow.parquet
import pytest

from grpo_mcore.data import AllTaskProcessedDataset, DataError, load_preference_dataset, load_response_dataset
from grpo_mcore.data.datasets import source
from grpo_mcore.data.datasets.published import PUBLISHED, TULU3_PAIRS
from grpo_mcore.environments.code.tests import read_tests
from grpo_mcore.environments.rules.instructions import followed
from grpo_mcore.recipe import IMAGE_DATASETS, DatasetEntry, dataset_by_name

LOAD_DATASET = hf.load_dataset

OPEN_MATH = {"problem": "What is 2+3?", "generated_solution": "2+3 is \\boxed{5}.", "expected_answer": "5"}
OPEN_MATH |= {"problem_source": "augmented_gsm8k"}
DEEP_SCALER = [
    {"problem": "Solve x+1=3.", "answer": "2", "solution": "Take 1 away: $\\boxed{2}$."},
    {"problem": "Prove it.", "answer": "", "solution": ""},
]
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve it.\n\nIn triangle ABC ...\n\nAnswer:", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
AIME_2024 = {
    "id": 60, "problem": "Every morning Aya goes for a walk ...", "solution": "nine kilometres ... 204",
    "answer": "204", "url": "https://example.org/AIME_I_Problem_1", "year": "2024",
}  # fmt: skip
AIME_2025 = {"question": "Find the sum of all integer bases ...", "answer": "70"}
GSM8K = {
    "question": "Ann saved 1,000 dollars, then 200 more. How much is it?",
    "answer": "She has 1000+200=<<1000+200=1200>>1200 dollars.\n#### 1,200",
}
NUMINA = [
    {
        "problem": "Find x.", "solution": "x is 7.", "answer": answer, "problem_type": "Algebra",
        "question_type": "math-word-problem", "problem_is_valid": "Yes", "solution_is_valid": "Yes",
        "source": "olympiads", "synthetic": False,
    }
    for answer in ("7", "proof", "notfound", None)
]  # fmt: skip
NUMINA += [
    NUMINA[0] | change
    for change in ({"problem_is_valid": "Incomplete"}, {"solution_is_valid": "No"}, {"question_type": "proof"})
]
FLAGS = ("problem_is_valid is 'Incomplete'", "solution_is_valid is 'No'")
SQUAD = {
    "id": "5733be284776f41900661182",
    "title": "Notre_Dame",
    "context": "The grotto is at Lourdes.",
    "question": "Where is it?",
    "answers": {"text": ["Lourdes", "at Lourdes"], "answer_start": [17, 14]},
}
TULU = [
    {
        "id": "oasst1_1",
        "messages": [{"content": "hi", "role": "user"}, {"content": "hello", "role": "assistant"}],
        "source": "ai2-adapt-dev/oasst1_converted",
    },
    {"id": "x_2", "messages": [{"content": "hi", "role": "user"}], "source": "x"},
]
TALK = [{"content": text, "role": role} for text, role in (("hi ", "user"), ("yes?", "assistant"), ("so", "user"))]
TULU_PAIRS = [
    {
        "id": "x_1",
        "prompt": "hi",  # the first question, with a space that the messages may lack
        "chosen": [*TALK, {"content": "good", "role": "assistant"}],
        "rejected": [*TALK, {"content": "bad", "role": "assistant"}],
        "source": "x",
    }
]
HELPSTEER3 = [
    {
        "domain": "general", "language": "english",
        "context": [{"role": role, "content": text} for role, text in
                    (("user", "1+1?"), ("assistant", "2"), ("user", "sure?"))],
        "response1": "first", "response2": "second", "overall_preference": preference,
        "individual_preference": [{"score": preference, "reasoning": "r", "feedback1": "a", "feedback2": "b"}],
    }
    for preference in (-2, 0, 3)
]  # fmt: skip
# (message, its parent, role): a tree with a deleted answer and an unanswered question.
TREE = [
    ("q", None, "prompter", False),
    ("a1", "q", "assistant", False),
    ("a2", "q", "assistant", False),
    ("gone", "q", "assistant", True),
    ("q2", "a1", "prompter", False),
    ("a3", "q2", "assistant", False),
    ("q3", "a1", "prompter", False),
]
OASST = [
    {
        "message_id": name, "parent_id": parent, "user_id": "u", "created_date": "2023-02-05",
        "text": f"text of {name}", "role": role, "lang": "en", "review_count": 3, "review_result": True,
        "deleted": deleted, "rank": None, "synthetic": False, "model_name": None, "detoxify": {"toxicity": 0.1},
        "message_tree_id": "q", "tree_state": "ready_for_export", "emojis": {"name": ["+1"], "count": [1]},
        "labels": {"name": ["spam"], "value": [0.0], "count": [3]},
    }
    for name, parent, role, deleted in TREE
]  # fmt: skip

GPQA = {"Question": "Which? ", "Correct Answer": "this", "Incorrect Answer 1": "that"} | {
    f"Incorrect Answer {number}": f"no {number}" for number in (2, 3)
}
MMLU_PRO = {"question": "Pick.", "options": ["w", "x", "y"], "answer": "C", "answer_index": 2, "category": "law"}
MATH_500 = {"problem": "1+1", "solution": "It is $2$.", "answer": "2", "subject": "Algebra", "level": 1}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def one():\n",
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
    "entry_point": "one",
}
MBPP = {
    "task_id": 11, "text": "Write one.", "code": "def one(): return 1", "test_list": ["assert one() == 1"],
    "test_setup_code": "", "challenge_test_list": [],
}  # fmt: skip
IFEVAL = {
    "key": 1,
    "prompt": "Say it without commas.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None, "relation": None}, {"num_words": 3, "relation": "at least"}],
}

# The contents of the hub: (path, subset) -> {split: rows}.
HUB: dict[tuple[str, str | None], dict[str, list[dict[str, Any]]]] = {
    ("nvidia/OpenMathInstruct-2", None): {
        "train": [OPEN_MATH] * 3,
        "train_1M": [OPEN_MATH],
        "train_2M": [OPEN_MATH] * 2,
    },
    ("agentica-org/DeepScaleR-Preview-Dataset", None): {"train": DEEP_SCALER},
    ("BytedTsinghua-SIA/DAPO-Math-17k", None): {"train": [DAPO]},
    ("BytedTsinghua-SIA/AIME-2024", None): {"train": [{**DAPO, "data_source": "aime"}]},
    ("HuggingFaceH4/aime_2024", None): {"train": [AIME_2024]},
    ("opencompass/AIME2025", "AIME2025-I"): {"test": [AIME_2025]},
    ("opencompass/AIME2025", "AIME2025-II"): {"test": [{**AIME_2025, "answer": "468"}, {**AIME_2025, "answer": "49"}]},
    ("openai/gsm8k", "main"): {"train": [GSM8K] * 20, "test": [GSM8K]},
    **{(f"MathArena/hmmt_{month}", None): {"train": [AIME_2024]} for month in ("feb_2025", "nov_2025", "feb_2026")},
    ("HuggingFaceH4/MATH-500", None): {"test": [MATH_500]},
    ("Idavidrein/gpqa", "gpqa_diamond"): {"train": [GPQA]},
    ("TIGER-Lab/MMLU-Pro", None): {"test": [MMLU_PRO], "validation": [MMLU_PRO]},
    ("openai/openai_humaneval", None): {"test": [HUMAN_EVAL]},
    ("google-research-datasets/mbpp", "full"): {"train": [MBPP], "test": [MBPP]},
    ("google/IFEval", None): {"train": [IFEVAL]},
    ("AI-MO/NuminaMath-1.5", None): {"train": NUMINA},
    ("rajpurkar/squad", None): {"train": [SQUAD], "validation": [SQUAD]},
    ("OpenAssistant/oasst1", None): {"train": OASST, "validation": OASST},
    ("allenai/tulu-3-sft-mixture", None): {"train": TULU},
    ("nvidia/HelpSteer3", "preference"): {"train": HELPSTEER3, "validation": HELPSTEER3},
    ("allenai/llama-3.1-tulu-3-8b-preference-mixture", None): {"train": TULU_PAIRS},
}


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, subset: str | None = None, **_: Any) -> hf.DatasetDict:
        if (path, subset) not in HUB:
            raise ValueError(f"BuilderConfig {subset!r} not found.")
        return hf.DatasetDict({split: hf.Dataset.from_list(rows) for split, rows in HUB[path, subset].items()})

    monkeypatch.setattr(hf, "load_dataset", load_dataset)
    monkeypatch.setattr(hf, "load_dataset_builder", lambda *_, **__: SimpleNamespace(config=None))  # no text files


def rows_of(name: str, **entry: Any) -> list[dict[str, Any]]:
    data = load_response_dataset(DatasetEntry(dataset_name=name, **entry))
    assert data.val_dataset is None
    return list(data.dataset)


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row["messages"]]


def test_the_fake_hub_has_every_dataset() -> None:
    texts = [found for name, found in PUBLISHED.items() if name not in IMAGE_DATASETS]  # these: test_vision.py
    hub = [found for found in (*texts, TULU3_PAIRS) if "://" not in found.path]
    assert {(found.path, subset) for found in hub for subset in found.subsets} == set(HUB)


def test_a_dataset_that_is_a_file_on_the_net(monkeypatch, tmp_path) -> None:
    """MATH and MMLU are read from addresses; a subset of MMLU is a language."""
    tables = {"math_test.csv": "Question,Answer\n1+1?,2\n"}
    tables["mmlu_ZH-CN.csv"] = "Question,A,B,C,D,Answer,Subject\nPick.,w,x,y,z,C,law\n"
    asked = []

    def download(address: str, folder: str | None) -> str:
        file = tmp_path / (name := address.rpartition("/")[2])
        file.write_text(tables[name])
        asked.append(address)
        return str(file)

    monkeypatch.setattr(source, "_fetched", download)
    monkeypatch.setattr(hf, "load_dataset", LOAD_DATASET)
    [problem] = rows_of("math")
    assert said(problem)[0] == ("user", "1+1?") and problem["ground_truth"] == "2"
    [choice] = rows_of("MMLU", subset="ZH-CN")
    assert said(choice)[0] == ("user", "Pick.\n\nA) w\nB) x\nC) y\nD) z")
    assert (choice["ground_truth"], choice["subject"]) == ("C", "law")
    assert asked[1].startswith("https://") and asked[1].endswith("/simple-evals/mmlu_ZH-CN.csv")


def test_a_file_on_the_net_is_downloaded_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hf.config, "HF_HUB_OFFLINE", False)
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1?", "output": "2"}\n')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}/"
        [row] = source.open_source(at + "rows.jsonl", download_dir=str(tmp_path / "cache")).rows
        with pytest.raises(DataError, match=r"cannot download .*none.csv .*give a copy of it as data_path"):
            source.open_source(at + "none.csv", download_dir=str(tmp_path / "cache"))
        server.shutdown()
    assert row == {"input": "1+1?", "output": "2"}
    assert len(source.open_source(at + "rows.jsonl", download_dir=str(tmp_path / "cache")).rows) == 1
    with pytest.raises(DataError, match="unknown kind of file"):
        source.open_source(at + "rows.zip")


def test_a_pattern_names_several_files(tmp_path, monkeypatch) -> None:
    for name in "ba":
        rows = [json.dumps({"input": f"{name}{number}", "output": "2"}) + "\n" for number in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    read = source.open_source(str(tmp_path / "*.jsonl"))
    assert [row["input"] for row in read.rows] == ["a0", "a1", "b0", "b1"]
    assert read.name_of(2) == f"{tmp_path}/b.jsonl:1" and len(set(read.numbers)) == 4
    (tmp_path / "[1].jsonl").write_text('{"input": "a name, not a pattern"}\n')
    assert len(source.open_source(str(tmp_path / "[1].jsonl")).rows) == 1
    with pytest.raises(DataError, match=r"split 'train\[:5%\]' is a part of one table, and the pattern is for several"):
        source.open_source(str(tmp_path / "*.jsonl"), split="train[:5%]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"no file matches none/\*.jsonl in {tmp_path}"):
        source.open_source("none/*.jsonl")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/rows.jsonl", "addresses are read that begin with https:// or hf://datasets/; copy others"),
        ("hf://datasets/openai/gsm8k", "name one file, hf://datasets/ORGANISATION/NAME/FILE, or ORGANISATION/NAME"),
        ("hf://datasets/openai/gsm8k/main/*.parquet", "name one file"),
    ],
)
def test_what_is_not_read_is_no_name_on_the_hub(path, message) -> None:
    with pytest.raises(DataError, match=message):
        source.open_source(path)


def test_tables_without_a_row(tmp_path) -> None:
    empty = pyarrow.table({"input": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "none.parquet")
    (tmp_path / "cut.parquet").touch()
    (tmp_path / "none.csv").write_text("input,output\n")
    (tmp_path / "cut.csv").touch()
    for name in ("none.parquet", "cut.parquet", "none.csv", "cut.csv"):
        with pytest.raises(DataError, match=rf"cannot load the dataset '.*{name}' \(is it empty, or of another kind"):
            source.open_source(str(tmp_path / name))
    (tmp_path / "text.parquet").write_text("not a table")
    with pytest.raises(DataError, match=r"text.parquet' \(is it empty, or of another kind"):
        source.open_source(str(tmp_path / "text.parquet"))


@pytest.mark.parametrize(
    ("name", "question", "answer", "truth", "others"),
    [
        ("OpenMathInstruct-2", "What is 2+3?", "5", "5", {"problem_source": "augmented_gsm8k"}),
        ("DeepScaler", "Solve x+1=3.", "2", "2", {}),
        ("DAPOMath17K", DAPO["prompt"][0]["content"], "34", "34", {"data_source": "math_dapo"}),
        ("DAPOMathAIME2024", DAPO["prompt"][0]["content"], "34", "34", {"data_source": "aime"}),
        ("AIME2024", AIME_2024["problem"], "204", "204", {}),
        ("AIME2025", AIME_2025["question"], "70", "70", {}),
        ("GSM8K", GSM8K["question"], GSM8K["answer"], "1200", {}),
        (
            "NuminaMath",
            "Find x.",
            "7",
            "7",
            {"problem_type": "Algebra", "question_type": "math-word-problem", "source": "olympiads"},
        ),
    ],
)
def test_problems_with_an_answer_that_can_be_checked(name, question, answer, truth, others) -> None:
    assert rows_of(name)[0] == {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        "ground_truth": truth,
        **others,
        "task_name": name,
        "uid": f"{name}:0",
    }


def test_conversations() -> None:
    [squad] = rows_of("Squad")
    assert said(squad) == [("system", SQUAD["context"]), ("user", "Where is it?"), ("assistant", "Lourdes")]
    assert squad["answers"] == ["Lourdes", "at Lourdes"]
    assert said(rows_of("Tulu3SftMixture")[0]) == [("user", "hi"), ("assistant", "hello")]
    better = [said(row)[-1] for row in rows_of("HelpSteer3")]
    assert better == [("assistant", "first"), ("assistant", "first"), ("assistant", "second")]
    assert [role for role, _ in said(rows_of("HelpSteer3")[0])] == ["user", "assistant", "user", "assistant"]


def test_trees_become_paths_from_question_to_last_answer() -> None:
    rows = rows_of("OpenAssistant")
    assert [said(row) for row in rows] == [
        [("user", "text of q"), ("assistant", "text of a1"), ("user", "text of q2"), ("assistant", "text of a3")],
        [("user", "text of q"), ("assistant", "text of a2")],
    ]
    assert [row["uid"] for row in rows] == ["OpenAssistant:5", "OpenAssistant:2"]


def test_pairs_of_helpsteer3() -> None:
    rows = load_preference_dataset({"dataset_name": "HelpSteer3"}).dataset
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant", "user"]
    pairs = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in (rows[0], rows[2])]
    assert pairs == [("first", "second"), ("second", "first")]
    assert rows[1]["unusable"] == "a pair of which neither answer is preferred"


def test_pairs_of_tulu3() -> None:
    (row,) = load_preference_dataset({"dataset_name": "Tulu3Preference"}).dataset
    assert (row["messages"], row["source"]) == (TALK, "x")
    assert [row[name][0]["content"] for name in ("chosen", "rejected")] == ["good", "bad"]


def test_useless_rows_are_excluded_and_counted(tokenizer) -> None:
    for name, usable, reasons in (
        ("DeepScaler", 1, {"without an answer (answer is '')": 1}),
        (
            "NuminaMath",
            1,
            {f"without an answer (answer is {answer!r})": 1 for answer in ("proof", "notfound", None)}
            | {f"marked by the dataset ({flag})": 1 for flag in FLAGS}
            | {"a proof, which has no answer to check": 1},
        ),
        ("Tulu3SftMixture", 1, {"without an answer (the last message is not the assistant's)": 1}),
    ):
        data = load_response_dataset({"dataset_name": name})
        processors = {data.task_name: (data.task_spec, data.processor)}
        dataset = AllTaskProcessedDataset(data.dataset, tokenizer, None, processors, max_seq_length=500)
        assert [dataset.usable(index) for index in range(len(dataset))].count(True) == usable, name
        assert dataset.excluded.reasons == reasons
        assert dataset[len(dataset) - 1]["loss_multiplier"] == 0
    assert str(dataset.excluded).startswith("1 of 2 prompts excluded as without an answer (")


def test_an_entry_may_choose_columns_subset_and_split() -> None:
    [row] = rows_of("OpenMathInstruct-2", output_key="generated_solution")
    assert (said(row)[1][1], row["ground_truth"]) == (OPEN_MATH["generated_solution"], "5")
    assert len(rows_of("OpenMathInstruct-2", split="train_2M")) == 2
    assert len(rows_of("OpenMathInstruct-2", split="train[:1]+train_1M")) == 2
    assert [row["ground_truth"] for row in rows_of("AIME2025")] == ["70", "468", "49"]
    assert [row["uid"] for row in rows_of("AIME2025")] == ["AIME2025:0", "AIME2025:1", "AIME2025:2"]
    assert [row["ground_truth"] for row in rows_of("AIME2025", subset="AIME2025-II")] == ["468", "49"]
    # The answer to train on may differ from the one to verify: here it is a proof.
    solutions = [row for row in rows_of("NuminaMath", output_key="solution") if "unusable" not in row]
    assert [said(row)[1][1] for row in solutions] == ["x is 7."] * 5
    assert [row.get("ground_truth") for row in solutions] == ["7", None, None, None, "7"]


def test_split_repeat_and_task_name() -> None:
    data = load_response_dataset({"dataset_name": "GSM8K", "split_validation_size": 0.25, "seed": 3, "repeat": 2})
    assert (len(data.dataset), len(data.val_dataset), data.task_name) == (30, 5, "GSM8K")
    assert {row["uid"].split("~")[0] for row in data.dataset}.isdisjoint(row["uid"] for row in data.val_dataset)
    named = load_response_dataset({"dataset_name": "GSM8K", "task_name": "school", "split_validation_size": 7})
    assert len(named.val_dataset) == 7 and named.val_dataset[0]["task_name"] == "school"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_local_copy(tmp_path, write_jsonl, kind) -> None:
    if kind == "jsonl":
        path = write_jsonl("gsm8k.jsonl", [GSM8K])
        expected = f"{path}:1: no 'question' in it; it has"
    else:
        path = str(tmp_path / "gsm8k.parquet")
        hf.Dataset.from_list([GSM8K]).to_parquet(path)
        HUB["parquet", None] = {"train": [GSM8K]}
        expected = f"{path}, row 0: no 'question' in it; it has"
    try:
        assert rows_of("GSM8K", data_path=path)[0]["ground_truth"] == "1200"
        if kind == "jsonl":
            write_jsonl("gsm8k.jsonl", [AIME_2024])
        else:
            HUB["parquet", None] = {"train": [AIME_2024]}
        with pytest.raises(DataError) as error:
            rows_of("GSM8K", data_path=path)
        assert str(error.value).startswith(expected)
    finally:
        HUB.pop(("parquet", None), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "DAPOMath17K", "reward_model": "34"}, r"row 0: a field has another layout than expected \(string"),
        ({"name": "DAPOMath17K", "prompt": []}, "row 0: 'prompt' has no message in it"),
        ({"name": "DAPOMath17K", "prompt": [{"role": "user"}]}, "row 0: message 0 of 'prompt' has no content"),
    ],
)
def test_a_row_with_another_layout_is_named(monkeypatch, change, message) -> None:
    name = change.pop("name")
    monkeypatch.setitem(HUB, (PUBLISHED[name].path, None), {"train": [{**DAPO, **change}]})
    with pytest.raises(DataError, match=message):
        rows_of(name)


def test_errors_of_the_hub() -> None:
    with pytest.raises(
        DataError,
        match="cannot load the dataset 'openai/gsm8k', subset 'min' .there is no file or folder .*: ValueError",
    ):
        rows_of("GSM8K", subset="min")
    with pytest.raises(DataError, match=r"no split 'valid'; set split to one of \['train', 'validation'\]"):
        rows_of("Squad", split="valid")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("gsm8k", "GSM8K"),
        ("open_assistant", "OpenAssistant"),
        ("squad", "Squad"),
        ("openmathinstruct2", "OpenMathInstruct-2"),
        ("NuminaMath-1.5", "NuminaMath"),
        ("tulu3_sft_mixture", "Tulu3SftMixture"),
        ("Tulu3SftMixtureDataset", "Tulu3SftMixture"),
        ("responsedataset", "ResponseDataset"),
        ("AIME2026", None),
        ("my.package.Dataset", None),
    ],
)
def test_spellings(written: str, name: str | None) -> None:
    assert dataset_by_name(written) == name


def test_every_dataset_tokenises(tokenizer) -> None:
    """Every dataset passes the processor of its algorithm; no row is rejected."""
    on_the_net = {name for name, published in PUBLISHED.items() if "://" in published.path}
    for name in PUBLISHED.keys() - on_the_net - {"HumanEval", "MBPP", "IFEval", *IMAGE_DATASETS}:  # without an answer
        load: Callable[..., Any] = load_response_dataset
        data = load({"dataset_name": name, "processor": "sft_processor"})
        processors = {data.task_name: (data.task_spec, data.processor)}
        dataset = AllTaskProcessedDataset(data.dataset, tokenizer, None, processors, max_seq_length=4000)
        assert dataset.usable(0) and dataset[0]["task_name"] == name


def test_benchmarks_have_what_their_environments_read() -> None:
    (choice,) = rows_of("GPQA")
    assert choice["messages"][0]["content"].startswith("Which?\n\nA) ")
    letter = choice["ground_truth"]
    assert f"{letter}) this" in choice["messages"][0]["content"] and choice["messages"][1]["content"] == letter
    (law,) = rows_of("mmlu-pro")
    assert said(law) == [("user", "Pick.\n\nA) w\nB) x\nC) y"), ("assistant", "C")] and law["category"] == "law"
    (algebra,) = rows_of("math500")
    assert algebra["ground_truth"] == "2" and algebra["subject"] == "Algebra"
    (rules,) = rows_of("IFEval")
    assert [check["name"] for check in rules["instructions"]] == IFEVAL["instruction_id_list"]
    assert followed("one two three", rules) == 1.0 and followed("one two, three", rules) == 0.0
    for name in ("HumanEval", "MBPP"):
        (task,) = rows_of(name)
        (test,) = read_tests(task)
        scope: dict[str, Any] = {}
        exec(test.whole_program("def one():\n    return 1\n") + test.code, scope)  # type: ignore[union-attr]


def test_benchmark_rows_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken = {**IFEVAL, "instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}
    monkeypatch.setitem(HUB, ("google/IFEval", None), {"train": [IFEVAL, spoken]})
    assert [row.get("unusable") for row in rows_of("IFEval")] == [None, "with an instruction on the answer's language"]
    monkeypatch.setitem(HUB, ("TIGER-Lab/MMLU-Pro", None), {"test": [{**MMLU_PRO, "options": ["w"]}]})
    with pytest.raises(DataError, match="choice 2 of 1"):
        rows_of("MMLU-Pro")
