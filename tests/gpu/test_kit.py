"""The measurements of benchmarks/gpu at tiny sizes on one GPU: what they compare agrees."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.kit import Setting
from benchmarks.gpu.proof import PARTS
from grpo_mcore.base.host_memory import HostCopies


@pytest.mark.parametrize("part", PARTS)
def test_what_is_compared_agrees(part: str, tmp_path: Path) -> None:
    rows = list(importlib.import_module(f"benchmarks.gpu.{part}").run(Setting("gpu", True, tmp_path)))
    if part == "stack" and all(row.ok is None for row in rows):
        pytest.skip("none of the packages that it checks is installed")
    assert [row for row in rows if row.ok] and not [row for row in rows if row.ok is False]


def test_copies_on_the_host_are_pinned() -> None:
    tensors = [torch.randn(1000, 1001, device="cuda"), torch.randn(3, device="cuda").bfloat16()]
    expected, room = [tensor.clone() for tensor in tensors], HostCopies(tensors, pinned=True)
    assert all(copy.is_pinned() for copy in room.tensors)
    room.store(tensors)
    for tensor in tensors:
        tensor.zero_()
    room.restore(tensors)
    assert all(torch.equal(now, was) for now, was in zip(tensors, expected, strict=True))
    room.close()
    assert not any(copy.is_pinned() for copy in room.tensors)
