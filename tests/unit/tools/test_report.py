"""The page of a run: what it says is what the run wrote, also of a run that was killed."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from grpo_mcore.cli.main import main
from grpo_mcore.families.images import image_size
from grpo_mcore.observe.band import band_text, make_band
from grpo_mcore.observe.samples import SampleFiles, bytes_and_images, sample_steps
from grpo_mcore.tools.report import page
from grpo_mcore.tools.report.comparison import (
    WIDE,
    Standing,
    differing_settings,
    ranking,
    short_names,
    standings,
    table,
)
from grpo_mcore.tools.report.device_seconds import DeviceSeconds, covered, device_seconds, edges_of, step_spans
from grpo_mcore.tools.report.page_alarms import alarms
from grpo_mcore.tools.report.run_files import RunFiles, read_run
from grpo_mcore.tools.report.watch import sparkline
from grpo_mcore.tools.sweep import SweepRun, state
from tests.pictures import noise
from tests.unit.tools.report_pages import assert_trace_format, data_of, shown, step_events, unpack, write_run


def test_every_second_of_a_device_is_accounted_for_once() -> None:
    spans = [(0.0, 4.0, "generate", 1), (3.0, 6.0, "train", 1), (3.5, 5.0, "train", 1), (8.0, 9.0, "refit", 2)]
    found = list(covered(0.0, 10.0, edges_of(spans)))
    assert [(first, last, what) for first, last, what, _ in found] == [
        (0.0, 3.0, "generate"),
        (3.0, 3.5, "train"), (3.5, 4.0, "train"), (4.0, 5.0, "train"), (5.0, 6.0, "train"),
        (6.0, 8.0, "other"),
        (8.0, 9.0, "refit"), (9.0, 10.0, "other"),
    ]  # fmt: skip


def test_the_ledger_of_devices_adds_up_to_the_wall_time(tmp_path: Path) -> None:
    found = device_seconds(read_run(write_run(tmp_path)).events)
    assert found.wall == pytest.approx(29.5) and sum(found.total().values()) == pytest.approx(29.5)
    assert found.by_device["policy-0"] == pytest.approx(
        {"refit": 3.0, "generate": 12.0, "wait for samples": 3.0, "train": 9.0, "other": 2.5}
    )
    assert sum(found.by_step[2].values()) == pytest.approx(10.0)


def test_engines_with_devices_of_their_own_wait_for_training() -> None:
    begin = {"what": "begin", "time": 0.0, "devices": {"policy-0": ["policy-0"], "engine-0": ["engine-0"]}}
    found = device_seconds([begin, *step_events(1, 0.0)]).by_device
    assert found["engine-0"]["wait for training"] == 3.0 and found["engine-0"]["generate"] == 4.0
    assert found["policy-0"]["wait for samples"] == 5.0 and found["policy-0"]["train"] == 3.0


def test_many_spans_of_a_step_are_joined() -> None:
    calls = [{"process": "env", "what": "reward", "start": 0.01 * i, "seconds": 0.005, "step": 1} for i in range(1000)]
    (joined,) = step_spans([*calls], [1])[1]
    assert joined[:3] == ["env", "reward", 0.0] and joined[3] == pytest.approx(9.995)


def test_the_page_of_a_killed_run_holds_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "http://" not in re.sub(r"http://www.w3.org|https?://github.com/leeoniya/\S*", "", text)  # no network
    data = data_of(text)
    assert data["runs"][0]["curves"]["train/reward"] == [
        [1, 2, 3],
        [pytest.approx(step / 3, rel=1e-5) for step in (1, 2, 3)],
    ]
    assert data["state"]["end"].startswith("not over") and data["state"]["max_steps"] == 9
    assert any("disagree" in alarm["text"] for alarm in data["heads"][0]["alarms"])
    samples = unpack(data["samples"]["train"]["3"])["samples"]
    assert [(sample["u"], sample["g"], sample["r"]) for sample in samples] == [
        ("p0", 0, 0.0), ("p0", 1, 1.0), ("p1", 0, 0.0), ("p1", 1, 1.0),
    ]  # fmt: skip
    assert samples[0]["age"] == [1] * 6 and len(samples[0]["ids"]) == 8
    assert samples[0]["p"][0] - samples[0]["e"][0] == pytest.approx(0.25, abs=1e-3)
    assert samples[0]["q"][0] - samples[0]["p"][0] == pytest.approx(0.25, abs=1e-3)
    assert data["tokens"][str(samples[0]["ids"][0])] == f" t{samples[0]['ids'][0]}"
    assert sorted(data["timelines"]) == ["1", "2", "3"]
    assert (run / "report.html").exists() is False
    sample_steps(run, "train")[3].write_bytes(b"PAR1")  # cut off while it was copied
    (run / "summary.json").write_text("[")
    assert main(["watch", str(tmp_path), "--once"]) == main(["report", str(tmp_path)]) == 0
    assert "3" not in data_of((run / "report.html").read_text())["samples"]["train"]


def test_the_band_of_the_recipe_is_behind_the_curves(tmp_path: Path) -> None:
    """And the run that leaves it has an alarm, as it had while it trained."""
    run = write_run(tmp_path)
    recipe = json.loads((run / "hyperparams.json").read_text())
    lines = [[{"step": step, "reward": seed / 100, "entropy": 1} for step in (1, 2, 3)] for seed in range(20)]
    (file := tmp_path / "b.json").write_text(
        band_text(make_band("own", "1.0", {seed: (recipe, rows, []) for seed, rows in enumerate(lines)}))
    )
    (run / "hyperparams.json").write_text(json.dumps(recipe | {"logger": {"alarms": {"band": str(file)}}}))
    data = data_of(page.build_page(read_run(run)))
    assert [shown["name"] for shown in data["runs"]][1:] == ["band of 20 runs"]
    assert data["runs"][1]["curves"] == {"train/reward": [[1, 2, 3], [0.095] * 3, [0.0] * 3, [0.19] * 3]}
    assert any("reward 0.667 in step 2, theirs 0 to 0.19" in alarm["text"] for alarm in data["heads"][0]["alarms"])


def test_what_comes_after_the_last_step_is_no_step_of_the_page(tmp_path: Path) -> None:
    """The end of a run was shown as step 701 of 700."""
    run = write_run(tmp_path)
    whole = (run / "events.jsonl").read_text().rpartition("\n")[0]
    (run / "events.jsonl").write_text("\n".join([whole, *map(json.dumps, step_events(4, 130.0))]) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    data = data_of((run / "report.html").read_text())
    assert sorted(data["timelines"]) == sorted(data["ledger"]["steps"]) == ["1", "2", "3"]


def test_credit_by_turn_is_shown_as_the_turns_stand() -> None:
    turns = [{"generated": generated} for generated in (False, True, False, True)]
    row = {"turns": turns, "turn_credits": [0.5, -1.0, 0.0], "turn_numbers": None}
    assert page._credits(row) == [0.5, -1.0] and page._credits(row | {"turn_numbers": [1, 0]}) == [-1.0, 0.5]
    assert page._credits(row | {"turn_credits": None}) is None


def test_a_big_run_makes_a_small_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that do not fit stay on disk: chosen ones can be put in, all can be written beside the page."""
    run = read_run(write_run(tmp_path, steps=9, groups=6, length=200))
    whole = len(page.build_page(run))
    monkeypatch.setattr(page, "PAGE_BYTES", 60_000)
    text = page.build_page(run, sample_steps=[5])
    data = data_of(text)
    assert len(text) < whole and "5" in data["samples"]["train"] and len(data["samples"]["train"]) < 9
    assert len(unpack(data["samples"]["train"]["5"])["samples"]) == 12  # whole, because it was asked for
    assert data["shards"]["train"] == list(range(1, 10))
    assert page.write_shards(run, tmp_path / "shards") == 9
    script = (tmp_path / "shards" / "train_000007.js").read_text()
    packed = re.fullmatch(r'addSamples\("train", 7, "([^"]*)"\);\n', script)
    assert packed and len(unpack(packed[1])["samples"]) == 12


