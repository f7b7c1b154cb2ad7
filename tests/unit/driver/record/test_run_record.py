"""One event reaches the schedule, the ledger, the report and the prompt stream."""

from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.driver.checkpoints.checkpoint_files import GRPOSaveState, first_save_state
from grpo_mcore.driver.checkpoints.checkpoints import SavedPosition
from grpo_mcore.driver.record.run_record import RunRecord, start_record, start_schedule
from grpo_mcore.driver.rollouts.validation import Validation
from grpo_mcore.observe import LEDGER_FILE, Timeline, audit, read_ledger
from grpo_mcore.observe.alarms import StepAlarms
from grpo_mcore.observe.exit_codes import STOPPED_EARLY, TERMINATED, UNSAVED, RunEnd
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout import schedule as s
from tests.clocks import StandingClock
from tests.unit.step.step_cases import config, group


class Loader:
    """Endless batches of two prompts: p0, p1; p2, p3; ..."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Any:
        while True:
            self.number += 2
            yield [{"uid": f"p{self.number - 2}"}, {"uid": f"p{self.number - 1}"}]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Report:
    """Writes down what it is told, in order."""

    run_name = "exp_001"
    time = StandingClock()

    def __init__(self) -> None:
        self.alarms = StepAlarms(stop_after=1)
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.told.append(name)

    def step(self, step: int, groups: Any, metrics: dict[str, float], clock: Timeline) -> dict[str, float]:
        self.told.append("step")
        return metrics | {"tokens_per_second": 7.0}

    def finish(self, end: RunEnd) -> dict[str, Any]:
        return end.plain()


def record_in(folder: Path, *, report: Report | None = None, position: SavedPosition | None = None) -> RunRecord:
    return new_record(config(max_num_steps=2, val_at_end=False), folder, report=report, position=position)


def new_record(
    recipe: MasterConfig,
    folder: Path,
    *,
    report: Report | None = None,
    position: SavedPosition | None = None,
    validates: bool = False,
    state: GRPOSaveState | None = None,
) -> RunRecord:
    state = state or first_save_state()
    schedule = start_schedule(recipe, state, validates=validates)
    return start_record(recipe, schedule, state, Loader(), folder, report or Report(), position)  # type: ignore[arg-type]


def events(folder: Path) -> list[str]:
    return [entry["event"] for entry in read_ledger(folder / LEDGER_FILE)]


def train_a_step(record: RunRecord, *, failing: bool = False) -> None:
    """Carry the schedule's commands out until a step is trained."""
    while True:
        match record.schedule.next():
            case s.Refit():
                record.refitted(None)  # type: ignore[arg-type]
            case s.Dispatch(count):
                batch = record.prompts.take(count)
                record.dispatched(batch, data_ended=len(batch) < count)
            case s.Await():
                uid = next(uid for uid in record.schedule.in_flight if uid not in record.schedule.finished)
                rewards: list[float | None] = [None] * 4 if failing and uid == "p0" else [1.0, 0.0, 1.0, 0.0]
                record.group_finished(group(uid, rewards), informative=True)
            case s.Train() as command:
                groups = [group(uid, [1.0, 0.0, 1.0, 0.0]) for uid in command.groups]
                record.trained(command, groups, {"loss": 0.1, "num_valid_tokens": 12.0}, Timeline())
                return
            case command:
                pytest.fail(f"unexpected: {command}")


def test_a_step_is_told_to_all_four(tmp_path: Path) -> None:
    report = Report()
    with record_in(tmp_path, report=report) as record:
        train_a_step(record)
        assert record.schedule.step == 1 and not record.schedule.in_flight
        assert report.told == ["refit", "dispatched", "step"]
        assert not record.prompts.state_dict()["waiting"]
        record.ended("all steps are done", StopRequest())
    assert events(tmp_path) == ["started", "dispatched", "finished", "finished", "trained", "ended"]
    assert not audit(read_ledger(tmp_path / LEDGER_FILE)).flaws


