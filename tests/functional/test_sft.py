"""Supervised fine-tuning from the command line, in process."""

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_mcore.algorithms import sft
from grpo_mcore.cli.main import main
from grpo_mcore.data import DataError
from grpo_mcore.observe.samples import read_samples, sample_steps
from tests.functional.runs import Run, Task, assert_one_message, finished, run_here, sft_recipe, start_command
from tests.processes_below import with_words
from tests.unit.tools.report_pages import data_of
from tests.waiting import wait_until


def test_the_loss_falls(sft_run: Run) -> None:
    assert sft_run.code == 0, sft_run.err
    losses = [line["loss"] for line in sft_run.metrics()]
    assert len(losses) == 20
    assert losses[0] == pytest.approx(math.log(32), abs=0.3)  # a random model over 32 tokens
    assert losses[-1] < 0.6  # ln(2) / 2: the digit is open, the end after it is certain
    before, after = sft_run.metrics("validation")
    assert (before["step"], after["step"]) == (0, 20)
    assert before["num_tokens"] == after["num_tokens"] == 64  # 32 x (digit, end)
    assert after["val_loss"] < 0.6


def test_the_exported_model_has_the_loss_of_the_policy(sft_run: Run, task: Task) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder, line in zip((task.untrained, sft_run.checkpoints / "hf"), sft_run.metrics("validation"), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        losses = []
        for row in map(json.loads, task.val.read_text().splitlines()):
            text = f"<bos><user>{row['input']}<assistant>{row['output']}<eos>"
            tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = model(tokens).logits[0, -3:-1].log_softmax(-1)
            losses += (-logprobs.gather(-1, tokens[0, -2:, None])).flatten().tolist()
        assert len(losses) == line["num_tokens"]
        assert sum(losses) / len(losses) == pytest.approx(line["val_loss"], abs=1e-4)


def test_report_and_watch_show_the_run(sft_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(sft_run.folder), "--once"]) == 0
    screen = capsys.readouterr().out
    for text in (
        "over: all steps are done",
        "step 20 of 20",
        "loss",
        "val ",
        "train ",
        "samples of step 20",
        "grad norm",
    ):
        assert text in screen
    assert "<user>" in screen and "failed" not in screen and "nan" not in screen
    assert main(["report", str(sft_run.folder), "--output", str(sft_run.folder / "page.html")]) == 0
    data = data_of((sft_run.folder / "page.html").read_text())
    assert data["state"]["algorithm"] == "sft" and data["state"]["step_size"] == "64 examples"
    assert data["state"]["max_steps"] == 20 and data["state"]["end"] == "all steps are done"
    steps, losses = data["runs"][0]["curves"]["train/loss"]
    assert steps == list(range(1, 21)) and losses[-1] < 0.6
    assert set(data["ledger"]["devices"]) == {"policy-0"} and data["ledger"]["devices"]["policy-0"]["train"] > 0
    assert [what for _, what, *_ in data["timelines"]["20"] if "/" not in what].count("train") >= 2  # driver and rank
    assert not [alarm for alarm in data["heads"][0]["alarms"] if alarm["grave"]]


