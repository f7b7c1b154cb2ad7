"""Input and output files: gzip, encodings, line ends; whole outputs, lists of rejected lines, --strict."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.data.gym import gym_to_dpo, gym_to_grpo, gym_to_sft
from grpo_mcore.data.gym.files import read_lines
from grpo_mcore.data.interfaces import DataError
from tests.failing import failing
from tests.unit.data.gym.conftest import TRANSFORMS, adds_up, read, rollout, write
from tests.waiting import wait_until

ROWS = [rollout(f"q{n}", f"a{n % 4}", float(n % 2)) for n in range(40)] + [rollout("q0", "other", 1.0)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "rollouts.jsonl", ROWS)


def folder(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["packed.jsonl.gz", "packed.jsonl"])
def test_gzip_by_its_content(source: Path, tmp_path: Path, transform: str, name: str) -> None:
    plain, text = tmp_path / "plain.jsonl", source.read_bytes()
    packed = tmp_path / name
    packed.write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))  # two gzip members
    one = TRANSFORMS[transform](source, plain)
    other = TRANSFORMS[transform](packed, tmp_path / "out.jsonl")
    assert (one.rows, one.kept) == (other.rows, other.kept)
    assert plain.read_bytes() == (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.parametrize("damage", ["cut off", "changed", "more behind it", "not gzip"])
def test_damaged_gzip_is_rejected(source: Path, tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(source.read_bytes()))
    if damage == "cut off":
        del packed[-20:]
    elif damage == "changed":
        packed[len(packed) // 2] ^= 255
    elif damage == "more behind it":
        packed += b"more"
    else:
        packed = bytearray(b"\x1f\x8bno")
    source.write_bytes(packed)
    with pytest.raises(DataError, match=r"cut off or damaged after line \d+ .*gzip -dc"):
        gym_to_grpo(source, tmp_path / "out.jsonl")
    assert folder(tmp_path) == ["rollouts.jsonl"]


def test_utf_16_is_rejected(tmp_path: Path) -> None:
    for encoding in ("utf-16-le", "utf-16-be"):
        source = tmp_path / "rollouts.jsonl"
        source.write_bytes(("\ufeff" + '{"a": 1}\n').encode(encoding))
        with pytest.raises(DataError, match="UTF-16"):
            gym_to_grpo(source, tmp_path / "out.jsonl")


def test_no_line_end_at_the_end_and_no_byte_order_mark(source: Path, tmp_path: Path) -> None:
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes().rstrip(b"\n"))
    summary = gym_to_grpo(source, tmp_path / "out.jsonl")
    assert (summary.rows, summary.kept, summary.malformed) == (41, 41, 0)


@pytest.mark.parametrize("text", [b"", b"\n\n \n"])
def test_empty_files(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "empty.jsonl").write_bytes(text)
    for transform in TRANSFORMS.values():
        summary = transform(tmp_path / "empty.jsonl", tmp_path / "out.jsonl")
        assert summary.rows == summary.written == 0 and adds_up(summary) and "nothing written" in str(summary)
    assert folder(tmp_path) == ["empty.jsonl"]


def test_lines_and_their_numbers(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "f").write_bytes(b"a\n\nbb\r\n" + b"c" * 20 + b"\n" + b"d" * 10 + b"\n" + b"e" * 11)
    monkeypatch.setattr("grpo_mcore.data.gym.files.LONGEST_LINE", 10)
    lines = [(1, b"a\n"), (2, b"\n"), (3, b"bb\r\n"), (4, None), (5, b"d" * 10 + b"\n"), (6, None)]
    assert list(read_lines(tmp_path / "f")) == lines


@pytest.mark.parametrize(
    ("source_name", "target_name", "message"),
    [
        ("missing.jsonl", "new/out.jsonl", "missing.jsonl: cannot be read: No such file"),
        ("", "out.jsonl", "cannot be read: Is a directory"),
        ("rollouts.jsonl", "rollouts.jsonl", "replace the input"),
        ("rollouts.jsonl", "link.jsonl", "replace the input"),
        ("rollouts.jsonl", "out.jsonl.gz", "not compressed"),
        ("rollouts.jsonl", "", "must be a file"),
        ("rollouts.jsonl", os.devnull, "must be a file"),
        ("rollouts.jsonl", "rollouts.jsonl/out.jsonl", "cannot be written"),
    ],
)
def test_impossible_paths(source: Path, tmp_path: Path, source_name: str, target_name: str, message: str) -> None:
    (tmp_path / "link.jsonl").symlink_to(source)
    before = source.read_bytes()
    with pytest.raises(DataError, match=message):
        gym_to_grpo(tmp_path / source_name, tmp_path / target_name)
    assert source.read_bytes() == before and folder(tmp_path) == ["link.jsonl", "rollouts.jsonl"]


def test_the_output_replaces_a_file_and_makes_folders(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out.jsonl"
    gym_to_grpo(source, target)
    target.write_text("old")
    gym_to_grpo(source, target)
    assert len(read(target)) == 41 and folder(target.parent) == ["out.jsonl"]


def test_the_old_file_stays_where_no_row_is_kept(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old")
    summary = gym_to_sft(source, tmp_path / "out.jsonl", reward_threshold=5.0)
    assert summary.kept == summary.written == 0 and (tmp_path / "out.jsonl").read_text() == "old"


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_error_in_the_middle_leaves_nothing(source: Path, tmp_path: Path, transform: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("grpo_mcore.data.gym.run.Transformation.write", failing(errno.ENOSPC))
    with pytest.raises(DataError, match="No space left on device"):
        TRANSFORMS[transform](source, tmp_path / "out.jsonl")
    assert folder(tmp_path) == ["rollouts.jsonl"]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_strict_stops_at_the_first_bad_line(tmp_path: Path, transform: str) -> None:
    source = write(tmp_path / "rollouts.jsonl", [*ROWS, b"{", b"["])
    (tmp_path / "out.jsonl").write_text("old")
    with pytest.raises(DataError, match=r"rollouts.jsonl:42: not JSON .*--strict"):
        TRANSFORMS[transform](source, tmp_path / "out.jsonl", strict=True)
    assert folder(tmp_path) == ["out.jsonl", "rollouts.jsonl"] and (tmp_path / "out.jsonl").read_text() == "old"


def test_all_rejected_lines_are_listed_and_the_first_are_printed(tmp_path: Path, caplog: Any) -> None:
    source = write(tmp_path / "rollouts.jsonl", [ROWS[0], *[b"{"] * 500, ROWS[1], b"", b"x"])
    summary = gym_to_grpo(source, tmp_path / "out.jsonl")
    listed = (tmp_path / "out.jsonl.rejected.txt").read_text().splitlines()
    assert [int(line.split(":")[1]) for line in listed] == [*range(2, 502), 504] and summary.malformed == 501
    said = caplog.text
    assert "rollouts.jsonl:21:" in said and "rollouts.jsonl:22:" not in said and "all are listed" in said
    assert "501  listed in" in str(summary) and "1 blank lines" in str(summary)

    gym_to_grpo(write(source, ROWS), tmp_path / "out.jsonl")
    assert folder(tmp_path) == ["out.jsonl", "rollouts.jsonl"]  # the old list of rejected lines is deleted


def test_the_summary(tmp_path: Path) -> None:
    rows = [rollout("q", "a", reward, expected_answer="2") for reward in (1.0, 1.0, 0.5)]
    source = write(tmp_path / "in.jsonl", [*rows, rollout(reward=0.0), rollout([], reward=0.0), b"{"])
    text = str(gym_to_grpo(source, tmp_path / "out.jsonl"))
    for line in (
        "rows in                         6",
        "kept                            4",
        "filtered                        1",
        "malformed                       1",
        "without ground truth            1  of those kept",
        "ground truth from               3  expected_answer",
        "with a reward                   5  0 to 1, mean 0.5",
        '"input":"q"',
    ):
        assert line in text
    assert [line.split()[1] for line in text.splitlines() if line.endswith("#")] == ["2", "1", "2"]


@pytest.mark.parametrize("function", [gym_to_grpo, gym_to_dpo])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, function: Any) -> None:
    pipe = tmp_path / "rollouts.jsonl"
    os.mkfifo(pipe)  # the run waits for more
    out = tmp_path / "out"
    command = [sys.executable, "-m", "grpo_mcore.cli.main", "data", function.__name__.replace("_", "-")]
    process = subprocess.Popen(
        [*command, "--input", str(pipe), "--output", str(out / "t.jsonl")], stderr=subprocess.PIPE
    )
    with pipe.open("wb") as file:
        file.write(b"".join(b"{}\n" for _ in range(1000)))
        file.flush()
        wait_until(lambda: out.exists() and os.listdir(out), "its temporary file")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    said = process.stderr.read()
    assert b"interrupted" in said and b"Traceback" not in said
    assert os.listdir(out) == []