def test_a_failed_group_is_consumed_and_replaced(tmp_path: Path) -> None:
    report = Report()
    with record_in(tmp_path, report=report) as record:
        train_a_step(record, failing=True)
    assert "group_failed" in report.told
    assert events(tmp_path).count("dispatched") == 2 and events(tmp_path).count("failed") == 1


def test_a_greedy_first_sample_is_no_part_of_the_pass_rate(tmp_path: Path) -> None:
    with new_record(config(adv_estimator={"name": "remax"}), tmp_path) as record:
        record.dispatched(record.prompts.take(2), data_ended=False)
        record.group_finished(group("p0", [0.0, 1.0, 1.0, 1.0]), informative=True)
    assert record.prompts.rates.prompts["p0"].solved_in_a_row == 1
    assert record.prompts.rates.prompts["p0"].samples == 3


def test_a_checkpoint_and_a_run_that_resumes_from_it(tmp_path: Path) -> None:
    with record_in(tmp_path) as record:
        record.refitted(None)  # type: ignore[arg-type]
        record.dispatched(record.prompts.take(2))
        record.group_finished(group("p1", [1.0, 0.0, 1.0, 0.0]), informative=True)
        snapshot = record.snapshot()
    assert snapshot.data_state["in_flight"] == {"p0": 1, "p1": 1} and snapshot.data_state["ledger"] == 3
    assert snapshot.save_state == first_save_state() | {"log_run": "exp_001"} and not snapshot.metrics

    data = snapshot.data_state
    with record_in(tmp_path, position=SavedPosition(tmp_path, data, data["in_flight"], data["ledger"])) as record:
        record.refitted(None)  # type: ignore[arg-type]
        batch = record.prompts.take(2)
        assert [prompt["uid"] for prompt in batch] == ["p0", "p1"]
        record.resumed(batch, [1, 1], [group("p1", [1.0, 0.0, 1.0, 0.0])])
        assert record.schedule.unfinished(["p0", "p1"]) == ["p0"]
        train_a_step(record)
    found = audit(read_ledger(tmp_path / LEDGER_FILE))
    assert found.starts == 2 and not found.flaws


def test_a_run_that_resumes_beside_the_ledger_of_another_run_begins_a_new_one(tmp_path: Path) -> None:
    with record_in(tmp_path) as record:
        train_a_step(record)
        data = record.snapshot().data_state
    other = (tmp_path / LEDGER_FILE).read_text().replace("p0", "q0")
    (tmp_path / LEDGER_FILE).write_text(other)
    position = SavedPosition(tmp_path, data, {}, data["ledger"], data["ledger_digest"])
    with record_in(tmp_path, position=position):
        pass
    (aside,) = tmp_path.glob("*.of-another-run-*")
    assert aside.read_text() == other and events(tmp_path) == ["started"]


def test_a_request_to_stop_is_recorded_again_when_it_becomes_urgent(tmp_path: Path) -> None:
    stop = StopRequest()
    with record_in(tmp_path) as record:
        record.refitted(None)  # type: ignore[arg-type]
        record.dispatched(record.prompts.take(2))
        record.stop_asked(stop)
        assert record.schedule.asked is None
        stop.ask("the time is up")
        record.stop_asked(stop)
        assert record.schedule.asked == "the time is up" and record.schedule.last_step == 1
        stop.ask("SIGTERM", at_once=True)
        record.stop_asked(stop)
        assert record.schedule.last_step == 0
        asked = [entry for entry in read_ledger(tmp_path / LEDGER_FILE) if entry["event"] == "stop_asked"]
        assert [(entry["why"], entry["at_once"]) for entry in asked] == [
            ("the time is up", False),
            ("the time is up", True),
        ]
        assert record.ended("the time is up", stop) == {
            "end": "the time is up", "end_kind": "terminated", "exit_code": TERMINATED, "unsaved": 0,
            "stopped_early": True, "terminated": True,
        }  # fmt: skip


