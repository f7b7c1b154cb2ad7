from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from grpo_mcore.data.gym.disk_sort import DiskSort


@pytest.mark.parametrize("run_bytes", [1, 200, 5000, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_records_come_in_order(tmp_path: Path, run_bytes: int, count: int) -> None:
    if run_bytes == 1 and count > 100:
        count = 100  # a run for each record
    rng = random.Random(count)
    records = [
        (rng.randrange(-3, 4), rng.choice([-1.5, 0.0, 2.25]), n * 2**40, rng.randrange(99)) for n in range(count)
    ]
    rng.shuffle(records)
    sort = DiskSort(tmp_path, "qdqi", keys=3, run_bytes=run_bytes)
    for record in records:
        sort.add(*record)
    assert list(sort) == sorted(records)
    sort.close()
    assert os.listdir(tmp_path) == []


def test_the_whole_range_of_numbers(tmp_path: Path) -> None:
    records = [(2**63 - 1, 1), (-(2**63), 2), (0, 3)]
    sort = DiskSort(tmp_path, "qi", keys=1)
    for record in records:
        sort.add(*record)
    assert list(sort) == sorted(records)
    sort.close()
