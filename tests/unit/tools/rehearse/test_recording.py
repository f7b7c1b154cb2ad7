"""A recorded run predicts others. What it recorded is a run in virtual time here, so that the truth is known."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from grpo_mcore.algorithms.grpo import grpo_train
from grpo_mcore.cli.main import main
from grpo_mcore.cluster.virtual_cluster import VirtualClock
from grpo_mcore.observe import read_metrics
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.rehearse.durations import Durations
from grpo_mcore.tools.rehearse.recording import RecordingError, measured, read_recording, scaled
from grpo_mcore.tools.rehearse.rehearse import calibration, open_rehearsal, planned_durations, shared_cores
from grpo_mcore.tools.rehearse.world import World
from grpo_mcore.tools.report.run_files import NoRun
from tests.simulation.simulation import TINY, Case, tiny_shape

pytestmark = pytest.mark.slow  # a dozen runs in virtual time

TRUE = {"decode": 3.0, "train": 300.0, "refit": 4.0, "receive": 20.0}
"""Factors of the planned durations in the recorded world."""
RECORDED = replace(Case(3), prompts=8, generations=4, steps=8, engines=2, age=1, apart=True, turns=3, save_period=8)


def recipe(case: Case, folder: Path) -> MasterConfig:
    plain = case.recipe(folder).model_dump()
    plain["logger"]["samples"] = "all"
    plain["cluster"]["platform"] = "cpu"
    return MasterConfig.model_validate(plain)


def run(case: Case, folder: Path, durations: Durations, recording: Any = None) -> Path:
    """Run a case in virtual time, with its samples on disk, and return its log folder."""
    config = recipe(case, folder)
    clock = VirtualClock(case.seed)
    world = World(config, durations, clock, case.seed, recording, shared_cores(config, clock))
    with open_rehearsal(config, tiny_shape(), world, gpu=False) as opened:
        grpo_train(**vars(opened))
    return opened.logger.log_dir


def durations(case: Case, factors: dict[str, float]) -> Durations:
    return scaled(planned_durations(recipe(case, Path("unused")), tiny_shape()), factors)


def step_seconds(folder: Path) -> float:
    rows = list(read_metrics(folder / "metrics.jsonl", "train"))[1:]
    return sum(row["timing/total"] for row in rows) / len(rows)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    return run(RECORDED, folder, durations(RECORDED, TRUE))


def test_samples_and_seconds_of_a_run_are_read(recorded: Path) -> None:
    recording = read_recording(recorded)
    samples = [sample for group in recording.groups for sample in group]
    assert len(recording.groups) == 8 * 8 and len(samples) == 8 * 8 * 4
    rows = list(read_metrics(recorded / "metrics.jsonl", "train"))
    tokens = sum(recording.prompt_tokens + sum(sample.generated) + sum(sample.observed) for sample in samples)
    assert tokens == sum(row["tokens"] for row in rows)
    assert {len(sample.generated) for sample in samples} > {1}
    assert all(len(sample.observed) == len(sample.generated) - 1 for sample in samples)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    assert sum(rewards) / len(rewards) == pytest.approx(sum(row["reward"] for row in rows) / 8)
    assert recording.figures.keys() == TRUE.keys() | {"step", "wait"} and recording.figures == measured(recorded)


@pytest.fixture(scope="module")
def factors(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return calibration(read_recording(recorded), tiny_shape(), tmp_path_factory.mktemp("calibration"))


def test_calibration_finds_the_durations_of_the_recorded_world(factors: dict[str, float]) -> None:
    assert factors == {name: pytest.approx(factor, rel=0.05) for name, factor in TRUE.items()}


@pytest.mark.parametrize(
    "settings",
    [
        [{"engines": 1}],
        pytest.param([{"age": 0}, {"age": 2}, {"engines": 1}, {"generations": 2}], marks=pytest.mark.every_state),
    ],
    ids=["one", "all"],
)
def test_a_recording_predicts_other_settings(
    recorded: Path, factors: dict[str, float], tmp_path: Path, settings: list[dict[str, int]]
) -> None:
    recording = read_recording(recorded)
    errors = []
    for changes in settings:
        other = replace(RECORDED, **changes)
        place = tmp_path / "-".join(changes) / str(other.age)
        truth = step_seconds(run(other, place / "truth", durations(other, TRUE)))
        predicted = step_seconds(run(other, place / "predicted", durations(other, factors), recording))
        errors.append(abs(predicted / truth - 1))
    assert max(errors) <= 0.1 and median(errors) <= 0.05, errors


def test_a_sweep_from_a_recording(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded setting takes as long again. The model is known by its config alone."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "recipe.yaml").write_text(json.dumps(read_recording(recorded).config.model_dump(mode="json")))
    command = ["rehearse", str(tmp_path / "recipe.yaml"), "--config-json", str(tmp_path / "config.json")]
    command += ["--steps", "8"]
    sweep = ["--sweep", "grpo.async_grpo.max_trajectory_age_steps=1,2", "--folder", str(tmp_path / "swept"), "--json"]
    assert main([*command, "--from", str(recorded), *sweep]) == 0
    same, other = json.loads(capsys.readouterr().out)
    assert same["step"][0] == pytest.approx(step_seconds(recorded), rel=0.03)
    assert other["grpo.async_grpo.max_trajectory_age_steps"] == "2" and 0 < other["step"][0] < 1.05 * same["step"][0]


def test_a_run_without_samples_predicts_nothing(recorded: Path, tmp_path: Path) -> None:
    for file in ("metrics.jsonl", "hyperparams.json", "events.jsonl"):
        (tmp_path / file).write_bytes((recorded / file).read_bytes())
    with pytest.raises(RecordingError, match="has no samples: record the run with logger.samples"):
        read_recording(tmp_path)
    with pytest.raises(NoRun):
        read_recording(tmp_path / "nowhere")