def test_images_are_small_pictures_in_the_page_once(tmp_path: Path) -> None:
    writer, big, cut = SampleFiles(tmp_path / "samples", str, 1e9), noise(640, 320), noise(64, 64)[:-40]
    spans = [{"offset": 1, "length": 2, "digest": digest, "grid": [1, 2, 4]} for digest in ("big", "cut")]
    user = {"role": "user", "text": "?", "tokens": 4, "generated": False}
    sample = {
        "uid": "p",
        "token_ids": np.arange(8),
        "turns": [{**user, "images": spans[:1]}, {**user, "images": spans[1:]}],
    }
    files = [{"digest": "big", "bytes": big}, {"digest": "cut", "bytes": cut}]
    writer.add("train", 1, lambda: [{**sample, "images": files}, sample])
    writer.close()
    found = page._page_samples(path := tmp_path / "samples" / "train" / "step_000001.parquet")
    assert [row["im"] for row in found["samples"]] == [[(1, 2, "big"), (5, 2, "cut")]] * 2
    assert list(found["pictures"]) == ["big"]  # what is damaged has none
    data = base64.b64decode(found["pictures"]["big"].removeprefix("data:image/webp;base64,"))
    bare, images = bytes_and_images(path)
    assert image_size(data) == (128, 64) and len(data) < 10_000 < bare + 10_000 < len(big) and images == 2


