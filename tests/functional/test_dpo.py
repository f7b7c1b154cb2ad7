"""Preference training from the command line, in process: it prefers the chosen answer, and resumes bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.batching.packed_batch import share_prefixes
from grpo_mcore.cli.main import main
from grpo_mcore.observe.samples import read_samples, sample_steps
from tests.functional.runs import Run, Task, assert_one_message, finished, run_here, sft_recipe
from tests.unit.tools.report_pages import data_of

GYM_ROWS = 24


@pytest.fixture(scope="module")
def pairs(task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write files of pairs: the right digit is chosen, the wrong one is rejected."""
    folder = tmp_path_factory.mktemp("pairs")
    found = {}
    for name, source in (("train", task.train), ("val", task.val)):
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        lines = [
            {"prompt": row["input"], "chosen": row["output"], "rejected": str(1 - int(row["output"]))} for row in rows
        ]
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def dpo_recipe(task: Task, pairs: dict[str, Path], **dpo: Any) -> dict[str, Any]:
    """Return a recipe of 7 steps of 48 pairs over 128 rows: the third epoch begins within it."""
    base = sft_recipe(task)
    dataset = {"dataset_name": "BinaryPreferenceDataset"}
    del base["sft"]
    return base | {
        "dpo": {"max_num_steps": 7, "max_num_epochs": 4, "val_period": 0, "val_at_end": True}
        | {"reference_policy_kl_penalty": 0.5, "sft_loss_weight": 0.1}
        | dpo,
        "policy": base["policy"] | {"train_global_batch_size": 48},
        "data": {
            "train": dataset | {"data_path": str(pairs["train"])},
            "validation": dataset | {"data_path": str(pairs["val"])},
        },
        "checkpointing": {"save_period": 3, "keep_top_k": 9},
    }


@pytest.fixture(scope="module")
def dpo_run(task: Task, pairs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_here("dpo", tmp_path_factory.mktemp("dpo"), dpo_recipe(task, pairs))


def test_the_margin_rises(dpo_run: Run) -> None:
    assert dpo_run.code == 0, dpo_run.err
    first, *_, last = dpo_run.metrics()
    assert first["loss"] == pytest.approx(0.6931472 + 0.1 * first["sft_loss"], abs=1e-6)
    assert first["rewards_margin_mean"] == pytest.approx(0, abs=1e-6), "before training it is the reference"
    assert last["rewards_margin_mean"] > 0.2 and last["accuracy"] > 0.6
    assert last["rewards_margin_mean"] == pytest.approx(last["rewards_chosen_mean"] - last["rewards_rejected_mean"])
    before, after = dpo_run.metrics("validation")
    assert before["num_valid_samples"] == after["num_valid_samples"] == 32
    assert before["rewards_margin_mean"] == pytest.approx(0, abs=1e-6)
    assert after["rewards_margin_mean"] > 0.1
    assert after["validation-default_loss"] == after["loss"] < before["loss"]


def test_what_the_user_sees(dpo_run: Run) -> None:
    for text in ("48 pairs = DP 1 x 48 pairs", "bins of at most 128 tokens", "rewards_margin_mean", "DPO is over"):
        assert text in dpo_run.out
    assert dpo_run.err == ""
    assert (dpo_run.checkpoints / "hf" / "config.json").is_file()
    assert sorted(path.name for path in dpo_run.checkpoints.glob("step_*")) == ["step_3", "step_6", "step_7"]


def test_report_and_watch_show_the_run(dpo_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(dpo_run.folder), "--once"]) == 0
    screen = capsys.readouterr().out
    for text in ("over: all steps are done", "step 7 of 7", "loss", "margin", "log-probs ", "samples of step 7"):
        assert text in screen
    assert "failed" not in screen and "nan" not in screen
    assert main(["report", str(dpo_run.folder), "--output", str(dpo_run.folder / "page.html")]) == 0
    data = data_of((dpo_run.folder / "page.html").read_text())
    assert data["state"]["step_size"] == "48 pairs" and data["state"]["algorithm"] == "dpo"
    steps, margins = data["runs"][0]["curves"]["train/rewards_margin_mean"]
    assert steps == list(range(1, 8)) and margins[-1] > 0.2
    rows = read_samples(sample_steps(dpo_run.logs, "train")[7])
    answers = {(row["uid"], row["generation"]): row["turns"][-1]["text"] for row in rows}
    assert len(answers) == 2 * 48, "both answers of each pair"
    for (uid, _), text in answers.items():
        assert {answers[uid, 0], answers[uid, 1]} == {"0<eos>", "1<eos>"} and text in ("0<eos>", "1<eos>")


def test_resumes_bit_for_bit(dpo_run: Run, task: Task, pairs: dict[str, Path], tmp_path: Path) -> None:
    resumed = finished("dpo", tmp_path, dpo_recipe(task, pairs), "--resume", str(dpo_run.checkpoints / "step_3"))
    assert "resuming from" in resumed.out
    assert resumed.outcome() == dpo_run.outcome()[3:]
    assert resumed.outcome("validation")[-1] == dpo_run.outcome("validation")[-1]


