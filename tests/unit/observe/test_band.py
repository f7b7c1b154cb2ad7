"""Bands of a recipe: their files, and the test that says when a run goes otherwise."""

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.observe.alarms import StepAlarms, alarms_of
from grpo_mcore.observe.band import (
    ALARM,
    LARGEST_BYTES,
    STATISTICS,
    Band,
    BandError,
    BandTest,
    Floats,
    band_of,
    band_text,
    e_value,
    make_band,
    read_band,
    reference,
    window_means,
    windows,
)
from grpo_mcore.recipe import load_recipe

RECIPE: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 4, "max_num_steps": 30, "seed": 1},
    "policy": {"model_name": "results/base/hf", "optimizer": {"lr": 1e-3}},
    "data": {"train": [{"data_path": "a"}, {"data_path": "b"}]},
    "logger": {"wandb": {"api_key": "secret"}},
    "cluster": {"platform": "cpu", "gpus_per_node": 1},
}
TESTED = ("reward", "entropy", "generated_length", "grad_norm", "clipped", "equal_groups")
MIDDLE = {"reward": 0.4, "entropy": 0.0, "generated_length": 3.0, "grad_norm": 1.0, "clipped": 0.3, "equal_groups": 0.4}


def draws(rng: np.random.Generator, runs: int, steps: int, correlation: float) -> dict[str, Floats]:
    """Return [runs, steps] by statistic, which of a run are correlated from step to step."""
    curves = {}
    for name in TESTED:
        noise = rng.standard_normal((runs, steps))
        for step in range(1, steps):
            noise[:, step] = correlation * noise[:, step - 1] + math.sqrt(1 - correlation**2) * noise[:, step]
        values = MIDDLE[name] + 0.1 * noise
        scale = STATISTICS[name].scale
        curves[name] = np.exp(values) if scale == "log" else np.sin(values) ** 2 if scale == "share" else values
    return curves


def lines_of(curves: Mapping[str, Floats], run: int) -> list[dict[str, float | None]]:
    names = {name: STATISTICS[name].names[-1] for name in curves}
    steps = next(iter(curves.values())).shape[1]
    return [
        {"step": step + 1, "clip_fraction_low": 0.0} | {names[n]: float(rows[run, step]) for n, rows in curves.items()}
        for step in range(steps)
    ]


def made(correlation: float = 0.8, seeds: int = 20, steps: int = 30) -> Band:
    curves = draws(np.random.default_rng(0), seeds, steps, correlation)
    validations: list[dict[str, float | None]] = [{"step": 0, "accuracy": 0.1}, {"step": 30, "accuracy": 0.4}]
    return make_band("own", "1.0", {seed: (RECIPE, lines_of(curves, seed), validations) for seed in range(seeds)})


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_at_most_one_clean_run_in_a_hundred_leaves_the_band(correlation: float) -> None:
    """4,000 runs against 100 bands, of six statistics, looked at in every step."""
    rng, alarms, ends = np.random.default_rng(1), 0, windows(30)
    for _ in range(100):
        band, runs = draws(rng, 20, 30, correlation), draws(rng, 40, 30, correlation)
        evidence = np.zeros(40)
        for name in TESTED:
            middle, spread = reference(STATISTICS[name], window_means(band[name], ends))
            t = (STATISTICS[name].scaled(window_means(runs[name], ends)) - middle) / spread
            evidence += e_value(t, 19).sum(1) / (len(TESTED) * len(ends))
        alarms += int((evidence >= 1 / ALARM).sum())
    assert alarms <= ALARM * 4000


def test_the_mean_of_an_e_value_is_one() -> None:
    """Over Student's density with 19 degrees of freedom, integrated numerically."""
    t = np.linspace(-400, 400, 800_001)
    density = math.gamma(10) / (math.sqrt(19 * math.pi) * math.gamma(9.5)) * (1 + t**2 / 19) ** -10
    assert float((density * e_value(t, 19)).sum() * 1e-3) == pytest.approx(1, abs=1e-3)


def test_the_test_looks_after_steps_that_double_every_other_time() -> None:
    assert windows(1) == [(0, 1)]
    assert windows(5) == [(0, 1), (0, 2), (1, 2), (0, 3), (2, 3), (0, 4), (3, 4), (0, 5), (4, 5)]
    assert [end for first, end in windows(30) if first] == [2, 3, 4, 6, 8, 12, 16, 24, 30]