def test_of_a_step_with_more_pictures_than_the_page_holds_some_groups_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PAGE_BYTES", 60_000)
    writer = SampleFiles(tmp_path / "samples", str, 1e9)
    files = [[{"digest": str(seed), "bytes": noise(128, 128, seed)}] for seed in range(12)]
    turns = [{"role": "user", "text": "?", "tokens": 8, "generated": False}]
    rows = [{"uid": file["digest"], "token_ids": np.arange(8), "turns": turns, "images": [file]} for [file] in files]
    writer.add("train", 1, lambda: [row | more for row in rows for more in ({}, {"images": None})])
    writer.close()
    path = tmp_path / "samples" / "train" / "step_000001.parquet"
    run: Any = SimpleNamespace(samples={"train": {1: path}, "validation": {}})
    assert bytes_and_images(path)[1] == 12
    shown = unpack(page._chosen_samples(run, 60_000, [])["train"][1])
    assert 0 < len(shown["pictures"]) < 12 == shown["prompts"]


@pytest.mark.parametrize(
    ("accuracy", "rewards", "raised"),
    [(0.95, (0.1, 0.95), False), (0.4, (0.1, 0.4), True), (None, (0.5, 0.99), False), (None, (0.0, 0.0), True)],
)
def test_equal_groups_are_no_alarm_where_the_task_is_solved(
    tmp_path: Path, accuracy: float | None, rewards: tuple[float, float], raised: bool
) -> None:
    """Graded rewards have no accuracy: those that rose and stay at their highest are as good."""
    line = {"prefix": "train", "loss": 1.0, "zero_advantage_rate": 0.8, "accuracy": accuracy}
    lines = [line | {"step": step, "reward": rewards[step > 1]} for step in range(1, 12)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = alarms(read_run(tmp_path), DeviceSeconds(1.0, {}, {}))
    assert ("equal_groups" in {alarm.kind for alarm in found}) == raised


def test_alarms_name_what_went_wrong(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    lines = [
        {"step": step, "unix_time": 0.0, "entropy": 2.0 / step**2, "zero_advantage_rate": 0.9} for step in range(1, 41)
    ]
    for line in lines[-5:]:
        line |= {"num_failed_samples": 3.0, "num_samples": 4.0, "truncation_rate": 0.5, "grad_norm": None}
    run.metrics["train"][:] = lines
    run.marks.append({"what": "restart", "process": "engine-0", "why": "it died", "time": 120.0})
    found = alarms(run, DeviceSeconds(10.0, {"gpu": {"wait for samples": 6.0, "train": 4.0}}, {}))
    words = "\n".join(alarm.text for alarm in found)
    for expected in (
        "not finite", "stopped exploring", "90% of the samples", "3 of 4 samples have no reward", "engine-0, it died",
        "gpu did nothing for 60%", "wait for samples", "37 of 40 steps",
    ):  # fmt: skip
        assert expected in words, words
    assert found[0].grave and not found[-1].grave
    assert not alarms(read_run(write_run(tmp_path / "calm", steps=1)), DeviceSeconds(1.0, {"gpu": {"train": 1.0}}, {}))


def test_a_trace_has_a_row_a_process(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    more = [
        {"process": "engine-0", "what": "generate", "start": 122.0, "seconds": 5.0, "step": 3},  # while another goes on
        {
            "process": "policy-0",
            "what": "train",
            "start": 126.5,
            "seconds": 3.0,
            "step": 3,
            "parts": [1.0, 1.5, 0.5003],
        },
        {"what": "restart", "process": "engine-0", "why": "it died", "time": 128.0},
    ]
    whole = (run / "events.jsonl").read_text().rpartition("\n")[0]
    (run / "events.jsonl").write_text("\n".join([whole, *map(json.dumps, more), ""]))
    assert main(["report", str(tmp_path), "--trace", str(tmp_path / "trace.json")]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert_trace_format(trace)
    events = trace["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert sorted(names) == ["driver", "engine-0", "engine-0 (2)", "environment-math", "policy-0"]
    train = [event for event in events if event["name"] == "train"]
    assert [(event["tid"], event["dur"], event["args"]["step"]) for event in train] == [
        *((names["driver"], 3_000_000, step) for step in (1, 2, 3)), (names["policy-0"], 3_000_000, 3),
    ]  # fmt: skip
    parts = [(event["name"], event["ts"], event["dur"]) for event in events if event["name"].startswith("train/")]
    assert parts == [
        ("train/micro-batch", 26_500_000, 1_000_000), ("train/micro-batch", 27_500_000, 1_500_000),
        ("train/update", 29_000_000, 500_000),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"), [((), "holds no run"), (("--samples", "3-x"), "neither a step nor a range")]
)
def test_what_is_wrong_is_said(tmp_path: Path, words: tuple[str, ...], said: str, capsys: Any) -> None:
    if words:
        write_run(tmp_path)
    assert main(["report", str(tmp_path), *words]) == 1
    assert said in capsys.readouterr().err


def test_a_run_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    assert main(["report", str(tmp_path), "--compare", str(run)]) == 1
    assert f"grpo-mcore report: two of the runs are {run}; name the log folder" in capsys.readouterr().err
    assert not (run / "report.html").exists()


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """Return a folder with runs of two settings and three seeds: reward and accuracy tell them apart."""
    for clip in (0.2, 0.3):
        for seed in (1, 2, 3):
            run = write_run(tmp_path / f"clip{clip}" / f"seed{seed}")
            recipe = {"grpo": {"seed": seed, "max_num_steps": 3}, "loss_fn": {"ratio_clip_max": clip}}
            recipe |= {"logger": {"log_dir": str(run)}}
            (run / "hyperparams.json").write_text(json.dumps(recipe))
            lines = [
                {"step": step, "prefix": "train", "unix_time": 100.0 + step, "reward": clip * step + seed / 100}
                for step in (1, 2, 3)
            ] + [{"step": 3, "prefix": "validation", "unix_time": 3700.0, "accuracy": clip + seed / 10}]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "clip0.2" / "seed1" / "logs" / "exp_001" / "summary.json").write_text(
        json.dumps({"end": "all steps are done", "seconds": 7200})
    )
    return tmp_path


def test_runs_are_listed_best_first_with_what_differs(six: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(six), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    order = [(line["settings"]["loss_fn.ratio_clip_max"], line["settings"]["grpo.seed"]) for line in lines]
    assert order == [("0.3", "3"), ("0.2", "3"), ("0.3", "2"), ("0.2", "2"), ("0.3", "1"), ("0.2", "1")]
    assert set(lines[0]["settings"]) == {"loss_fn.ratio_clip_max", "grpo.seed"}
    assert (lines[0]["metric"], lines[0]["score"]) == ("validation/accuracy", 0.6)
    assert lines[0]["hours"] == pytest.approx((3700 - 101) / 3600)
    assert [line["name"] for line in lines[:2]] == ["clip0.3/seed3", "clip0.2/seed3"]
    assert (lines[-1]["state"], lines[-1]["hours"]) == ("all steps are done", 2.0)
    assert main(["runs", str(six)]) == 0
    text = capsys.readouterr().out
    assert "ratio_clip_max" in text and "3/3" in text and "not over, silent for" in text
    assert len(text.splitlines()) == 7


def test_a_folder_without_runs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 1
    assert f"grpo-mcore runs: {tmp_path} holds no run" in capsys.readouterr().err


def test_runs_without_validation_rank_by_their_last_rewards_or_losses(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(steps), steps=steps)) for steps in (3, 20)]
    lines = [{"step": 1, "loss": loss, "unix_time": 1.0} for loss in (0.5, 0.25)]
    by_loss = [replace(runs[0], metrics=runs[0].metrics | {"train": [line]}) for line in lines]
    nothing = replace(runs[0], metrics={"train": [], "validation": [], "machine": []})
    assert [(line.metric, line.score) for line in standings([*by_loss, nothing])] == [
        ("train/loss", 0.25), ("train/loss", 0.5), ("", None),
    ]  # fmt: skip
    tuned = [  # SFT and DPO: the run that has learned its examples by heart is not the best
        replace(run, metrics=run.metrics | {"validation": [{"step": 1, "val_loss": loss, "unix_time": 1.0}]})
        for run, loss in zip(by_loss, (2.0, 3.0), strict=True)
    ]
    assert [(line.metric, line.score) for line in standings(tuned)] == [
        ("validation/val_loss", 2.0), ("validation/val_loss", 3.0),
    ]  # fmt: skip
    assert [line.score for line in standings(runs)] == [1.0, pytest.approx((19 / 20 + 1) / 2)]


def test_a_table_of_unlike_runs_stays_readable() -> None:
    names = short_names(["grpo.seed", "sft.seed", "policy.generation.top_p", "top_p", "data.train.0.data_path"])
    assert names == ["grpo.seed", "sft.seed", "generation.top_p", "top_p", "data_path"]
    many = [{f"k{key}": key * run for key in range(1, 13)} for run in (0, 1)]
    recipes = [{"grpo": many[run], "data": {"train": [{"p": "x", "q": run}]}} for run in (0, 1)]
    settings = differing_settings(recipes)
    assert "data.train.0.q" in settings[0] and "data.train.0.p" not in settings[0]
    settings = [{"first": "/long" * 20 + f"/{n}"} | each for n, each in enumerate(settings)]
    lines = [Standing(f"run{n}", "over", 1, 1, "reward", 1.0, 1, 1, True, 0.1, each) for n, each in enumerate(settings)]
    console = Console(width=WIDE, record=True, file=io.StringIO())
    console.print(table(lines))
    text = console.export_text()
    assert max(map(len, (line.rstrip() for line in text.splitlines()))) < 200
    assert re.search(r"  \.\.\.[long/]{35}/0  ", text)
    assert "6 further settings differ: `runs --json` and `report` have them" in text


def test_a_page_of_several_runs_has_a_band_for_each_setting(six: Path, tmp_path: Path) -> None:
    folders = [str(path) for path in sorted(six.glob("clip*/seed*"))]
    assert main(["report", *folders, "--group-by", "loss_fn.ratio_clip_max", "--output", str(tmp_path / "p.html")]) == 0
    data = data_of((tmp_path / "p.html").read_text())
    assert [run["name"] for run in data["runs"]] == ["ratio_clip_max 0.2 (3 runs)", "ratio_clip_max 0.3 (3 runs)"]
    steps, means, lowest, highest = data["runs"][1]["curves"]["train/reward"]
    assert steps == [1, 2, 3]
    for values, seed in ((means, 2), (lowest, 1), (highest, 3)):
        assert values == pytest.approx([0.3 * step + seed / 100 for step in steps])
    assert [line["settings"]["grpo.seed"] for line in data["standings"]] == ["3", "3", "2", "2", "1", "1"]


def test_a_key_to_group_by_that_no_recipe_has_is_refused(six: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(path) for path in sorted(six.glob("clip*/seed1"))]
    assert main(["report", *folders, "--group-by", "loss_fn.clip"]) == 1
    assert "--group-by: no recipe of these runs has the key loss_fn.clip" in capsys.readouterr().err


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 12)])
def test_watch_fits_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    run = write_run(tmp_path, steps=30)
    lines = shown(run, width, height)
    assert len(lines) <= height and max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "step 30 of 9" in text and "last sign of life" in text
    assert re.search(r"reward +0.03333 → 1 +▁\S*█", text)
    if height >= 24:
        assert "generate 40%" in text and "! Engine and policy disagree" in text and "samples of step 30" in text
    assert len(shown(run, 10, 40)) <= 40, "a narrow pane"
    (run / "summary.json").write_text('{"end": "all steps are done"}')
    assert "over: all steps are done" in shown(run, 200, height)[0]


