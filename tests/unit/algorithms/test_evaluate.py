"""The samples of an evaluation on disk, and the scores that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.algorithms.evaluate import Sample, SampleLog, task_scores
from grpo_mcore.tools.evaluation import report_table


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