@pytest.mark.parametrize(("name", "factor"), [("reward", 0.1), ("entropy", 3.0), ("grad_norm", 40.0)])
def test_a_run_that_goes_otherwise_is_named_early_and_once(name: str, factor: float) -> None:
    band, curves = made(), draws(np.random.default_rng(5), 1, 30, 0.8)
    clean = lines_of(curves, 0)
    assert alarms_of(clean, band) == []
    metric = STATISTICS[name].names[-1]
    faulty = [line | {metric: factor * (line[metric] or 0.0)} for line in clean]
    (alarm,) = alarms_of(faulty, band)
    assert alarm.kind == "left_band" and alarm.step <= 7 and f" {name} " in alarm.text
    assert "not like the 20 of its band (own)" in alarm.text and "`grpo-mcore diagnose RUN`" in alarm.text
    alarms = StepAlarms(stop_after=3, band=band)
    stops = []
    for line in faulty:
        alarms.of_step(int(line["step"] or 0), {key: value for key, value in line.items() if value is not None})
        stops.append(alarms.stop_reason)
    assert stops.index("the alarm left_band for 3 steps (logger.alarms.stop_after)") == alarm.step + 1
    (of_nan,) = alarms_of([line | {metric: None if line["step"] != 2 else math.inf} for line in clean], band)
    assert of_nan.step == 2


def test_steps_that_are_missing_are_not_compared() -> None:
    """A run that begins at step 6, and one that lacks a statistic."""
    band, lines = made(), lines_of(draws(np.random.default_rng(5), 1, 30, 0.8), 0)
    late = BandTest(band)
    for line in lines[5:6]:
        late.sign(6, line | {"reward": 50.0})
    assert late.evidence == 0  # of a window of two steps it has seen one
    late.sign(7, lines[6])
    late.sign(8, lines[7])
    assert late.evidence > 0
    without = BandTest(band)
    without.sign(1, {"grad_norm": 2.7})
    without.sign(2, {})
    assert without.text is None and without.evidence > 0
    longer = BandTest(band)
    for step in range(1, 40):
        longer.sign(step, lines[min(step, 30) - 1] | ({"reward": 50.0} if step > 30 else {}))
    assert longer.text is None, "the band knows nothing of steps after its last one"


def test_a_look_takes_less_than_a_millisecond_a_step() -> None:
    band, lines = made(), lines_of(draws(np.random.default_rng(5), 1, 30, 0.8), 0)
    test, began = BandTest(band), time.process_time()
    for line in lines:
        test.sign(int(line["step"] or 0), line)
    assert (time.process_time() - began) / 30 < 1e-3


def test_examples_without_rewards_are_judged_by_their_loss() -> None:
    rng = np.random.default_rng(2)
    runs = {seed: (RECIPE, [{"step": 1, "loss": float(rng.normal(2, 0.1))}], []) for seed in range(20)}
    assert [alarm.kind for alarm in alarms_of([{"step": 1, "loss": 4.0}], make_band("sft", "1.0", runs))] == [
        "left_band"
    ]


def test_distillation_is_judged_by_its_loss_and_its_teacher() -> None:
    rng, gap = np.random.default_rng(2), "on_policy_distillation/teacher_student_logprob_gap_mean"

    def line(loss: float = 0.6, of_teacher: float = -0.6) -> dict[str, float]:
        noise = rng.normal(0, 0.01, 3).tolist()
        return {"step": 1, "reward": 0.3 + noise[0], "loss": loss + noise[1], gap: of_teacher + noise[2]}

    section = {"teacher_model_by_agent_name": {"teacher": "results/demo/model"}, "divergence": {"kl_type": "reverse"}}
    recipe = RECIPE | {"on_policy_distillation": section}
    band = make_band("own", "1.0", {seed: (recipe, [line()], []) for seed in range(20)})
    assert alarms_of([line()], band) == []
    for wrong, names in (
        (line(loss=1.5), ("loss 1.", "loss_and_gap 0.")),
        (line(of_teacher=-3.0), ("teacher_gap -", "loss_and_gap -")),
        (line(loss=0.7, of_teacher=-0.7) | {gap: -0.5}, ("loss_and_gap 0.",)),
    ):
        (alarm,) = alarms_of([wrong], band)
        assert all(name in alarm.text for name in names)
    assert band.another_recipe(recipe) is None
    for change, reason in (
        (
            {"teacher_model_by_agent_name": {"teacher": "results/demo-distill/base/hf"}},
            "teacher is base/hf here and demo/",
        ),
        ({"teacher_model_by_agent_name": {"other": "results/demo/model"}}, "teacher is None here and demo/model there"),
        ({"divergence": {"kl_type": "forward"}}, "kl_type is forward here and reverse there"),
    ):
        assert reason in str(band.another_recipe(RECIPE | {"on_policy_distillation": section | change}))


