"""A record is followed entry by entry; what chance did comes at its place, and where runs part, that is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mcore.base.stopping import StopNow, StopRequest
from grpo_mcore.cluster import LocalCluster
from grpo_mcore.driver.checkpoints.checkpoints import SavedPosition
from grpo_mcore.driver.record.followed_run import FollowedRun, FollowError
from grpo_mcore.driver.record.recorded_rollouts import RecordedRollouts
from grpo_mcore.observe.samples import SampleFiles
from grpo_mcore.recipe import MasterConfig
from tests.unit.step import step_cases

Entry = dict[str, Any]
STARTED: Entry = {"event": "started", "kept": 0, "step": 0, "missing": 0, "max_age": 1}
SAVED: Entry = {"event": "saved", "step": 1}
RESTARTED: Entry = {"event": "restarted", "worker": "engine-0", "why": "it died"}
ASKED: Entry = {"event": "stop_asked", "why": "SIGUSR1", "at_once": False}
ENDED: Entry = {"event": "ended", "why": "all steps are done", "data_ended": False}


def recipe(**sections: Any) -> MasterConfig:
    return MasterConfig.model_validate(step_cases.config().model_dump(mode="json") | sections)


def dispatched(*uids: str) -> Entry:
    return {"event": "dispatched", "uids": list(uids), "version": 1}


def finished(uid: str, **more: Any) -> Entry:
    return {"event": "finished", "uid": uid, "version": 1, "scored": 1, "rate": 1.0, **more}


def trained(step: int, *uids: str) -> Entry:
    return {"event": "trained", "uids": list(uids), "step": step, "version": step}


def row(uid: str, **more: Any) -> Entry:
    turns = [{"role": "assistant", "text": uid, "tokens": 1, "generated": True, "flag": None}]
    base = {"uid": uid, "generation": 0, "task": "t", "reward": 1.0, "rewards": "{}", "reason": "", "truncated": False}
    base |= {"score_seconds": 0.0, "terminated": True, "finish_reason": "stop", "turns": turns}
    base |= {"versions": [], "token_ids": np.array([3]), "engine_logprobs": np.array([-0.5], np.float32)}
    base["versions"] = [{"version": 1, "first": 0, "end": 1}]
    return base | {"policy_logprobs": np.array([-0.5], np.float32), **more}


def record_of(folder: Path, entries: list[Entry], samples: dict[int, list[Entry]]) -> FollowedRun:
    """Write the record of a run, and open it."""
    logs = folder / "logs" / "exp_001"
    places = recipe(checkpointing={"checkpoint_dir": str(folder / "saved")}, logger={"log_dir": str(folder / "logs")})
    logs.mkdir(parents=True)
    files = SampleFiles(logs / "samples", str, 1e9)
    for step, rows in samples.items():
        files.add("train", step, lambda rows=rows: rows)
    files.close()
    (logs / "hyperparams.json").write_text(json.dumps(places.model_dump(mode="json")))
    (folder / "saved").mkdir()
    (folder / "saved" / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return FollowedRun(logs)


def written(run: FollowedRun, *entries: Entry) -> list[Entry]:
    """Return what a ledger gets in place of the entries of the run that follows."""
    return [line for entry in entries for line in run.followed_by(entry)]


def rollouts_of(run: FollowedRun, *uids: str, stop: StopRequest | None = None) -> RecordedRollouts:
    rollouts = RecordedRollouts(run, LocalCluster().store, stop or StopRequest())
    prompts: Any = [{"uid": uid, "task_name": "t", "extra_env_info": {"ground_truth": "7"}} for uid in uids]
    rollouts.dispatch(prompts, sampling=None, generations=1, step=1)  # type: ignore[arg-type]
    return rollouts


def test_groups_come_in_the_recorded_order_with_what_chance_did_between_them(tmp_path: Path) -> None:
    """`c` is returned, generated again, and trained on in the second step: it has samples in both files."""
    entries = [
        STARTED, dispatched("a", "b", "c"), RESTARTED, finished("b"), finished("c"), finished("a"),
        trained(1, "b", "a"), {"event": "returned", "uids": ["c"]}, dispatched("c"), SAVED, finished("c"),
        trained(2, "c"), ENDED,
    ]  # fmt: skip
    samples = {1: [row("c", reward=0.0), row("b"), row("a")], 2: [row("c")]}
    run = record_of(tmp_path, entries, samples)
    assert run.begin(None) is False
    rollouts = rollouts_of(run, "a", "b", "c")
    assert written(run, entries[1]) == [entries[1]]
    groups = []
    for entry in entries[3:6]:
        groups.append(rollouts.next_group())
        assert written(run, entry)[-1] == entry
    assert [group.uid for group in groups] == ["b", "c", "a"]
    assert [group.scores[0].reward for group in groups] == [1.0, 0.0, 1.0]
    assert groups[0].prompt["extra_env_info"] == {"ground_truth": "7"}  # the run's own prompt
    assert written(run, *entries[6:9]) == entries[6:9]
    with pytest.raises(FollowError, match='has .*"finished", "uid": "c".* next; this run waits for one of the groups'):
        rollouts.next_group()
    rollouts = rollouts_of(run, "c")
    assert rollouts.next_group().scores[0].reward == 1.0
    # This run saves sooner than the recorded one, whose save comes before the group.
    assert written(run, SAVED) == [] and written(run, entries[10]) == [SAVED, entries[10]]
    assert written(run, trained(2, "c"), ENDED) == [trained(2, "c"), ENDED]


def test_restarts_are_copied_to_their_place(tmp_path: Path) -> None:
    run = record_of(tmp_path, [STARTED, RESTARTED, dispatched("a"), RESTARTED], {})
    run.begin(None)
    assert written(run, dispatched("a"), ENDED) == [RESTARTED, dispatched("a"), RESTARTED, ENDED]


def test_a_save_that_has_not_ended_is_written_when_it_has(tmp_path: Path) -> None:
    run = record_of(tmp_path, [STARTED, SAVED, dispatched("a"), ENDED], {})
    run.begin(None)
    assert written(run, dispatched("a"), SAVED, ENDED) == [dispatched("a"), SAVED, ENDED]


def test_an_entry_that_is_not_the_recorded_one_ends_the_run(tmp_path: Path) -> None:
    run = record_of(tmp_path, [STARTED, dispatched("a")], {})
    run.begin(None)
    with pytest.raises(FollowError, match=r'"uids": \["a"\].* next; this run has .*"uids": \["b"\]'):
        written(run, dispatched("b"))
    written(run, dispatched("a"))
    with pytest.raises(FollowError, match="ends here; this run has"):
        written(run, dispatched("b"))


def test_the_run_is_asked_to_stop_where_the_recorded_one_was(tmp_path: Path) -> None:
    run = record_of(tmp_path, [STARTED, dispatched("a"), ASKED, finished("a"), trained(1, "a")], {1: [row("a")]})
    run.begin(None)
    assert run.stop() is None
    written(run, dispatched("a"))
    assert run.stop() == ("SIGUSR1", False)
    assert written(run, ASKED) == [ASKED] and run.stop() is None


def test_a_run_that_is_stopped_itself_goes_on_with_what_is_under_way(tmp_path: Path) -> None:
    entries = [STARTED, dispatched("a"), dispatched("b"), finished("b"), finished("a"), trained(1, "b", "a")]
    run = record_of(tmp_path, entries, {1: [row("b"), row("a")]})
    run.begin(None)
    mine = {"event": "stop_asked", "why": "SIGTERM", "at_once": False}
    assert written(run, dispatched("a"), mine) == [dispatched("a"), mine]
    assert rollouts_of(run, "a").next_group().uid == "a"  # `b` was not dispatched
    assert written(run, finished("a"), trained(1, "a")) == [finished("a"), trained(1, "a")]


@pytest.mark.parametrize("unknown", [[], [finished("a")]])
def test_the_run_stops_where_the_record_ends(tmp_path: Path, unknown: list[Entry]) -> None:
    """Also where a group has finished and no step was trained on it any more: its samples are not recorded."""
    run = record_of(tmp_path, [STARTED, dispatched("a"), *unknown], {})
    run.begin(None)
    written(run, dispatched("a"))
    stop = StopRequest()
    with pytest.raises(StopNow):
        rollouts_of(run, "a", stop=stop).next_group()
    assert stop.at_once and stop.reason == run.end


RESUMED: list[Entry] = [
    STARTED, dispatched("a", "b"), finished("a"), trained(1, "a"), finished("b"), trained(2, "b"),  # void from here on
    STARTED | {"kept": 4, "step": 1}, dispatched("b"), finished("b", kept=True), dispatched("c"),
    finished("c"), trained(2, "b", "c"), ENDED,
]  # fmt: skip


def test_a_run_that_resumed_is_followed_up_to_its_checkpoint_and_from_it_on(tmp_path: Path) -> None:
    run = record_of(tmp_path, RESUMED, {1: [row("a")], 2: [row("b"), row("c")]})
    run.begin(None)
    written(run, *RESUMED[1:4])
    assert run.next_group(["b"]) is None  # what came then is void, and its samples are those of the later attempt
    position = SavedPosition(tmp_path, {}, {"b": 1}, 4)
    assert run.begin(position) is False
    assert written(run, *RESUMED[7:10]) == RESUMED[7:10]
    assert run.next_group(["c"]) == ("c", 2)


def test_a_run_that_did_not_stop_at_a_checkpoint_goes_on_there(tmp_path: Path) -> None:
    entries = [STARTED, dispatched("a"), finished("a"), trained(1, "a"), dispatched("b"), finished("b"), ENDED]
    run = record_of(tmp_path, entries, {})
    assert run.begin(SavedPosition(tmp_path, {}, {}, 4)) is True
    assert written(run, dispatched("b")) == [dispatched("b")]
    own = SavedPosition(tmp_path, {"followed": 5}, {}, 9)  # of a run that followed this one
    assert run.begin(own) is True and run.entries == 5
    with pytest.raises(FollowError, match="ends before the checkpoint: it has 7 entries of 8"):
        run.begin(SavedPosition(tmp_path, {}, {}, 8))
    run.copy_ledger(copied := tmp_path / "new" / "ledger.jsonl", 4)
    assert [json.loads(line) for line in copied.read_text().splitlines()] == entries[:4]
    run.copy_ledger(copied, 5)
    assert len(copied.read_text().splitlines()) == 4  # a ledger that is there is the run's own


def test_log_probs_are_compared_bit_by_bit(tmp_path: Path) -> None:
    nan = np.array([np.nan], np.float32)
    samples = {1: [row("a"), row("n", policy_logprobs=nan)], 2: [row("b"), row("c")], 3: [row("x")]}
    run = record_of(tmp_path, [STARTED], samples)
    columns = {name: {"policy": np.array([value], np.float32)} for name, value in (("same", -0.5), ("off", -0.25))}
    run.samples("a", 1), run.samples("b", 2)
    run.compare_logprobs(1, ["a#0", "n#0"], {0: columns["same"], 1: {"policy": nan}})
    assert run.compared.first is None and run.compared.worst == 0 and run.compared.tokens == 2
    run.compare_logprobs(2, ["b#0", "c#0"], {0: columns["same"], 1: columns["off"]})
    assert str(run.compared.first) == "step 2: the log-prob of token 0 of sample c#0: -0.25, recorded -0.5"
    assert run.compared.worst == 0.25
    nearly = record_of(tmp_path / "nearly", [STARTED], samples)
    nearly.compare_logprobs(1, ["a#0"], {0: {"policy": np.array([-0.50001], np.float32)}})
    assert str(nearly.compared.first).endswith("(rounding: another number of threads or layout?)")
    run.compare_logprobs(3, ["d#0"], {0: columns["same"]})
    assert run.compared.first is not None and run.compared.first.step == 2 and run.compared.steps == [1, 2, 3]


def test_metrics_are_compared_but_those_of_the_machine(tmp_path: Path) -> None:
    run = record_of(tmp_path, [STARTED, trained(1, "a")], {})
    line = {"step": 1, "prefix": "train", "loss": 0.5, "timing/total": 1.0, "unix_time": 1.0}
    (run.folder / "metrics.jsonl").write_text(json.dumps(line | {"num_queued_samples": 5.0}) + "\n")
    assert run.begin(None) is False and run.most_queued() == 5
    line["num_queued_samples"] = 5.0
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "metrics.jsonl").write_text(json.dumps(line | {"timing/total": 2.0, "unix_time": 2.0}) + "\n")
    assert run.conclude(mine)["differs_first"] is None
    (mine / "metrics.jsonl").write_text(json.dumps(line | {"loss": 0.25, "new": 1.0}) + "\n")
    assert run.conclude(mine)["differs_first"] == "step 1: train/loss: 0.25, recorded 0.5"


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    run = record_of(tmp_path, [STARTED], {})
    with pytest.raises(FollowError, match="the train samples of step 3 are not recorded"):
        run.samples("a", 3)
    with pytest.raises(FollowError, match="checkpointing.checkpoint_dir .* is that of the run to follow"):
        run.check(recipe(checkpointing={"checkpoint_dir": str(tmp_path / "saved")}))
    with pytest.raises(FollowError, match="logger.log_dir .* is that of the run to follow"):
        run.check(recipe(logger={"log_dir": str(tmp_path / "logs")}))
    with pytest.raises(FollowError, match="logger.samples must be all"):
        run.check(recipe(logger={"samples": "none"}))
    changed = run.check(recipe(checkpointing={"checkpoint_dir": "other"}, logger={"log_dir": "other"}))
    assert {change.key for change in changed} == {"checkpointing.checkpoint_dir", "logger.log_dir"}
    (tmp_path / "saved" / "ledger.jsonl").rename(tmp_path / "elsewhere")
    with pytest.raises(FollowError, match=r"its ledger, .*ledger.jsonl, is not there"):
        FollowedRun(run.folder)
    text = (run.folder / "hyperparams.json").read_text()
    (run.folder / "hyperparams.json").write_text(text.replace('"samples": "all"', '"samples": "sampled"'))
    with pytest.raises(FollowError, match="its logger.samples was sampled"):
        FollowedRun(run.folder)
    with pytest.raises(FollowError, match="is the log folder of no run"):
        FollowedRun(tmp_path)
