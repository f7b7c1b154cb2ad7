"""The samples of an evaluation on disk, and the scores that follow from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.algorithms.evaluate import EvalError, Sample, SampleLog, task_scores
from grpo_mcore.base.files import UnusableFolder
from grpo_mcore.driver.checkpoints.lease import FolderInUse, Lease
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.evaluation import _check_settings, evaluate, report_table


def sample(uid: str, index: int, reward: float | None = 1.0, **more: Any) -> Sample:
    line = {"model": "m", "task": "t", "uid": uid, "seed": 1, "index": index, "answer": "a", "reward": reward}
    return line | {"solved": reward if reward is None else reward >= 1, "tokens": 4, "truncated": False} | more


def test_a_log_keeps_whole_groups_only(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path, 2)
    log.add([sample("t:0", 0), sample("t:0", 1, answer="ä")])
    log.add([sample("t:1", 0), sample("t:1", 1)])
    log.close()
    whole = path.read_text()
    for torn in (whole[:-3], whole[: whole.rindex("{")]):  # in the middle of a line; between two lines
        path.write_text(torn)
        log = SampleLog(path, 2)
        assert list(log.groups) == [("m", 1, "t:0")]
        assert path.read_text() == "".join(whole.splitlines(keepends=True)[:2])
        log.add([sample("t:1", 0), sample("t:1", 1)])
        log.close()
        assert path.read_text() == whole


def test_a_log_that_was_cut_within_a_letter_is_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path, 1)
    log.add([sample("t:0", 0)])
    log.add([sample("t:1", 0, answer="ä")])
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index("ä".encode()) + 1])
    assert list(SampleLog(path, 1).groups) == [("m", 1, "t:0")]
    path.write_bytes(whole.replace("ä".encode(), b"\xff"))  # a damaged answer is made again, not read as another one
    assert list(SampleLog(path, 1).groups) == [("m", 1, "t:0")]


def test_samples_without_a_reward_are_made_again(tmp_path: Path) -> None:
    """The sandbox or the reward model was away."""
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path, 2)
    log.add([sample("t:0", 0), sample("t:0", 1)])
    log.add([sample("t:1", 0), sample("t:1", 1, None)])
    assert [log.is_scored("m", 1, uid) for uid in ("t:0", "t:1", "t:2")] == [True, False, False]
    log.add([sample("t:1", 0), sample("t:1", 1, 0.0)])
    log.close()
    again = SampleLog(path, 2)
    assert again.is_scored("m", 1, "t:1") and len(path.read_text().splitlines()) == 4


def test_two_evaluations_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """Each would drop the lines of the other: jobs of an array, one for each checkpoint."""
    recipe = {"policy": {"model_name": "m"}, "data": {"validation": {"data_path": "x"}}}
    config = MasterConfig.model_validate(recipe | {"eval": {"save_path": str(tmp_path)}})
    with Lease(tmp_path), pytest.raises(FolderInUse, match=rf"eval.save_path {tmp_path} is in use by process"):
        evaluate(config, [])
    assert not list(tmp_path.iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "away")
    config.eval.save_path = str(tmp_path / "link" / "x")
    with pytest.raises(UnusableFolder, match=r"eval.save_path: .*/link is a link to .*away, which is not there"):
        evaluate(config, [])


def test_scores_of_each_model_and_task_do_not_depend_on_the_order_of_the_lines() -> None:
    lines = [
        sample("t:0", 0, 1.0, answer="7"), sample("t:0", 1, 0.0, answer="8"),
        sample("t:0", 0, 0.0, answer="8", seed=2), sample("t:0", 1, 0.0, answer="8", seed=2, truncated=True),
        sample("t:1", 0, 1.0), sample("t:1", 1, None), sample("t:1", 0, 0.5, seed=2), sample("t:1", 1, 1.0, seed=2),
        sample("u:0", 0, 0.0, task="u"), sample("u:0", 1, 0.0, task="u"),
    ]  # fmt: skip
    first, other = task_scores(lines, 4, 2)
    assert (first.task, first.prompts, first.samples, first.failed) == ("t", 2, 8, 1)
    assert first.accuracy is not None
    assert first.accuracy[0] == pytest.approx((1 / 4 + 2 / 3) / 2)
    assert first.reward == pytest.approx(3.5 / 7)
    assert first.metrics["pass@2"] == pytest.approx((1 / 2 + 1.0) / 2)
    assert first.metrics["pass@4"] == 1.0, "only the prompt with four scored samples counts"
    assert first.metrics["cons@4"] == 0.0 and first.metrics["cons@2"] == pytest.approx((1 / 2 + 1.0) / 2)
    assert first.truncated == 1 / 8 and other.accuracy is not None and other.accuracy[0] == 0.0
    again = task_scores([*lines[7::-1], *lines[8:]], 4, 2)
    assert [score.plain() for score in again] == [score.plain() for score in (first, other)]


def test_graded_rewards_have_a_mean_and_no_accuracy() -> None:
    (score,) = task_scores([sample("t:0", 0, 0.5, solved=None), sample("t:0", 1, 1.0, solved=True)], 2, 2)
    assert score.reward == 0.75 and score.accuracy is None and set(score.metrics.values()) == {None}
    assert "| -        | -             | 0.7500 |" in report_table([score], "pass@k", 2)[2]


def test_the_table_ends_with_the_metric_that_was_asked_for() -> None:
    scores = task_scores([sample("t:0", 0), sample("t:0", 1, 0.0, answer=None)], 2, 2)
    head, rule, row = report_table(scores, "cons@k", 2)
    assert len(head) == len(rule) == len(row)
    names = [cell.strip() for cell in head.split("|")[1:-1]]
    assert names[4:9] == ["accuracy", "95 % interval", "reward", "pass@2", "cons@2"]
    assert [cell.strip() for cell in row.split("|")[1:-1]][:5] == ["m", "t", "1", "2", "0.5000"]


def test_samples_of_other_contents_at_the_same_paths_are_not_taken(tmp_path: Path) -> None:
    """A checkpoint that was trained anew, or a changed data file, must not get the scores of the one before."""
    model, rows, folder = tmp_path / "step_4", tmp_path / "rows.jsonl", tmp_path / "eval"
    recipe = {"policy": {"model_name": "m"}, "data": {"validation": {"data_path": str(rows)}}, "eval": {}}
    config, sources = MasterConfig.model_validate(recipe), {"run/step_4": str(model)}
    folder.mkdir()
    model.mkdir()
    texts = {
        "training_info.json": json.dumps({"save_state": {"current_step": 4}, "metrics": {}}),
        "config.yaml": json.dumps(recipe),
        "digests.json": "{}",
    }
    for path, text in {rows: "a", **{model / name: text for name, text in texts.items()}}.items():
        path.write_text(text)
    _check_settings(folder, config, sources)
    (folder / "samples.jsonl").write_text("{}\n")
    _check_settings(folder, config, sources)
    for changed, name in ((model / "digests.json", "run/step_4"), (rows, str(rows))):
        before = changed.read_text()
        changed.write_text("two")
        with pytest.raises(EvalError, match=f"samples that differ in the contents of {name}; choose"):
            _check_settings(folder, config, sources)
        changed.write_text(before)
    _check_settings(folder, config, sources)


def test_samples_do_not_depend_on_how_many_workers_scored_them(tmp_path: Path) -> None:
    def check(env: dict[str, Any]) -> None:
        recipe = {"policy": {"model_name": "m"}, "data": {"validation": {"data_path": "rows"}}, "env": env, "eval": {}}
        _check_settings(tmp_path, MasterConfig.model_validate(recipe), {})

    check({"math": {"num_workers": 8, "verifier_type": "math"}})
    (tmp_path / "samples.jsonl").write_text("{}\n")
    check({"math": {"num_workers": 2, "verifier_type": "math", "batch": {"max_size": 4}}})
    settings = json.loads((tmp_path / "settings.json").read_text())
    settings["settings"]["env"]["math"]["num_workers"] = 8  # as older versions recorded it
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    check({"math": {"num_workers": 2, "verifier_type": "math"}})
    with pytest.raises(EvalError, match="samples that differ in env; choose"):
        check({"math": {"verifier_type": "mcq"}})