def test_answers_that_are_cut_in_the_runs_of_the_band_too_are_no_alarm() -> None:
    cut = [line | {"truncation_rate": 0.95} for line in lines_of(draws(np.random.default_rng(5), 1, 30, 0.8), 0)]
    runs = {seed: (RECIPE, lines_of(draws(np.random.default_rng(0), 20, 30, 0.8), seed), []) for seed in range(20)}
    assert [alarm.kind for alarm in alarms_of(cut, make_band("own", "1.0", runs))] == ["answers_cut"]
    as_usual = {
        seed: (RECIPE, [line | {"truncation_rate": 0.96} for line in run], []) for seed, (_, run, _) in runs.items()
    }
    assert alarms_of(cut, make_band("own", "1.0", as_usual)) == []


def test_what_is_rare_in_single_steps_is_no_alarm() -> None:
    """All runs of the band begin without a reward and with a gradient; a run may begin otherwise by one answer."""
    rng = np.random.default_rng(0)
    curves = draws(rng, 20, 30, 0.8)
    for name in ("reward", "equal_groups", "clipped"):
        curves[name][:, :3] = 0.0
    curves["clipped"][7, 2] = 1e-3
    band = make_band("own", "1.0", {seed: (RECIPE, lines_of(curves, seed), []) for seed in range(20)})
    clean = lines_of({name: rows[:1] for name, rows in curves.items()}, 0)
    first = {"reward": 1 / 64, "zero_advantage_rate": 1 / 8, "grad_norm": 0.0, "clip_fraction_high": 2e-3}
    assert alarms_of([clean[0] | first, *clean[1:]], band) == []
    for other in ({"reward": 0.9}, {"clip_fraction_high": 0.9}, {"zero_advantage_rate": 1.0}):
        (alarm,) = [it for it in alarms_of([clean[0] | other, *clean[1:]], band) if it.kind == "left_band"]
        assert alarm.step <= 2


def test_a_far_run_of_the_band_itself_widens_it() -> None:
    rows = np.random.default_rng(3).normal(size=(20, 1))
    rows[0] = 20.0
    middle, spread = reference(STATISTICS["reward"], rows)
    others = rows[1:]
    t = (20.0 - others.mean()) / (others.std(ddof=1) * math.sqrt(1 + 1 / 19))
    assert spread[0] == pytest.approx(rows.std(ddof=1) * math.sqrt(1 + 1 / 20) * t / 4, rel=1e-6)


def test_a_band_is_read_as_it_was_written(tmp_path: Path) -> None:
    band, file = made(), tmp_path / "own.json"
    file.write_text(band_text(band))
    again = read_band(str(file))
    assert dataclasses.replace(again, curves={}, validation={}) == dataclasses.replace(band, curves={}, validation={})
    for name, values in band.curves.items():
        np.testing.assert_allclose(again.curves[name], values, rtol=1e-3, atol=1e-12)
    assert again.validation_steps == (0, 30) and "secret" not in file.read_text()
    assert again.settings["data.train.1.data_path"] == "b" and "grpo.seed" not in again.settings
    curves = again.plain_curves()
    assert curves["train/reward"][0] == list(range(1, 31)) and curves["validation/accuracy"][1] == [0.1, 0.4]
    steps, middle, low, high = curves["train/reward"]
    assert all(lo < mid < hi for lo, mid, hi in zip(low, middle, high, strict=True))
    found, reason = band_of(RECIPE | {"logger": {"alarms": {"band": str(file)}}})
    assert found is not None and reason is None and band_of(RECIPE) == (None, None)
    other = RECIPE | {"grpo": RECIPE["grpo"] | {"max_num_steps": 5}, "logger": {"alarms": {"band": str(file)}}}
    assert band_of(other)[0] is None
    assert "it is of another recipe (own): grpo.max_num_steps is 5 here and 30 there" in str(band_of(other)[1])
    moved = RECIPE | {"policy": RECIPE["policy"] | {"model_name": "/elsewhere/results/base/hf"}}
    assert again.another_recipe(moved) is None