def test_watch_shows_a_run_that_has_not_trained_yet(tmp_path: Path) -> None:
    run = tmp_path / "exp_001"
    run.mkdir()
    (run / "metrics.jsonl").touch()  # all that there is before everything has started
    assert shown(run, 80, 24)[1].strip() == "policy, engines and environments are starting"
    (run / "hyperparams.json").write_text('{"grpo": {"max_num_steps": 9, "num_prompts_per_step": 4}}')
    lines = shown(run, 80, 24)
    assert lines[1].rstrip().endswith("step 0 of 9")
    assert lines[2].rstrip().endswith("step 1: 0 of 4 prompts scored; done last: the step before")
    assert any("no step is trained yet" in line for line in lines)


def test_a_terminal_that_cannot_be_redrawn_is_shown_the_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a shell in Emacs: it stayed empty until the run was over."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # the stream is a terminal for rich
    monkeypatch.setenv("TERM", "dumb")
    assert main(["watch", str(write_run(tmp_path, steps=3))]) == 0
    assert "step 3 of 9" in capsys.readouterr().out


def test_a_course_keeps_its_shape_in_few_blocks() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█" and sparkline([1.0, 1.0 + 1e-9], 9) == "▁▁"


def of_validations(folder: Path, *accuracies: float) -> RunFiles:
    """Return a run with these accuracies before its first step, after that, and so on."""
    lines = [{"step": step, "prefix": "validation", "accuracy": value} for step, value in enumerate(accuracies)]
    lines += [{"step": step, "prefix": "train", "loss": 1.0} for step in range(1, len(accuracies))]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(folder)


