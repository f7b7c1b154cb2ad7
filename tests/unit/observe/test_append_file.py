"""Lines survive a kill and a full disk: none is missing, none is torn."""

import errno
import io
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mcore.observe import Ledger, audit, read_ledger
from grpo_mcore.observe.append_file import AppendFile


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Let every file end at `size` bytes, as if the disk were full there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_has_no_room_is_written_later(tmp_path: Path, package_log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lines"
    file = AppendFile(path)
    with full_at(10):  # in the middle of the second line
        for number in range(4):
            file.write(f"line {number}")
        assert path.read_text() == "line 0\nlin" and file.lines == 4
        with pytest.raises(OSError) as raised:
            file.sync()
        assert raised.value.errno == errno.EFBIG
    file.write("line 4")
    assert path.read_text().split("\n") == [f"line {number}" for number in range(5)] + [""]
    assert package_log.text.count("cannot be written") == 1 and "no line is missing" in package_log.text
    assert file.sync() == 5
    file.close()
    file.close()


class Interrupted(io.FileIO):
    """Ctrl-C comes right after the first write."""

    pressed = False

    def write(self, text: Any) -> int:
        written = super().write(text)
        if not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return written


def test_ctrl_c_right_after_a_write_does_not_write_it_twice(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = AppendFile(path)
    file.write("one")
    file._file = Interrupted(path, "ab")  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        file.write("two")
    file.close()
    assert path.read_text() == "one\ntwo\n"


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("one\ntw")
    file = AppendFile(path)
    assert file.lines == 1
    file.write("two")
    file.close()
    assert path.read_text() == "one\ntwo\n"


def test_what_is_lost_at_the_end_is_said(tmp_path: Path, package_log: pytest.LogCaptureFixture) -> None:
    file = AppendFile(tmp_path / "lines")
    with full_at(1):
        file.write("one")
        file.write("two")
        file.close()
    assert "the last 2 lines of" in package_log.text


def test_a_ledger_on_a_disk_that_fills_and_empties_has_no_flaw(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, step=0, kept=0, max_age=0)
    for step in range(1, 9):
        with full_at(os.stat(path).st_size + 40 if step % 3 else 10**9):
            ledger.write("dispatched", uids=[f"p{step}"], version=step)
            ledger.write("finished", uid=f"p{step}", version=step, scored=4)
            ledger.write("trained", uids=[f"p{step}"], step=step, version=step)
            if step % 3:
                with pytest.raises(OSError):
                    ledger.sync()
    assert ledger.sync() == 25
    ledger.close()
    found = audit(read_ledger(path))
    assert not found.flaws and found.steps == 8


def test_every_object_becomes_a_line(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": [0.5, None, "é\n"]}, {"why": "broken \udcff text"}, {"x": np.float64(2)}, {"big": 1 << 70}]
    file = AppendFile(tmp_path / "lines")
    for row in rows:
        file.write_json(row)
    assert list(map(json.loads, (tmp_path / "lines").read_bytes().splitlines())) == rows


def test_a_file_that_was_removed_is_made_anew_with_all_its_lines(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    file = AppendFile(folder / "lines")
    file.write("first")
    assert not file.restore() and not package_log.text
    shutil.rmtree(folder)
    file.write("second")
    assert file.line(2) == b"second\n", "what is open still has them"
    assert file.restore() and not file.restore()
    file.write("third")
    assert (folder / "lines").read_text() == "first\nsecond\nthird\n" and os.listdir(folder) == ["lines"]
    assert package_log.text.count("is made anew, and no line is missing") == 1
    file.path.unlink()
    file.path.mkdir()
    assert not file.restore(), "what is in its place is left alone"
    file.path.rmdir()
    file.path.symlink_to(file.path)
    assert not file.restore(), "what cannot be looked at is not gone"
    file.path.unlink()
    folder.rmdir()
    folder.write_text("a file in place of the folder")
    assert file.restore() and "cannot be made anew" in package_log.text
    file.close()