def test_a_long_band_keeps_means_of_several_steps() -> None:
    band = made(steps=300)
    assert len(band_text(band)) <= LARGEST_BYTES and band.steps[0] > 1
    every, rows = band.steps[0], draws(np.random.default_rng(0), 20, 300, 0.8)["reward"]
    np.testing.assert_allclose(band.curves["reward"][:, 0], rows[:, :every].mean(1))
    test = BandTest(band)
    for line in lines_of(draws(np.random.default_rng(0), 1, 300, 0.8), 0):
        test.sign(int(line["step"] or 0), line | {"reward": 5.0})
        if test.text:
            break
    assert test.text is not None and line["step"] == every


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "is of format 2, and this version reads 1: make it again"),
        ({"seeds": [1, 2], "curves": {}, "validation": {}}, "is of 2 seeds, too few to tell: make it of 20 or more"),
        ({"steps": [1, 2]}, "is damaged: reward has not a number for each seed and step"),
        ({"settings": {"grpo.max_num_steps": 7}}, "is damaged: its settings are not those of its digest"),
        ({"curves": {"reward": [["x"]]}}, "is damaged: "),
        ({"steps": [], "curves": {}}, "is damaged: its steps do not rise from 1"),
        ({"steps": list(range(30, 0, -1))}, "is damaged: its steps do not rise from 1"),
        ({"steps": [str(step) for step in range(30)]}, "is damaged: its steps do not rise from 1"),
        ({"settings": [1]}, "is damaged: TypeError"),
    ],
)
def test_a_file_that_is_no_usable_band_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    (file := tmp_path / "b.json").write_text(json.dumps(json.loads(band_text(made())) | change))
    with pytest.raises(BandError, match=reason):
        read_band(str(file))
    assert reason in str(band_of({"logger": {"alarms": {"band": str(file)}}})[1])
    for text, said in (("[1]", "is no band"), ("hello", "is damaged: JSONDecodeError")):
        file.write_text(text)
        with pytest.raises(BandError, match=said):
            read_band(str(file))
    with pytest.raises(BandError, match="none.json is no band: `grpo-mcore sweep RECIPE --seeds 20 --band FILE` makes"):
        read_band("none.json")


def test_each_band_that_is_shipped_is_one_of_its_recipe() -> None:
    bands = {path.stem: read_band(str(path)) for path in Path("recipes/bands").glob("*.json")}
    compared = [name for name in bands if Path(f"recipes/{name}.yaml").exists()]
    assert "grpo-arithmetic-cpu" in compared
    for name in compared:
        assert bands[name].another_recipe(load_recipe(name).config.model_dump(mode="json")) is None


def test_runs_that_make_no_band_are_refused() -> None:
    runs = {seed: (RECIPE, [{"step": 1, "reward": 0.1}], []) for seed in range(20)}
    with pytest.raises(BandError, match="needs 20 runs or more, and 19 are finished"):
        make_band("own", "1.0", {seed: run for seed, run in runs.items() if seed})
    with pytest.raises(BandError, match="the runs have no step in common"):
        make_band("own", "1.0", runs | {3: (RECIPE, [{"step": 2, "reward": 0.1}], [])})
    other = RECIPE | {"policy": RECIPE["policy"] | {"optimizer": {"lr": 3e-3}}}
    with pytest.raises(BandError, match=r"seed 3 ran another recipe than the first: policy.optimizer.lr is 0.003"):
        make_band("own", "1.0", runs | {3: (other, [{"step": 1, "reward": 0.1}], [])})
    other = RECIPE | {"grpo": {"num_prompts_per_step": 8, "max_num_steps": 30}}
    with pytest.raises(BandError, match="seed 3 ran another recipe than the first: grpo.num_prompts_per_step is 8"):
        make_band("own", "1.0", runs | {3: (other, [{"step": 1, "reward": 0.1}], [])})


def test_runs_that_cannot_be_diagnosed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["diagnose", str(tmp_path)]) == 1
    assert "has no step yet" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"prefix": "train", "step": 1, "loss": 1.0}\n')
    (tmp_path / "events.jsonl").write_text('{"what": "begin", "time": 1, "devices": {}, "algorithm": "sft"}\n')
    assert main(["diagnose", str(tmp_path)]) == 1
    assert "has no recipe: hyperparams.json is missing" in capsys.readouterr().err