def test_the_untrained_model_ranks_nothing(tmp_path: Path) -> None:
    """Both runs begin with the same model; only what they learned tells them apart."""
    worse = of_validations(tmp_path / "worse", 0.9, 0.2, 0.1)
    better = of_validations(tmp_path / "better", 0.9, 0.2, 0.4)
    lines = standings([worse, better])
    assert [(line.name, line.score, line.score_step) for line in lines] == [("better", 0.4, 2), ("worse", 0.2, 1)]
    assert [line.count for line in lines] == [2, 2]  # of which the best one counts
    assert standings([of_validations(tmp_path / "untrained", 0.9)])[0].score is None


def test_settings_within_the_spread_of_their_seeds_share_a_place(tmp_path: Path) -> None:
    settings = {
        name: [of_validations(tmp_path / name / str(score), 0.5, score) for score in scores]
        for name, scores in {"a": (0.5, 0.7), "b": (0.6, 0.8), "c": (0.1, 0.2), "d": (0.05,)}.items()
    }
    assert ranking(settings) == [
        "1. b: 0.7 (0.6 to 0.8, 2 runs) of validation/accuracy",
        "1. a: 0.6 (0.5 to 0.7, 2 runs) of validation/accuracy",
        "3. c: 0.15 (0.1 to 0.2, 2 runs) of validation/accuracy",
        "4. d: 0.05 of validation/accuracy",
    ]


