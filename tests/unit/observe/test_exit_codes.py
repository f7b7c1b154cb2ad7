"""How a run ended is written once, and read by all in the same way."""

from typing import Any

import pytest

from grpo_mcore.base.stopping import Terminated
from grpo_mcore.observe.exit_codes import LOST, STOPPED_EARLY, TERMINATED, UNSAVED, RunEnd, exit_code


@pytest.mark.parametrize(
    ("early", "at_once", "unsaved", "kind", "code"),
    [
        (False, False, 0, "finished", 0),
        (True, False, 0, "stopped", STOPPED_EARLY),
        (True, True, 0, "terminated", TERMINATED),
        (False, False, 2, "finished", UNSAVED),
        (True, True, 2, "terminated", UNSAVED),
    ],
)
def test_an_end_is_read_as_it_was_written(early: bool, at_once: bool, unsaved: int, kind: str, code: int) -> None:
    end = RunEnd.in_order("why", early=early, at_once=at_once, unsaved=unsaved)
    assert (end.kind, end.exit_code, end.is_complete) == (kind, code, code == 0)
    assert RunEnd.of(end.plain()) == end and exit_code(end.plain()) == code
    assert str(end) == ("why; 2 trained steps are not saved" if unsaved else "why")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ValueError("no\nmore"), "failed", 1),
        (ConnectionError("gone"), "failed", LOST),
        (KeyboardInterrupt(), "terminated", 130),
        (Terminated(), "terminated", TERMINATED),
        (SystemExit(15), "terminated", TERMINATED),
    ],
)
def test_an_error_is_an_end(error: BaseException, kind: str, code: int) -> None:
    end = RunEnd.by(error, 1)
    assert (end.kind, end.exit_code, end.unsaved, end.is_complete) == (kind, code, 1, False)
    assert "\n" not in str(end) and RunEnd.of(end.plain()) == end


@pytest.mark.parametrize(
    ("summary", "code"),
    [
        ({"end": "done", "stopped_early": False}, 0),
        ({"end": "done", "stopped_early": True, "terminated": False, "unsaved": None}, STOPPED_EARLY),
        ({"end": "done", "stopped_early": True, "terminated": True, "unsaved": None}, TERMINATED),
        ({"end": "done", "stopped_early": False, "terminated": False, "unsaved": 8}, UNSAVED),
        ({"end_kind": ["odd"], "unsaved": None}, 0),
        ({"end_kind": "stopped", "exit_code": "odd", "unsaved": "odd"}, STOPPED_EARLY),
    ],
)
def test_summaries_of_older_versions_and_odd_ones_are_read(summary: dict[str, Any], code: int) -> None:
    assert RunEnd.of(summary).exit_code == code
