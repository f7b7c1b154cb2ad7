"""A file read by several processes gives the same results as one read line by line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mcore.data.gym import Summary, gym_to_grpo, parts
from grpo_mcore.data.gym.lines import LineReader
from grpo_mcore.data.interfaces import DataError
from tests.unit.data.gym.conftest import TRANSFORMS, rollout, write

Forks = list[int]


@pytest.fixture
def forks(monkeypatch: Any) -> Iterator[Forks]:
    """Let three processes read every file. Return the number of processes of each run."""
    seen: Forks = []
    monkeypatch.setattr(parts, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    at_once, before = parts._parallel, set(psutil.Process().children())

    def counted(reader: Any, work: Any, processes: int) -> Any:
        seen.append(processes)
        return at_once(reader, work, processes)

    monkeypatch.setattr(parts, "_parallel", counted)
    yield seen
    assert set(psutil.Process().children()) <= before


def corpus(path: Path) -> Path:
    """Write groups of good rows with malformed, blank and long lines and other line ends between them."""
    rng = random.Random(3)
    odd = [b"{", b"", b"   ", b"\xff\xfe", b'{"a": 1}', b"\xef\xbb\xbf{}", b"x" * 5000, b"[" * 2000]
    rows: list[Any] = []
    for number in range(400):
        rows.append(rollout(f"q{number // 5}", f"a{rng.randrange(4)}" * rng.choice([1, 9, 400]), rng.random()))
        if rng.random() < 0.3:
            rows.append(rng.choice(odd))
    write(path, rows)
    path.write_bytes(path.read_bytes().replace(b"q7", b"q7\xc3\xa9").rstrip(b"\n"))
    return path


def counts(summary: Summary) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(summary).items()
        if name not in ("target", "rejected", "seconds", "rewards", "source")
    }


@pytest.mark.parametrize("size", [64, 700, 4096, 1 << 20])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_same_as_line_by_line(
    tmp_path: Path, transform: str, size: int, forks: Forks, monkeypatch: Any, caplog: Any
) -> None:
    source, one, many = corpus(tmp_path / "in.jsonl"), tmp_path / "one" / "out.jsonl", tmp_path / "many" / "out.jsonl"
    with monkeypatch.context() as serial:
        serial.setattr(parts, "PARALLEL_BYTES", 1 << 40)
        expected = TRANSFORMS[transform](source, one)
    said = list(caplog.messages)
    caplog.clear()
    assert not forks and expected.malformed > 50 and expected.blank > 10 and expected.kept > 50
    monkeypatch.setattr(parts, "PART_BYTES", size)
    found = TRANSFORMS[transform](source, many)
    assert forks == [3] and found.adds_up
    assert counts(found) == counts(expected) and vars(found.rewards) == vars(expected.rewards)
    assert many.read_bytes() == one.read_bytes()
    rejected = [path.with_name("out.jsonl.rejected.txt").read_bytes() for path in (one, many)]
    assert rejected[0] == rejected[1] and caplog.messages == said


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text", [b"", b"\n", b"\n\n\n", b"a\nbb\n\nccc", b"a\r\nb", b"\xef\xbb\xbfa\n", b"x" * 50 + b"\ny"]
)
def test_every_line_is_in_one_block(tmp_path: Path, size: int, text: bytes) -> None:
    (tmp_path / "f").write_bytes(text)
    with LineReader(tmp_path / "f", longest=10) as reader:
        whole = [line for _, line in reader]
        blocks = [list(reader.block(start, start + size)) for start in range(0, len(text), size)]
    assert [line for block in blocks for _, line in block] == whole
    assert all([number for number, _ in block] == [*range(1, len(block) + 1)] for block in blocks)


def test_strict_names_the_first_bad_line(tmp_path: Path, forks: Forks, monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    source = write(tmp_path / "in.jsonl", [*[rollout()] * 50, b"{", *[rollout()] * 50, b"["])
    with pytest.raises(DataError, match="in.jsonl:51: not JSON"):
        gym_to_grpo(source, tmp_path / "out.jsonl", strict=True)
    assert forks and os.listdir(tmp_path) == ["in.jsonl"]


def test_utf_16_is_rejected_by_the_process_that_reads_it(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "in.jsonl").write_bytes(('\ufeff{"a": 1}\n' * 90).encode("utf-16-le"))
    with pytest.raises(DataError, match="UTF-16"):
        gym_to_grpo(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert forks


def test_an_error_in_a_process_is_raised_here(tmp_path: Path, forks: Forks, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LineReader, "block", fail)
    with pytest.raises(DataError, match="Input/output error"):
        gym_to_grpo(write(tmp_path / "in.jsonl", [rollout()] * 9), tmp_path / "out.jsonl")
    assert forks and os.listdir(tmp_path) == ["in.jsonl"]


def test_a_process_that_is_killed_ends_the_run(tmp_path: Path, forks: Forks, monkeypatch: Any) -> None:
    monkeypatch.setattr(LineReader, "block", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match="was killed"):
        gym_to_grpo(write(tmp_path / "in.jsonl", [rollout()] * 9), tmp_path / "out.jsonl")
    assert forks and os.listdir(tmp_path) == ["in.jsonl"]


def test_no_fork_while_other_threads_run(tmp_path: Path, forks: Forks) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert gym_to_grpo(write(tmp_path / "in.jsonl", [rollout()] * 9), tmp_path / "out.jsonl").kept == 9
    finally:
        done.set()
        thread.join()
    assert not forks


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_run(tmp_path: Path, how: int) -> None:
    source = write(tmp_path / "in.jsonl", [rollout("q", "a" * 1000)] * 5000)
    code = """if True:
        import sys, time
        from pathlib import Path
        from grpo_mcore.data.gym import gym_to_grpo, parts, run
        import os
        parts.PARALLEL_BYTES, parts.PART_BYTES = 1, 1 << 12
        os.sched_getaffinity = lambda _: {0, 1}
        run.Transformation.write = lambda *_: time.sleep(0.1)
        gym_to_grpo(Path(sys.argv[1]), Path(sys.argv[2]))
    """
    run = psutil.Popen([sys.executable, "-c", code, str(source), str(tmp_path / "out.jsonl")], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while len(children := run.children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    run.send_signal(how)
    run.wait(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    if how == signal.SIGINT:
        assert os.listdir(tmp_path) == ["in.jsonl"]