def test_its_recipe_is_diagnosed(sft_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, optimizer = tmp_path / "recipe.yaml", {"megatron_cfg": {"optimizer": {"lr": 1.0}}}
    sampler = {"generation": {"temperature": 0.5, "top_p": 0.5, "top_k": 2}}
    other.write_text(yaml.safe_dump({"defaults": str(sft_run.folder / "recipe.yaml"), "policy": optimizer | sampler}))
    capsys.readouterr()
    assert main(["diagnose", str(sft_run.logs), "--recipe", str(other), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert [found["part"] for found in said["findings"]] == ["policy.megatron_cfg.optimizer.lr"]
    assert said["not judged"] == ["all but the recipe: this is a run of sft, and only GRPO has steps to replay"]


def test_each_example_is_recorded_with_what_was_computed_of_it(sft_run: Run) -> None:
    losses = {line["step"]: line["loss"] for line in sft_run.metrics()}
    steps = sample_steps(sft_run.logs, "train")
    assert sorted(steps) == list(range(1, 21))
    for step in (1, 20):
        rows = read_samples(steps[step])
        assert len(rows) == len({row["uid"] for row in rows}) == 64 and {row["weight"] for row in rows} == {1.0}
        trained = []
        for row in rows:
            mask = [turn["generated"] for turn in row["turns"] for _ in range(turn["tokens"])]
            trained += [logprob for logprob, counts in zip(row["policy_logprobs"], mask, strict=True) if counts]
            assert row["reward"] is None and row["trained_version"] == step and row["engine_logprobs"] is None
            assert re.fullmatch(
                r"<bos><user>\d+%2=<assistant>[01]<eos>", "".join(turn["text"] for turn in row["turns"])
            )
        assert -sum(trained) / len(trained) == pytest.approx(losses[step], abs=1e-4)


def test_the_recipe_is_saved_as_the_user_wrote_it(sft_run: Run) -> None:
    recipe = yaml.safe_load((sft_run.checkpoints / "step_20" / "config.yaml").read_text())
    assert [recipe["policy"]["generation"][key] for key in ("temperature", "top_p", "top_k")] == [0.5, 0.5, 2]


@pytest.mark.parametrize(
    ("saving", "writes"), [("enabled=true", True), ("enabled=false", False), ("enabled=false,save_hf=last", True)]
)
def test_a_model_of_another_run_is_never_replaced(task: Task, tmp_path: Path, saving: str, writes: bool) -> None:
    """By a run that would write a model it is refused before the start; one that saves nothing writes none."""
    model = tmp_path / "checkpoints" / "hf" / "model.safetensors"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"of another run")
    words = ["sft.max_num_steps=1", "sft.val_at_start=false", *(f"checkpointing.{word}" for word in saving.split(","))]
    run = run_here("sft", tmp_path, sft_recipe(task), *words)
    if writes:
        assert_one_message(run, 1, "holds hf, a model of another run", "choose another folder, or move it away")
        assert not (tmp_path / "logs").exists()
    else:
        assert run.code == 0 and "not written: checkpointing.enabled is false, and save_hf is none" in run.out
    assert model.read_bytes() == b"of another run" and [path.name for path in model.parent.parent.iterdir()] == ["hf"]


def test_a_run_that_is_over_stays_over_when_it_is_resumed(task: Task, tmp_path: Path) -> None:
    """As in a chain of jobs. A checkpoint is ranked by a validation of its own step alone."""
    recipe = sft_recipe(task) | {"checkpointing": {"save_period": 1, "keep_top_k": 9}}
    words = ("sft.max_num_steps=3", "sft.val_period=2")
    run = run_here("sft", tmp_path, recipe, *words)
    before = (run.logs / "summary.json").read_bytes()
    assert run_here("sft", tmp_path, recipe, *words, "--resume=auto").code == 0
    assert (run.logs / "summary.json").read_bytes() == before
    infos = [json.loads((run.checkpoints / f"step_{step}" / "training_info.json").read_text()) for step in (1, 2, 3)]
    losses = {line["step"]: line["val_loss"] for line in run.metrics("validation")}
    assert [info["metrics"].get("val:val_loss") for info in infos] == [None, losses[2], losses[3]]
    other = run_here("train", tmp_path, {"grpo": {}} | recipe, "--resume")
    assert_one_message(other, 1, f"{run.checkpoints / 'step_3'} is of a run of SFT, which GRPO cannot resume")


def test_checks_alone_start_nothing(task: Task, sft_run: Run, tmp_path: Path) -> None:
    run = run_here("sft", tmp_path, sft_recipe(task), "--check")
    assert run.code == 0 and run.out == "all checks passed; 20 steps are left, nothing was started\n"
    assert not (tmp_path / "logs").exists()
    again = run_here("sft", tmp_path, sft_recipe(task), "--check", f"--resume={sft_run.checkpoints / 'step_20'}")
    assert again.code == 0 and "all checks passed; 0 steps are left" in again.out


def test_an_alarm_is_said_and_ends_the_run_where_it_is_asked_to(task: Task, tmp_path: Path) -> None:
    recipe = sft_recipe(task)
    recipe["policy"]["megatron_cfg"] = {
        "optimizer": {"lr": 1e-3, "min_lr": 0.0},
        "scheduler": {"lr_decay_style": "linear", "lr_decay_iters": 1, "lr_warmup_iters": 0},
    }
    run = run_here("sft", tmp_path, recipe, "logger.alarms.stop_after=3", "sft.val_at_start=false")
    assert run.code == 75, run.err
    assert "ALARM in step 6, said once: the policy does not move" in run.out
    summary = json.loads((run.logs / "summary.json").read_text())
    assert summary["steps"] == 6 and [alarm["kind"] for alarm in summary["alarms"]] == ["policy_stands_still"]
    assert summary["end"] == "the alarm policy_stands_still for 5 steps (logger.alarms.stop_after)"


def test_a_model_alone_is_written_where_it_is_asked_for(task: Task, tmp_path: Path) -> None:
    words = (
        "sft.max_num_steps=1",
        "sft.val_at_start=false",
        "checkpointing.enabled=false",
        "checkpointing.save_hf=last",
    )
    run = finished("sft", tmp_path, sft_recipe(task), *words)
    assert [path.name for path in run.checkpoints.iterdir()] == ["hf"] and (
        run.checkpoints / "hf/config.json"
    ).is_file()


@pytest.mark.parametrize(("saved", "code"), [("last", 75), ("none", 73)])
def test_a_run_without_checkpoints_that_is_stopped_writes_its_model_or_says_that_it_is_lost(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, code: int
) -> None:
    build_step = sft.build_step

    def stopped(*arguments: Any) -> sft.SFTStep:
        os.kill(os.getpid(), signal.SIGUSR1)
        return build_step(*arguments)

    monkeypatch.setattr(sft, "build_step", stopped)
    words = ("sft.val_at_start=false", "checkpointing.enabled=false", f"checkpointing.save_hf={saved}")
    run = run_here("sft", tmp_path, sft_recipe(task), *words)
    assert run.code == code, run.err
    summary = json.loads((run.logs / "summary.json").read_text())
    assert (summary["end_kind"], summary["exit_code"], summary["unsaved"]) == ("stopped", code, int(code == 73))
    assert (run.checkpoints / "hf" / "config.json").is_file() == (saved == "last")
    assert ("1 trained step is not saved" in run.out) == ("exit code 73" in run.err) == (code == 73)
    assert "--resume" not in run.out


def test_a_run_that_fails_says_so_in_its_summary(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_step, calls = sft.build_step, list[int]()

    def failing(*arguments: Any) -> sft.SFTStep:
        calls.append(1)
        if len(calls) == 3:
            raise DataError("no such example")
        return build_step(*arguments)

    monkeypatch.setattr(sft, "build_step", failing)
    run = run_here("sft", tmp_path, sft_recipe(task), "sft.val_at_start=false", "checkpointing.save_period=1")
    assert run.code == 1, run.err
    summary = json.loads((run.logs / "summary.json").read_text())
    assert (summary["end"], summary["end_kind"]) == ("failed: no such example", "failed")
    assert (summary["steps"], summary["unsaved"], summary["exit_code"]) == (2, 0, 1)
    assert main(["runs", str(tmp_path)]) == 0 and "failed: no such example" in capsys.readouterr().out


def test_what_the_user_sees(sft_run: Run) -> None:
    for text in ("64 samples = DP 1 x 64 samples", "of 20  loss", "step 20: val_loss", str(sft_run.checkpoints / "hf")):
        assert text in sft_run.out
    assert sft_run.err == ""


@pytest.mark.every_state  # chaos/test_chaos.py kills the driver of a GRPO run
def test_a_lost_run_goes_on_from_its_newest_checkpoint(task: Task, tmp_path: Path) -> None:
    """With cluster.max_restarts its driver may be killed."""
    recipe = sft_recipe(task) | {"checkpointing": {"save_period": 5}}
    recipe["cluster"] = recipe["cluster"] | {"max_restarts": 1, "retry_wait_s": 0.1}
    process = start_command("sft", tmp_path, recipe, "sft.max_num_steps=30", "sft.val_at_start=false")
    saved = tmp_path / "checkpoints" / "step_5"
    wait_until(lambda: saved.exists() or process.poll() is not None, "a checkpoint", 120)
    assert process.poll() is None, process.communicate()
    (driver,) = with_words("spawn_main", process.pid)
    driver.kill()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (
        f"grpo-mcore sft: the run was lost: its driver was killed by SIGKILL; it goes on from {saved.parent}"
        in out + err
    )
    steps = [line["step"] for line in Run(tmp_path, 0, out, err).metrics()]
    assert sorted(set(steps)) == list(range(1, 31)) and (tmp_path / "checkpoints" / "hf" / "config.json").is_file()
