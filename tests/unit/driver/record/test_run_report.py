"""What a run reports of each step: throughput, and the metrics of its machines."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from matplotlib.figure import Figure

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.driver.record.run_report import RunReport, prompt_metrics
from grpo_mcore.driver.rollouts.validation import Validation
from grpo_mcore.families import forward_flops, shape_of
from grpo_mcore.families.known import known_configs
from grpo_mcore.observe import Logger, read_metrics
from grpo_mcore.observe.band import BandError, band_text, make_band
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.observe.logger import check_loggers
from grpo_mcore.recipe import policy_layout
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import ImageSpan, Score
from tests.clocks import StandingClock
from tests.failing import failing
from tests.recipes import small_recipe

SHAPE = shape_of(next(iter(known_configs().values())))
STEP = {
    "num_samples": 2.0, "num_failed_samples": 0.0, "num_trained_samples": 0.0, "truncation_rate": 0.0, "reward": 0.5,
    "accuracy": 0.5, "generated_length": 3.0, "zero_advantage_rate": 0.0, "num_valid_tokens": 6.0,
}  # fmt: skip


def new_report(
    folder: Path, clock: Clock = REAL, schedule: Any = None, *, band: str | None = None, run: str | None = None
) -> RunReport:
    config = small_recipe(logger={"log_dir": str(folder), "alarms": {"band": band}}, cluster={"gpus_per_node": 2})
    logger = Logger(config.logger, run=run, clock=clock)
    policy: Any = SimpleNamespace(
        shape=SHAPE,
        precision="bfloat16",
        layout=policy_layout(config.policy.megatron_cfg, 2),
        cluster=SimpleNamespace(clock=clock),
        workers=[],
        train_times=[],
        teachers=None,
    )
    engines: Any = SimpleNamespace(colocated=True, workers=[], slots=[])
    return RunReport(logger, config, schedule or SimpleNamespace(step=0), policy, engines, None)


@pytest.mark.parametrize(("trained", "computed"), [(True, 1.0), (True, 0.25), (False, 1.0)])
def test_throughput_and_machines_of_a_step(tmp_path: Path, trained: bool, computed: float) -> None:
    report = new_report(tmp_path)
    logger = report.logger
    logger.machines, logger.peak_flops = lambda: {"node.0.cpu.util": 7.0}, 1e12
    samples = [SimpleNamespace(length=length) for length in (10, 30)]
    groups: Any = [SimpleNamespace(prompt={}, samples=samples, ended_at=(), scores=[Score(1.0, None, "", 0.0)] * 2)]
    clock: Any = SimpleNamespace(take=lambda: {"total": 8.0, "train": 2.0})
    metrics = STEP | {"tokens": 40.0} | ({"loss": 0.1, "plan/computed_tokens": computed} if trained else {})
    report.step(1, groups, metrics, clock)
    logger.close()
    machine, train = sorted(map(json.loads, (logger.log_dir / "metrics.jsonl").read_text().splitlines()), key=str)
    assert train["tokens_per_sec_per_gpu"] == 40 / 8 / 2 and machine["node.0.cpu.util"] == 7.0
    tflops = 3 * computed * forward_flops(SHAPE, [10, 30]) / 2 / 2 / 1e12
    assert train.get("train_tflops_per_gpu") == (pytest.approx(tflops) if trained else None)
    assert train.get("train_fp_utilization") == (pytest.approx(tflops) if trained else None)


def test_a_steps_line_says_which_attempts_to_score_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = [
        Score(1.0, None, "", 0.5, failures=("judge: HTTP 503", "judge: HTTP 503")),
        Score(None, None, "component 'judge' crashed", 1.5, failures=("judge: TimeoutError",)),
        Score(None, None, "the engine aborted the sample", 0.0),
        Score(0.0, None, "", 0.0),
    ]
    samples = [SimpleNamespace(uid="p0", generation_index=n, length=3) for n in range(4)]
    groups: Any = [SimpleNamespace(prompt={}, samples=samples, ended_at=(), scores=scores)]
    report = new_report(tmp_path)
    clock: Any = SimpleNamespace(take=lambda: {"total": 1.0})
    metrics = report.step(1, groups, STEP | {"tokens": 4.0, "loss": 0.1}, clock)
    report.step(2, [], STEP | {"tokens": 4.0, "loss": 0.1}, clock)
    report.logger.close()
    assert {name: value for name, value in metrics.items() if "scoring" in name or "sample_m" in name} == {
        "timing/reward/sample_mean": 0.5, "timing/reward/sample_max": 1.5, "scoring/failed_attempts": 3.0,
        "scoring/failed_attempts/judge": 3.0,
    }  # fmt: skip
    said = " ".join(capsys.readouterr().out.split())
    line = "scoring: attempts that failed: 3 (judge: HTTP 503 2, judge: TimeoutError 1); 2 of 4 samples have no reward"
    assert said.count(line) == 1
    assert "left out: 2; the first, p0#1: component 'judge' crashed; by reason: 2 (judge: TimeoutError 1, the e" in said


def test_a_step_whose_graded_rewards_are_all_0_has_no_accuracy(tmp_path: Path) -> None:
    report = new_report(tmp_path)
    clock: Any = SimpleNamespace(take=lambda: {"total": 1.0})
    failed = {"num_samples": 2.0, "num_failed_samples": 2.0, "accuracy": None}  # says nothing about the rewards
    graded, all_0 = {"reward": 0.25, "accuracy": None}, {"reward": 0.0, "accuracy": 0.0}
    for step, change in enumerate(({}, failed, graded, all_0), 1):
        metrics = {name: value for name, value in ({"tokens": 4.0} | STEP | change).items() if value is not None}
        report.step(step, [], metrics, clock)
    report.logger.close()
    lines = map(json.loads, (report.logger.log_dir / "metrics.jsonl").read_text().splitlines())
    assert [line.get("accuracy") for line in lines] == [0.5, None, None, None]


def test_graded_rewards_end_with_their_mean_and_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = StandingClock()
    report = new_report(tmp_path, clock)
    for step, accuracy, reward in ((0, 0.0, 0.0), (2, None, 0.5), (4, None, 0.75)):  # at first all rewards are 0
        metrics = {"accuracy": accuracy, "pass@2": accuracy, "reward": reward, "reward/form": reward / 2}
        metrics |= {"num_samples": 8.0, "num_failed_samples": 0.0}
        report.validation(step, Validation(metrics, [], 1.0))
    said = capsys.readouterr().out
    assert said.count("set\nenv.NAME.solved_at") == 1 and "after step 4: reward 0.75  reward/form 0.375  num" in said
    for name, start, end in (("refit", 1.0, 3.0), ("refit/commit", 1.0, 2.0), ("validation", 3.0, 3.5)):
        report.span(name, start, end)
    clock.sleep(4.0)
    summary = report.finish(RunEnd("finished", "done", 0))
    phases = summary["seconds_by_phase"]
    assert (phases["refit"], phases["validation"]) == (2.0, 0.5) and "refit/commit" not in phases
    assert phases["start"] + 4 <= sum(phases.values()) < phases["start"] + 5, "no second is untold"
    assert "after step 4" in (tmp_path / "exp_001" / "console.txt").read_text()
    assert "reward/form  0.000 at the first validation, 0.375 at the last" in capsys.readouterr().out
    assert summary["val_accuracy_after"] is None and summary["val_reward_after"] == 0.75
    assert (summary["val_reward/form_before"], summary["val_reward/form_after"]) == (0.0, 0.375)
    report.logger.close()


def test_alarms_and_outages_are_in_the_console_and_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose engines had stale weights, and whose tracker is down."""
    schedule = SimpleNamespace(step=0)
    report = new_report(tmp_path, schedule=schedule)
    clock: Any = SimpleNamespace(take=lambda: {"total": 1.0})
    for step in (1, 2):
        report.step(step, [], STEP | {"tokens": 4.0, "loss": 0.1, "token_mult_prob_error": 1.17}, clock)
        schedule.step = step
    monkeypatch.setattr(report.logger, "outages", lambda: {"logger.mlflow_enabled": "lacks 3 calls: 503"})
    summary = report.finish(RunEnd("finished", "done", 0))
    report.logger.close()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("said once: engine and policy disagree: under the same weights") == 1
    assert "ALARM, step 1 engine and policy disagree" in said and "logger.mlflow_enabled lacks 3 calls: 503" in said
    written = json.loads((report.logger.log_dir / "summary.json").read_text())
    assert [(alarm["kind"], alarm["step"]) for alarm in written["alarms"]] == [("engine_mismatch", 1)]
    assert written["outages"] == summary["outages"] == {"logger.mlflow_enabled": "lacks 3 calls: 503"}


