"""Parts of checkpointing that need no process group."""

from __future__ import annotations

import os
import queue

import pytest

from grpo_mcore.parallel.checkpoint import _ResultFile


def test_a_result_that_a_fork_puts_is_read_once() -> None:
    result = _ResultFile()
    for written in ({0: ["part"] * 100_000}, RuntimeError("the disk is full")):  # more than a pipe holds
        with pytest.raises(queue.Empty):
            result.get_nowait()
        if (child := os.fork()) == 0:
            result.put(written)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert repr(result.get_nowait()) == repr(written)
    with pytest.raises(queue.Empty):
        result.get_nowait()
