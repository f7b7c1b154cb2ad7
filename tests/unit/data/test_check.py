from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.data import DataError, build_task_data, load_tokenizer
from grpo_mcore.data.check import CheckReport, check_file
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.demo.arithmetic import make_tokenizer

Check = Callable[..., CheckReport]
LONG = "+".join("1" * 30) + "="


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_tokenizer(folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a GRPO recipe for train.jsonl, with prompts of at most 23 tokens."""
    monkeypatch.chdir(tmp_path)
    policy = {"model_name": "m", "tokenizer": {"name": str(tokenizer_folder)}, "max_total_sequence_length": 24}
    (tmp_path / "train.jsonl").write_text('{"input": "1+1=", "output": "2"}\n')
    (tmp_path / "r.yaml").write_text(json.dumps({"policy": policy, "data": {"train": {"data_path": "train.jsonl"}}}))
    return tmp_path / "r.yaml"


@pytest.fixture
def check(recipe: Path) -> Check:
    """Return a function check(rows, *overrides) -> report of these rows; text rows are written unchanged."""

    def run(rows: list[Any], *overrides: str, **options: Any) -> CheckReport:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        Path("rows.jsonl").write_text("".join(line + "\n" for line in lines))
        return check_file(Path("rows.jsonl"), load_recipe(recipe, overrides).config, **options)

    return run


def row(question: Any = "1+1=", answer: Any = "2", **more: Any) -> dict[str, Any]:
    return {"input": question, "output": answer, **more}


def broken(datum_dict: dict[str, Any], *_: Any) -> Any:
    """A processor that fails."""
    return datum_dict["no_such_field"]


def sft_recipe(recipe: Path) -> None:
    recipe.write_text(json.dumps({**json.loads(recipe.read_text()), "sft": {}}))


def test_a_good_file(check: Check) -> None:
    report = check([row(), row("1+2=", "3", reward=0.5), {"input": "2+2=", "ground_truth": "4"}])
    assert report.usable and (report.rows, report.usable_rows, report.limit) == (3, 3, 24)
    assert report.fields == {"input": 3, "output": 2, "ground_truth": 1, "reward": 1}
    assert report.rewards["reward"].total == 1 and report.read_as == "data.train[0]: ResponseDataset"
    text = str(report)
    assert "3 rows, 3 usable" in text and "tokens: 7 to 7, median 7, p95 7; the limit is 24" in text
    assert "leaves 17 of 24 tokens" in text and "reward: 0.5 to 0.5" in text


def test_rows_are_shown_as_the_model_sees_them(check: Check) -> None:
    report = check([row("", "x"), row(), row("1+2=", "3")], samples=1)
    assert report.samples == ["line 2\n--- prompt, 7 tokens\n<bos><user>1+1=<assistant>\n--- answer\n2"]
    assert check([row()], samples=0).samples == []


@pytest.mark.parametrize(
    ("bad", "kind", "said"),
    [
        ("{", "not JSON", "not JSON"),
        ("[1]", "not JSON", "got list"),
        ('{"input": "\\ud800", "output": "2"}', "not JSON", "surrogate"),
        ({"question": "1+1=", "output": "2"}, "no conversation can be made of it", "no 'input' in it"),
        ({"input": "1+1="}, "no conversation can be made of it", "no 'output' in it"),
        (row(5), "no conversation can be made of it", "must be text or a list of messages"),
        (row([{"role": "user"}]), "no conversation can be made of it", "has no content"),
        (row(""), "no question", "blank"),
        (row(answer=" "), "no answer", "blank"),
        (row(answer="2", ground_truth=""), "no answer", "blank"),
        (row(LONG), "too long", "63 tokens; the limit is 24"),
    ],
)
def test_rows_that_cannot_be_used(check: Check, bad: Any, kind: str, said: str) -> None:
    report = check([row(), bad, "", row("1+2=")])
    assert (report.rows, report.usable_rows, report.usable) == (3, 2, False)
    assert report.counts == {kind: 1}
    ((details, numbers),) = report.problems[kind].items()
    assert numbers == [2] and said in details and "line 2" not in details
    assert f"cannot be used, 1 rows: {kind}\n    line 2: {details}" in str(report)


def test_many_bad_rows_are_counted_and_the_first_are_named(check: Check) -> None:
    report = check([row(answer="")] * 50)
    assert report.counts == {"no answer": 50} and not report.samples
    assert "\n    lines 1, 2, 3, 4, 5, ...: blank, or not there" in str(report)
    report = check([{f"field{number}": "1"} for number in range(9)])
    assert len(report.problems["no conversation can be made of it"]) == 5 and str(report).endswith("\n    ...")


def test_the_limit_is_that_of_a_run(check: Check, recipe: Path, tokenizer_folder: Path) -> None:
    """The report counts exactly the rows that a run excludes."""
    rows = [row("+".join("1" * count) + "=") for count in range(1, 40)]
    for overrides in ([], ["data.max_input_seq_length=11"], ["policy.generation.vllm_cfg.max_model_len=20"]):
        report = check(rows, *overrides)
        config = load_recipe(recipe, overrides).config
        longest = min(config.data.max_input_seq_length, config.policy.generation.vllm_cfg.max_model_len)
        data = build_task_data([{"data_path": "rows.jsonl"}], [], load_tokenizer(str(tokenizer_folder)), longest)
        assert report.counts == {"too long": data.train.excluded.count} and report.limit == longest


def test_an_sft_recipe_measures_conversations(check: Check, recipe: Path) -> None:
    sft_recipe(recipe)
    report = check([row("1+1=", "2"), row("1+1=", "2" * 20), row("1+2=", "")], samples=1)
    assert report.counts == {"too long": 1, "no answer": 1} and report.lengths.low == 9
    assert "--- prompt, 7 tokens\n" in report.samples[0] and report.samples[0].endswith("trained on, 2 tokens\n2<eos>")


def test_conversations_with_calls(check: Check, recipe: Path) -> None:
    sft_recipe(recipe)
    asked, called = {"role": "user", "content": "1+1="}, {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"messages": [asked, {"role": "assistant", "content": "2"}]},
        {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [called]}]},
        {"messages": [asked]},
    ]
    room = "policy.max_total_sequence_length=200"  # this template shows calls as text
    report = check(rows, "++data.train.dataset_name=openai_format", room)
    assert report.counts == {"no answer": 1} and report.read_as == "data.train[0]: openai_format"


def test_pairs(check: Check) -> None:
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "chosen_reward": 1.0, "rejected_reward": 0.0},
        {"prompt": "1+1=", "chosen": "2", "rejected": "2"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "1" * 30},
        {"prompt": "1+1=", "chosen": "2"},
    ]
    report = check(rows, samples=1)
    assert report.counts == {"no preference": 1, "too long": 1, "no conversation can be made of it": 1}
    assert report.read_as == "by the fields of its first row: BinaryPreferenceDataset"
    assert report.samples[0].count("trained on") == 2 and report.rewards["chosen_reward"].mean == 1.0


def test_repeated_prompts(check: Check) -> None:
    report = check(
        [row("1+1=", "2"), row("1+2=", "3"), row("1+1=", "2"), row("1+2=", "4"), row("1+2=", "3"), row("3=")]
    )
    assert (report.repeated, report.with_other_answers, report.first_repeated) == (3, 1, [1, 3]) and report.usable
    assert "3 rows have the prompt of an earlier row, the first of them in lines 1, 3; 1 prompts" in str(report)


def test_the_entry_of_the_file_is_used(recipe: Path) -> None:
    data = {
        "train": {"data_path": "train.jsonl", "split_validation_size": 0.5, "repeat": 3},
        "validation": {"data_path": "val.jsonl", "input_key": "q", "output_key": "a"},
    }
    recipe.write_text(json.dumps({**json.loads(recipe.read_text()), "data": data}))
    Path("val.jsonl").write_text('{"q": "1+1=", "a": "2"}\n')
    config = load_recipe(recipe).config
    assert check_file(Path("val.jsonl"), config).read_as == "data.validation[0]: ResponseDataset"
    report = check_file(Path("train.jsonl"), config)  # one row, neither split nor repeated
    assert report.usable and report.rows == 1
    Path("other.jsonl").write_text('{"q": "1+1=", "a": "2"}\n')
    assert check_file(Path("other.jsonl"), config).counts == {"no conversation can be made of it": 1}


@pytest.mark.parametrize(
    ("first", "read_as"),
    [
        (
            {"problem": "1+1=", "expected_answer": "2"},
            "ResponseDataset, input_key: problem, output_key: expected_answer",
        ),
        ({"messages": [{"role": "user", "content": "1+1="}], "ground_truth": "2"}, "openai_format"),
        ({"q": "1+1="}, "ResponseDataset"),
    ],
)
def test_without_a_recipe_the_keys_are_those_of_the_first_row(check: Check, first: Any, read_as: str) -> None:
    check([first])
    report = check_file(Path("rows.jsonl"))
    assert report.read_as == f"by the fields of its first row: {read_as}" and report.usable == ("q" not in first)


def test_prompts_alone_are_usable_where_no_answer_is_needed(check: Check) -> None:
    said = "output_key names the field of the answer; for rewards that need none: processor: chat_data_processor"
    assert said in str(check([{"input": "1+1="}]))
    assert check([{"input": "1+1="}], "++data.train.processor=chat_data_processor").usable
    asked = {"messages": [{"role": "user", "content": "1+1="}]}
    room = "++data.train.dataset_name=openai_format"
    assert check([asked], room).counts == {"no answer": 1}
    assert check([asked], room, "++data.train.processor=chat_data_processor").usable


def test_the_prompt_file_is_part_of_what_the_model_sees(check: Check) -> None:
    Path("p.txt").write_text("3={}")
    report = check([row()], "++data.train.prompt_file=p.txt")
    assert "<user>3=1+1=<assistant>" in report.samples[0] and report.lengths.low == 9


def test_a_processor_that_fails_is_a_finding(check: Check) -> None:
    report = check([row()], f"++data.train.processor={__name__}:broken")
    assert report.problems == {"the processor fails": {"KeyError: 'no_such_field'": [1]}}


def test_a_template_that_raises_is_a_finding(check: Check) -> None:
    Path("t.jinja").write_text("{{ raise_exception('no') }}")
    report = check([row()], "++policy.tokenizer.chat_template=t.jinja")
    (said,) = report.problems["the processor rejects it"]
    assert "the chat template rejects it" in said and said.endswith("no")


def test_datasets_without_a_file_and_missing_files(check: Check, recipe: Path) -> None:
    with pytest.raises(DataError, match="'GSM8K', which is not read from a file"):
        check([row()], "data.train={dataset_name: GSM8K}")
    with pytest.raises(DataError, match="data file not found: missing.jsonl"):
        check_file(Path("missing.jsonl"))
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        check([row()], "policy.tokenizer.name=./nowhere")


def test_an_empty_file_cannot_be_used(check: Check) -> None:
    report = check([])
    assert not report.usable and "it has no rows" in str(report)


@pytest.mark.parametrize(
    ("rows", "read_as", "counts"),
    [
        ([row(), row(answer="")], "ResponseDataset", {"no answer": 1}),
        ([{"messages": [{"role": "user", "content": "q"}]}], "openai_format", {"no answer": 1}),
        ([{"prompt": "q", "chosen": "a", "rejected": "a"}], "BinaryPreferenceDataset", {"no preference": 1}),
    ],
)
def test_without_a_recipe_fields_are_checked(tmp_path: Path, rows: Any, read_as: str, counts: Any) -> None:
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    report = check_file(file)
    assert report.read_as == f"by the fields of its first row: {read_as}" and report.counts == counts
    assert "tokens" not in str(report)


@pytest.mark.parametrize(("rows", "code"), [([row()], 0), ([row(), row(LONG)], 1), ([], 1)])
def test_exit_codes(recipe: Path, rows: Any, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    words = ["check", "rows.jsonl", "--recipe", "r.yaml", "grpo.seed=3", "--samples", "0"]
    assert main(["data", *words]) == code and "rows.jsonl: " in capsys.readouterr().out
    Path("r.yaml").write_text("policy: 3")
    assert main(["data", *words]) == 2


@pytest.mark.slow
def test_neither_megatron_nor_an_engine_is_imported(recipe: Path) -> None:
    code = (
        "import sys; from grpo_mcore.cli.main import main\n"
        "assert main(['data', 'check', 'train.jsonl', '--recipe', 'r.yaml']) == 0\n"
        "sys.exit(', '.join({'megatron', 'vllm', 'ray'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and "1 rows, 1 usable" in result.stdout, result.stderr


def test_tasks_of_nemo_gym(recipe: Path, tmp_path: Path) -> None:
    """Tasks of NeMo Gym need no answer, and may leave the question to their environment."""
    tasks = [
        {"responses_create_params": {"input": "1+1="}, "agent_ref": {"name": "a"}},
        {"responses_create_params": {"input": "1+1="}, "agent_ref": {"name": "b"}},
        {"responses_create_params": {"input": None}},
        {"responses_create_params": {"input": LONG}},
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    gym = [
        "data.train.dataset_name=NemoGymDataset",
        "env.nemo_gym.head_server_url=http://x",
        "data.train.processor=nemo_gym",
    ]
    gym += ["policy.generation.vllm_cfg.expose_http_server=true"]
    for config in (None, load_recipe(str(recipe), gym).config):
        report = check_file(path, config)
        text = str(report)
        assert "NemoGymDataset" in text and "no answer" not in text
        assert ("too long" in text) == (config is not None)


@pytest.mark.slow
def test_a_truth_that_its_own_verifier_does_not_accept_is_named(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truths = ["2", {"style": "rule", "ground_truth": "2"}, ["2", "two"], "so 1+1=2\n#### 2", "72 km/h", ["2", ""]]
    Path("rows.jsonl").write_text("".join(json.dumps(row(answer=truth)) + "\n" for truth in truths))
    assert main(["data", "check", "rows.jsonl", "--recipe", "r.yaml", "env.math.num_workers=1"]) == 1
    shown = capsys.readouterr().out
    assert "rows.jsonl: 6 rows, 4 usable" in shown and "cannot be used, 2 rows: no answer could be right" in shown
    assert "line 2: the ground truth {'style': 'rule', 'ground_truth': '2'} is a dict, which no answer can" in shown
    assert "line 6: the ground truth ['2', ''] is blank" in shown
    assert main(["data", "check", "rows.jsonl"]) == 1, "without a recipe the kind of a truth is looked at"
    choices = ["env.math.verifier_type=english_multichoice"]
    capsys.readouterr()
    assert main(["data", "check", "train.jsonl", "--recipe", "r.yaml", *choices]) == 1
    assert "line 1: english_multichoice fails on the ground truth '2'" in capsys.readouterr().out


def test_what_a_terminal_would_obey_is_shown(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows come from outside: an escape had moved the reader's cursor."""
    Path("evil.jsonl").write_text(json.dumps({"input": "1\x1b[2J\u2028+1=", "output": "2"}) + "\n")
    assert main(["data", "check", "evil.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "1\\x1b[2J\\u2028+1=" in out and "\x1b" not in out