def test_a_resumed_run_has_the_reference_of_what_it_reads_now(
    dpo_run: Run, task: Task, pairs: dict[str, Path], tmp_path: Path
) -> None:
    """The rows of the validation file are the same in another order, under the same uids."""
    shutil.copytree(dpo_run.checkpoints / "step_6", tmp_path / "step_6")
    other = tmp_path / pairs["val"].parent.name / "val.jsonl"  # names and so uids derive from both
    other.parent.mkdir()
    other.write_text("\n".join(reversed(pairs["val"].read_text().splitlines())))
    recipe = dpo_recipe(task, pairs)
    recipe["data"]["validation"] |= {"data_path": str(other)}
    resumed = finished("dpo", tmp_path, recipe, "--resume", str(tmp_path / "step_6"))
    (now,), (*_, then) = resumed.metrics("validation"), dpo_run.metrics("validation")
    for name in ("loss", "rewards_margin_mean", "rewards_chosen_mean", "accuracy"):
        assert now[name] == pytest.approx(then[name], abs=1e-5), name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("dpo.preference_loss=kto",), "expected one of 'dpo', 'ipo', 'simpo', got 'kto'"),
        (("data.train.chosen_key=better",), "'better'"),
        (("data.train.dataset_name=ResponseDataset",), "has no pairs of answers"),
        (("policy.train_global_batch_size=4000",), "fewer than one batch of 4000"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bad_input(
    task: Task, pairs: dict[str, Path], tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    found = run_here("dpo", tmp_path, dpo_recipe(task, pairs), *overrides)
    assert_one_message(found, found.code, message)
    assert found.code != 0 and not (tmp_path / "checkpoints" / "hf").exists()


def test_a_loss_without_a_reference_trains(task: Task, pairs: dict[str, Path], tmp_path: Path) -> None:
    changes = {"preference_loss": "simpo", "max_num_steps": 3, "val_at_start": False}
    run = finished("dpo", tmp_path, dpo_recipe(task, pairs, **changes))
    first, *_, last = run.metrics()
    assert last["rewards_margin_mean"] > first["rewards_margin_mean"]


@pytest.mark.parametrize("command", ["dpo", pytest.param("sft", marks=pytest.mark.every_state)])
def test_long_prompts_are_computed_once(
    task: Task, pairs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The answers of a pair have their prompt in common, examples what the prompt file puts before the question."""
    (tmp_path / "prompt.txt").write_text("01+02=" * 7 + "{}")
    recipe = dpo_recipe(task, pairs) if command == "dpo" else sft_recipe(task)
    words = [f"{command}.max_num_steps=2", f"data.default.prompt_file={tmp_path / 'prompt.txt'}"]
    words += [
        "policy.max_total_sequence_length=64",
        f"{command}.val_at_start=false",
        f"{command}.val_at_end=false",
        "checkpointing.enabled=false",
    ]
    shared, steps = [], []
    monkeypatch.setattr(
        "grpo_mcore.driver.policy.policy_worker.share_prefixes",
        lambda *given: shared.append(share_prefixes(*given)) or shared[-1],
    )
    for name, choice in (("whole", ["policy.sequence_packing.shared_prefix.enabled=false"]), ("shared", [])):
        folder = tmp_path / name
        folder.mkdir()
        assert not shared
        run = finished(command, folder, recipe, *words, *choice)
        steps.append(run.metrics())
    assert all(row.shared is not None for row in shared) and shared
    for whole, once in zip(*steps, strict=True):
        for key in ("loss", "grad_norm"):
            assert once[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key


def test_a_stopped_run_saves_and_goes_on(task: Task, pairs: dict[str, Path], tmp_path: Path) -> None:
    """It is saved without a validation, which may take longer than there is time; the resumed run makes up for it."""
    stop = ("checkpointing.checkpoint_must_save_by=00:00:00:00",)
    recipe = dpo_recipe(task, pairs, val_at_start=False, max_num_steps=2, val_period=1)
    stopped = run_here("dpo", tmp_path, recipe, *stop)
    assert stopped.code == 75, stopped.err
    assert [line["step"] for line in stopped.metrics()] == [1] and not stopped.metrics("validation")
    assert not (stopped.checkpoints / "hf").exists()
    resumed = run_here("dpo", tmp_path, recipe, "--resume")
    assert resumed.code == 0 and [line["step"] for line in resumed.metrics()] == [1, 2]
    assert [line["step"] for line in resumed.metrics("validation")] == [1, 2]
    again = run_here("dpo", tmp_path, recipe, "--resume", "dpo.max_num_steps=3")
    assert again.code == 0 and [line["step"] for line in again.metrics("validation")] == [1, 2, 3]