def test_prompts_that_are_repeated_are_counted() -> None:
    logs: list[Any] = [[{"role": "user", "content": text}] for text in ("1+1=", "2+2=", "1+1=", "1+1=")]
    logs[3][0]["images"] = (ImageSpan(1, 4, "digest", (1, 2, 2)),)
    prompts: list[Any] = [{"uid": str(number), "message_log": log} for number, log in enumerate(logs)]
    assert prompt_metrics([Group(prompt, (), ()) for prompt in prompts]) == {"distinct_prompts": 0.75}
    assert prompt_metrics([Group(cast(Any, {"uid": "of a replay"}), (), ())]) == {}


def test_a_resumed_run_is_compared_with_its_band_from_its_first_step_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], package_log: pytest.LogCaptureFixture
) -> None:
    recipe = new_report(tmp_path).config.model_dump(mode="json")
    runs = {seed: (recipe, [{"step": step, "reward": 0.1 + seed / 50} for step in (1, 2, 3)], []) for seed in range(20)}
    (file := tmp_path / "band.json").write_text(band_text(make_band("own", "1.0", runs)))
    clock: Any = SimpleNamespace(take=lambda: {"total": 1.0})
    first = new_report(tmp_path, band=str(file))
    for step in (1, 2):
        first.step(step, [], STEP | {"tokens": 4.0, "reward": 0.3}, clock)
    first.logger.close()
    resumed = new_report(tmp_path, schedule=SimpleNamespace(step=2), band=str(file), run="exp_002")
    assert first.alarms.band is not None and resumed.alarms.band is not None
    assert resumed.alarms.band.evidence == first.alarms.band.evidence > 0 and not package_log.records
    assert resumed.trouble() == resumed.trouble_facts() == {"band": "inside the band of 20 runs"}
    resumed.step(3, [], STEP | {"tokens": 4.0, "reward": 9.0}, clock)
    assert resumed.trouble()["alarms"][0]["kind"] == "left_band"
    assert resumed.trouble()["band"] == "outside the band of 20 runs"
    assert "ALARM in step 3, said once: this run is not like the 20 of its band (own)" in capsys.readouterr().out
    file.write_text(file.read_text().replace('"digest"', '"of"'))
    assert new_report(tmp_path, band=str(file)).alarms.band is None and "is damaged" in package_log.text
    with pytest.raises(BandError, match="is damaged"):
        check_loggers(resumed.config.logger)


