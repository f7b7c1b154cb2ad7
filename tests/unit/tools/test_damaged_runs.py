"""Whatever has become of a run's files: each tool says what it leaves out, nothing hangs, no other run is hidden."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.driver.record.followed_run import FollowedRun, FollowError
from grpo_mcore.observe import LedgerError
from grpo_mcore.observe.run_folder import say_left_out
from grpo_mcore.observe.samples import SamplesError
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.replay.replay import ReplayError, recorded_step
from grpo_mcore.tools.report.run_files import NoRun, recorded_run
from grpo_mcore.tools.sweep import SweepRun, by_setting, state
from tests.unit.tools.report_pages import write_run

LEDGER = [
    {"event": "started", "step": 0, "kept": 0, "missing": 0, "max_age": 1},
    {"event": "dispatched", "uids": ["p0", "p1"], "version": 1},
    {"event": "finished", "uid": "p0", "version": 1, "scored": 2, "rate": 0.5},
    {"event": "finished", "uid": "p1", "version": 1, "scored": 2, "rate": 0.5},
    {"event": "trained", "uids": ["p0", "p1"], "step": 1, "version": 1},
    {"event": "stop_asked", "why": "the time is up", "at_once": True},
    {"event": "ended", "why": "the time is up", "data_ended": False},
]
RESTART = {"what": "restart", "time": 105.0, "process": "engine-0", "why": "it died"}
TAIL = {"what": "tail", "step": 2, "samples": [{"uid": "p0"}]}
OPERATION = {"name": "op", "ph": "X", "pid": 1, "tid": "t", "ts": 1, "dur": 2}
PROFILE = {"baseTimeNanoseconds": 1, "traceEvents": [OPERATION]}


def write_whole_run(folder: Path) -> Path:
    """Write a run with every kind of file that a tool reads. Return its log folder."""
    run = write_run(folder, steps=2)
    recipe: dict[str, Any] = {"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x.jsonl"}}}
    recipe["logger"] = {"log_dir": str(folder / "logs"), "samples": "all"}
    recipe["checkpointing"] = {"checkpoint_dir": str(folder), "metric_name": "val:accuracy"}
    config = MasterConfig.model_validate(recipe)
    (run / "hyperparams.json").write_text(json.dumps(config.model_dump(mode="json")))
    validation = {"step": 2, "prefix": "validation", "unix_time": 130.0, "accuracy": 0.5}
    metrics = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    (run / "metrics.jsonl").write_text(f"{metrics}\n{json.dumps(validation)}\n")
    (run / "events.jsonl").write_text(
        (run / "events.jsonl").read_text().rpartition("\n")[0] + f"\n{json.dumps(RESTART)}\n{json.dumps(TAIL)}\n"
    )
    summary = {"end": "all steps are done", "end_kind": "finished", "exit_code": 0, "unsaved": 0, "seconds": 60.0}
    (run / "summary.json").write_text(json.dumps(summary))
    (folder / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LEDGER))
    (profile := run / "profile" / "step_1" / "policy-0.json").parent.mkdir(parents=True)
    profile.write_text(json.dumps(PROFILE))
    return run


FILES = (
    "logs/exp_001/metrics.jsonl", "logs/exp_001/events.jsonl", "logs/exp_001/hyperparams.json",
    "logs/exp_001/summary.json", "logs/exp_001/samples/train/step_000002.parquet", "logs/exp_001/samples/tokens.jsonl",
    "logs/exp_001/profile/step_1/policy-0.json", "ledger.jsonl",
)  # fmt: skip


def truncated(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def random_bytes(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 3, 30))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(bytes(content))


def noise(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((0, 1, 500))))


def a_pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def a_link_to_nothing(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def missing(path: Path, draw: random.Random) -> None:
    path.unlink()


ODD = (None, True, -1, 0, 10**400, 1e308, float("nan"), float("inf"), "", "text", "\ud800", [], {}, [None], {"a": None})


def odd_values(path: Path, draw: random.Random) -> None:
    """Replace some values of the JSON in a file, or of its lines."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError:  # a table
        return noise(path, draw)
    for _ in range(draw.choice((1, 3, 30))):
        index = draw.randrange(len(lines))
        lines[index] = changed(lines[index], draw)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def changed(value: Any, draw: random.Random) -> Any:
    """Return a value of JSON with an odd one in a random place, or without one of its keys."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return deepcopy(draw.choice(ODD))
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if draw.random() < 0.2:
        return {name: item for name, item in value.items() if name != key} if isinstance(value, dict) else value[1:]
    value[key] = changed(value[key], draw)
    return value


DAMAGES = (truncated, random_bytes, noise, a_pipe, a_folder, a_link_to_nothing, missing, odd_values)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail where the block takes longer, as one that opens a pipe."""

    def late(*_: object) -> None:
        raise AssertionError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def use_every_tool(folder: Path, bad: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run every tool on the run in `bad`; `folder` holds a good one, too. Return what was said on standard error."""
    say_left_out.cache_clear()
    for words in (
        ["watch", "--once"], ["report", "--output", str(folder / "page.html"), "--all-samples"],
        ["report", "--trace", str(folder / "trace.json")], ["inspect"], ["ledger"],
    ):  # fmt: skip
        with within(20):
            assert main([words[0], str(bad), *words[1:]]) in (0, 1), words
    capsys.readouterr().out  # noqa: B018
    with within(20):
        assert main(["runs", str(folder)]) == 0
    listed = capsys.readouterr()
    assert "good" in listed.out and "all steps are done" in listed.out
    for read in (FollowedRun, lambda logs: recorded_step(logs, 2), recorded_run):
        with within(20):
            try:
                read(bad / "logs" / "exp_001")
            except (FollowError, ReplayError, NoRun, LedgerError, SamplesError) as error:
                assert str(bad) in str(error)
    run = SweepRun("s", 1, bad, ())
    with within(20):
        assert state(run, 0.0) in ("finished", "running", "interrupted", "failed", "not begun")
        by_setting([run])
    return listed.err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("good", "damaged"):
        write_whole_run(folder / name)
    return folder


def test_a_run_without_damage_is_read_in_silence(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say_left_out.cache_clear()
    assert main(["watch", "--once", str(whole / "damaged")]) == 0
    assert main(["report", str(whole / "damaged"), "--trace", str(whole / "trace.json")]) == 0
    assert main(["ledger", str(whole / "damaged" / "logs" / "exp_001")]) == 0, "the log folder names the run, too"
    said = capsys.readouterr()
    assert not said.err and "engine-0" in (whole / "trace.json").read_text() and "is left out" not in said.out


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damage_hides_nothing_else(
    whole: Path, tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str], file: str,
    damage: Callable[..., None],
) -> None:  # fmt: skip
    few, many = SEEDS.get(damage.__name__, (1, 1))
    for seed in range(many if pytestconfig.getoption("--chaos") else few):
        folder = tmp_path / str(seed)
        shutil.copytree(whole, folder)
        damage(folder / "damaged" / file, random.Random(f"{file} {damage.__name__} {seed}"))
        use_every_tool(folder, folder / "damaged", capsys)


SEEDS = {"truncated": (1, 3), "random_bytes": (1, 6), "odd_values": (2, 12), "noise": (1, 2)}
"""Numbers of random damages of a kind: in `make test`, with `--chaos`."""


@pytest.mark.parametrize("damage", [a_pipe, a_folder])
@pytest.mark.parametrize("file", ["metrics.jsonl", "hyperparams.json", "summary.json", "events.jsonl"])
def test_what_is_left_out_is_named_once(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damage: Callable[..., None]
) -> None:
    shutil.copytree(whole, tmp_path / "runs")
    path = tmp_path / "runs" / "damaged" / "logs" / "exp_001" / file
    damage(path, random.Random(0))
    say_left_out.cache_clear()
    assert main(["watch", "--once", str(tmp_path / "runs" / "damaged")]) == 0
    assert capsys.readouterr().err == f"{path} is left out: it is no regular file\n"


def test_lines_that_are_none_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_whole_run(tmp_path) / "metrics.jsonl"
    odd = '{"step": null, "prefix": "train"}\n{"step": 3, "prefix": "train", "loss": "x"}\n'
    path.write_bytes(b"\xff\xfe\n" + odd.encode() + path.read_bytes())
    say_left_out.cache_clear()
    assert main(["watch", "--once", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"{path}, line 1 is left out: it is not UTF-8; so are 2 others of its lines\n"
