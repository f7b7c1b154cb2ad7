import faulthandler

import pytest

from tests.functional.conftest import model, sft_run, shared_verifiers, task

__all__ = ["model", "sft_run", "shared_verifiers", "task"]


@pytest.fixture(autouse=True)
def only_its_own_deadline() -> None:
    """Cancel the ini file's timeout of calls into libraries: a campaign takes longer. The test waits for another
    process, so pytest-timeout can interrupt it."""
    faulthandler.cancel_dump_traceback_later()