def test_an_alarm_may_stop_the_run(tmp_path: Path) -> None:
    stop, report = StopRequest(), Report()
    with record_in(tmp_path, report=report) as record:
        record.stop_asked(stop)
        assert stop.reason is None
        report.alarms.of_step(1, {"token_mult_prob_error": 3.0})
        record.stop_asked(stop)
        assert record.schedule.asked == "the alarm engine_mismatch for 1 steps (logger.alarms.stop_after)"
        assert not stop.at_once


def test_a_validation_may_end_the_run(tmp_path: Path) -> None:
    recipe = config(max_num_steps=2, val_at_start=True)
    recipe.grpo.stop_at_validation_metric, recipe.grpo.stop_at_validation_threshold = "val:accuracy", 0.9
    with new_record(recipe, tmp_path, validates=True) as record:
        assert record.schedule.next() == s.Refit(1)
        record.refitted(None)  # type: ignore[arg-type]
        assert record.schedule.next() == s.Validate(0)
        record.validated(0, Validation({"accuracy": 0.95, "reward": 0.9}, [], 1.0))
        assert isinstance(record.schedule.next(), s.Finish)


def test_the_counters_of_a_checkpoint_follow_the_events_and_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    with record_in(tmp_path) as record:
        train_a_step(record, failing=True)
        record.validated(1, Validation({"accuracy": 0.5, "reward": 0.25}, [], 1.0))
        first = record.snapshot()
    assert first.save_state == {
        "consumed_samples": 3, "current_step": 1, "total_steps": 1, "current_epoch": 0, "total_valid_tokens": 12,
        "log_run": "exp_001", "val_reward": 0.25, "val_metrics": {"accuracy": 0.5, "reward": 0.25},
    }  # fmt: skip
    assert first.metrics == {
        "train:loss": 0.1, "train:num_valid_tokens": 12.0, "train:tokens_per_second": 7.0, "val:accuracy": 0.5,
        "val:reward": 0.25,
    }  # fmt: skip
    recipe = config(max_num_steps=2, val_at_end=False)
    with new_record(recipe, tmp_path, state=first.save_state) as record:
        assert record.schedule.step == 1 and record.snapshot().save_state == first.save_state
        train_a_step(record)
        state = record.snapshot().save_state
    assert (state["current_step"], state["consumed_samples"], state["total_valid_tokens"]) == (2, 5, 24)
    assert state["val_reward"] == 0.25 and "val_metrics" not in state, "no validation came after step 2"


def test_a_ledger_that_vanishes_is_made_anew_by_the_next_checkpoint(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    with record_in(tmp_path) as record:
        train_a_step(record)
        path = tmp_path / LEDGER_FILE
        before = path.read_bytes()
        path.unlink()
        saved = record.snapshot().data_state
        assert path.read_bytes() == before and saved["ledger_digest"] == record.ledger.last_digest(saved["ledger"])
        assert "ledger.jsonl was removed while the run goes on: it is made anew" in package_log.text
        record.saved(1, tmp_path / "step_1")
    assert events(tmp_path)[-1] == "saved" and not audit(read_ledger(tmp_path / LEDGER_FILE)).flaws


@pytest.mark.parametrize("keeps_checkpoints", [True, False])
def test_steps_that_are_not_saved_are_counted(tmp_path: Path, keeps_checkpoints: bool) -> None:
    recipe = config(max_num_steps=2, val_at_end=False)
    recipe.checkpointing.enabled = keeps_checkpoints
    stop = StopRequest()
    with new_record(recipe, tmp_path) as record:
        train_a_step(record)
        stop.ask("the time is up")
        record.stop_asked(stop)
        summary = record.ended("the time is up", stop, unsaved=1 if keeps_checkpoints else None)
        assert (summary["end_kind"], summary["exit_code"], summary["unsaved"]) == ("stopped", UNSAVED, 1)
        record.saved(1, tmp_path / "step_1")
        assert record.ended("the time is up", stop)["exit_code"] == STOPPED_EARLY
        assert record.ended("all 2 steps are done", stop)["end_kind"] == "finished"
