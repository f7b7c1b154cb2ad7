"""Files of tensors: they come back as they were, run no code, and a full disk is an OSError."""

import datetime
import errno
import os
import random
import resource
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mcore.base import tensor_files


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_rows_and_generators_hold_comes_back(tmp_path: Path) -> None:
    value = {
        "python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
        "count": Counter("aab"),
        "row": {"day": datetime.date(2026, 1, 2), "sum": Decimal("1.5"), "tags": {"a"}, "x": np.float64(2)},
    }  # fmt: skip
    tensor_files.save(value, tmp_path / "new.pt")
    torch.save(value, tmp_path / "old.pt")  # as earlier versions wrote it
    for name in ("new.pt", "old.pt"):
        back = tensor_files.load(tmp_path / name)
        assert back["python"] == value["python"] and back["row"] == value["row"]
        assert back["count"] == value["count"]
        assert torch.equal(back["torch"], value["torch"]) and (back["numpy"][1] == value["numpy"][1]).all()


def test_a_crafted_file_runs_nothing(tmp_path: Path) -> None:
    torch.save({"waiting": [Trap(tmp_path / "made")]}, tmp_path / "data.pt")
    with pytest.raises(tensor_files.UnsafeFile, match=r"data.pt is not read: it holds posix.mkdir"):
        tensor_files.load(tmp_path / "data.pt")
    assert not (tmp_path / "made").exists()


class Unlisted:
    """A type that nobody has made safe for torch, as Megatron-Core does with paths."""


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"data.pt: .*Unlisted cannot be saved; use numbers"):
        tensor_files.save({"row": Unlisted()}, tmp_path / "data.pt")
    with pytest.raises(TypeError, match=r"data.pt: .* cannot be saved"):
        tensor_files.save({"row": 1 << 5000}, tmp_path / "data.pt")  # torch would not read it back
    assert not os.listdir(tmp_path)


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            tensor_files.save(torch.zeros(10_000), tmp_path / "data.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
