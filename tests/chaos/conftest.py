from __future__ import annotations

import faulthandler

import pytest

from tests.functional.conftest import model, sft_run, task

__all__ = ["model", "sft_run", "task"]


@pytest.fixture(autouse=True)
def only_its_own_deadline() -> None:
    """A campaign takes longer than the time after which the ini file ends what hangs in a library call. It waits for
    another process, so pytest-timeout can interrupt it."""
    faulthandler.cancel_dump_traceback_later()
