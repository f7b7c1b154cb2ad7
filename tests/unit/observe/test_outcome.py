"""The summary and the curve."""

import json
import os
from pathlib import Path

import pytest

from grpo_mcore.observe.logger import write_summary
from grpo_mcore.observe.trackers.plots import SMOOTH, reward_curve_png, smoothed


def test_a_summary_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "summary.json"
    write_summary(path, {"steps": 3})
    assert json.loads(path.read_text()) == {"steps": 3}
    with pytest.raises(ValueError, match="[Nn]a[Nn]"):
        write_summary(path, {"steps": float("nan")})

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_summary(path, {"steps": 4})
    assert json.loads(path.read_text()) == {"steps": 3}
    assert os.listdir(path.parent) == ["summary.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewards", "validations"),
    [
        ({1: 0.2, 2: 0.4}, {"accuracy": {0: 0.1, 2: 0.5}, "reward": {0: 0.1, 2: 0.5}}),
        ({1: -3.0}, {"reward": {1: 0.5}, "reward/format": {1: 7.5}}),
        ({}, None),
        ({}, {"accuracy": {0: 0.5}}),
    ],
)
def test_a_curve_is_drawn_from_whatever_there_is(tmp_path, rewards, validations):
    from matplotlib.image import imread

    path: Path = tmp_path / "plots" / "reward.png"
    reward_curve_png(path, rewards, validations)
    height, width = imread(path).shape[:2]
    assert width > height > 400


def test_smoothing_starts_at_the_first_value_and_forgets():
    assert smoothed([]) == []
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    first, second = smoothed([0.0, 1.0])
    assert (first, second) == pytest.approx((0.0, 1 / (1 + SMOOTH)))
