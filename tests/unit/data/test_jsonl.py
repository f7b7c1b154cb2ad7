"""JSON and JSONL files: every row is read back, and an error names the line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.data import DataError
from grpo_mcore.data.datasets.jsonl import read_json


def read(path: Path, data: bytes) -> tuple[list, list]:
    path.write_bytes(data)
    rows, numbers = read_json(path)
    return list(rows), list(numbers)


ROWS = [{"input": "é \u2028 \x85 end"}, {"n": 1}, {"n": None}]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (b"\n".join(LINES), [1, 2, 3]),
        (b"\xef\xbb\xbf" + b"\r\n".join(LINES) + b"\r\n", [1, 2, 3]),
        (b"\n \n" + LINES[0] + b"\n\n" + LINES[1] + b"\n" + LINES[2] + b"\n\n", [3, 5, 6]),
        (json.dumps(ROWS, indent=1).encode(), [0, 1, 2]),
        (b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_and_their_lines(tmp_path, name, data, numbers) -> None:
    assert read(tmp_path / name, data) == (ROWS, numbers)
    assert read(tmp_path / name, gzip.compress(data)) == (ROWS, numbers)  # whatever its name
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    rows, lines = read_json(tmp_path / f"{name}.gz")
    assert (list(rows), list(lines), rows[1]) == (ROWS, numbers, ROWS[1])


def test_a_whole_number_with_a_point_keeps_its_digits(tmp_path) -> None:
    data = b'{"a": [12345678901234567890.0, 1e30, -9007199254740993.0, 5.0, 0.25, 12345678901234567.5, NaN]}'
    (row,), _ = read(tmp_path / "a.jsonl", data)
    whole = "12345678901234567890, 1000000000000000000000000000000, -9007199254740993"
    assert str(row["a"]) == f"[{whole}, 5.0, 0.25, 1.2345678901234568e+16, nan]"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n{"a": ', r"a\.jsonl:2: not JSON \(Expecting value, column"),
        (b'{"a": 1}\n5', r"a\.jsonl:2: expected a JSON object, got int; one JSON object a line"),
        (b'{"a": 1}\n{"a": "\xff"}', r"a\.jsonl:2: not UTF-8 text \(invalid start byte, byte 7\)"),
        (b'{"a": "\\ud800"}', r"a\.jsonl:1: half a surrogate pair"),
        (b'{"a": ' + b"1" * 100_000 + b"}", r"a\.jsonl:1: not usable JSON \(Exceeds the limit"),
        (b'{"a": ' + b"[" * 100_000, r"a\.jsonl:1: not usable JSON \(.*recursion"),
        (b'[{"a": 1}, 5]', r"a\.jsonl, object 1: expected a JSON object, got int"),
        (b'[{"a": 1},', r"a\.jsonl: not JSON \(.*, column 11\)"),
        (b'[{"a": 1},\n{"a": ]', r"a\.jsonl: not JSON \(Expecting value, line 2, column 7\)"),
        (b"[]", r"a\.jsonl: the dataset is empty"),
        (b"", r"a\.jsonl: the dataset is empty"),
    ],
)
def test_a_line_that_is_not_a_row(tmp_path, data, message) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.jsonl", data)


def test_complete_surrogate_pairs_are_text(tmp_path) -> None:
    assert read(tmp_path / "a.jsonl", b'{"a": "\\ud83d\\ude00"}')[0] == [{"a": "\U0001f600"}]


def test_a_truncated_gzip_file(tmp_path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(LINES * 100))[:-20])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: not a whole gzip file"):
        read_json(tmp_path / "a.jsonl.gz")


def test_the_file_is_closed_with_its_rows(tmp_path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    rows, _ = read_json(_written(tmp_path, 3))
    assert rows[2]["n"] == 2
    del rows
    assert len(os.listdir("/proc/self/fd")) == before


MEASURE = """
import resource, sys
from pathlib import Path
from grpo_mcore.data.datasets.jsonl import read_json
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows, _ = read_json(Path(sys.argv[1]))
assert rows[len(rows) - 1]["n"] == len(rows) - 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_file_stays_on_disk(tmp_path) -> None:
    path = _written(tmp_path, 40_000, text="x" * 1000)
    assert path.stat().st_size > 40_000_000
    found = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 10_000  # KiB


def _written(folder: Path, count: int, **more: str) -> Path:
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"n": n, **more}) + "\n" for n in range(count))
    return path