def test_files_that_cannot_be_written_do_not_change_the_end(
    tmp_path: Path, package_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the run is over."""
    monkeypatch.setattr(Figure, "savefig", failing(errno.ENOSPC))
    schedule = SimpleNamespace(step=0)
    report = new_report(tmp_path, schedule=schedule)
    report.validation(1, Validation({"accuracy": 0.5, "reward": 0.5}, [], 1.0))
    schedule.step = 1
    assert report.finish(RunEnd("finished", "done", 0))["end"] == "done"
    assert "reward_curve.png is left out, since it failed: No space left" in package_log.text
    assert (report.logger.log_dir / "summary.json").exists()
    report.logger.close()


def test_a_log_folder_that_is_removed_is_made_anew_after_the_step(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    report = new_report(tmp_path, schedule=SimpleNamespace(step=0))
    clock: Any = SimpleNamespace(take=lambda: {"total": 1.0})
    folder = report.logger.log_dir
    report.step(1, [], STEP | {"tokens": 4.0, "loss": 0.1}, clock)
    shutil.rmtree(folder)
    report.step(2, [], STEP | {"tokens": 4.0, "loss": 0.1}, clock)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl", "train")] == [1, 2]
    for name in ("events.jsonl", "console.txt", "hyperparams.json"):
        assert (folder / name).stat().st_size, name
    assert package_log.text.count("metrics.jsonl was removed while the run goes on: it is made anew") == 1
    report.logger.close()