def test_a_run_that_lost_its_last_steps_says_so_everywhere(six: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = six / "clip0.3" / "seed1" / "logs" / "exp_001"
    end = {"end": "all steps are done", "end_kind": "finished", "exit_code": 73, "unsaved": 3, "stopped_early": False}
    (logs / "summary.json").write_text(json.dumps(end))
    assert main(["runs", str(six)]) == 0 and main(["watch", "--once", str(logs)]) == 0
    assert capsys.readouterr().out.count("all steps are done; 3 trained steps are not saved") == 2
    assert state(SweepRun("clip", 1, logs.parent.parent, ()), 0.0) == "interrupted"


def test_watching_goes_on_while_a_lost_run_may_be_restarted(six: Path) -> None:
    logs = six / "clip0.3" / "seed1" / "logs" / "exp_001"
    (logs / "summary.json").write_text(json.dumps({"end": "lost", "end_kind": "failed", "exit_code": 69, "unsaved": 1}))
    assert not read_run(logs).may_go_on
    (logs / "hyperparams.json").write_text(json.dumps({"cluster": {"max_restarts": 2}}))
    assert read_run(logs).may_go_on


def test_each_run_of_a_page_has_its_own_headline_and_alarms(tmp_path: Path) -> None:
    better = of_validations(tmp_path / "better", 0.2, 0.4, 0.9)
    worse = of_validations(tmp_path / "worse", 0.9, 0.5, 0.2)
    text = page.build_page(better, [worse])
    assert "<title>2 runs</title>" in text
    heads = data_of(text)["heads"]
    assert [(head["name"], head["headline"]["before"], head["headline"]["after"]) for head in heads] == [
        ("better", 0.2, 0.9), ("worse", 0.9, 0.2),
    ]  # fmt: skip
    assert [any("well below" in alarm["text"] for alarm in head["alarms"]) for head in heads] == [False, True]
    assert page.headline(of_validations(tmp_path / "untrained", 0.9)) is None
