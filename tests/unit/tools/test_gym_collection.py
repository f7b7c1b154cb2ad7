"""`grpo-mcore data collect` writes every rollout, whatever its text is."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

from grpo_mcore.tools.gym_collection import Collected, _write


def test_a_text_that_is_no_unicode_does_not_cost_all_rollouts() -> None:
    """A tool that cuts its output in the middle of an emoji: JSON carries the half, and a file of text does not."""
    kept, failed = BytesIO(), BytesIO()
    collected = Collected(Path("out.jsonl"), Path("out_failures.jsonl"))
    _write(
        collected, {"reward": 1.0, "response": {"output": [{"output": "cut \ud83d"}]}, "picture": b"\xff"}, kept, failed
    )
    (line,) = kept.getvalue().decode().splitlines()
    assert json.loads(line)["response"]["output"] == [{"output": "cut \ufffd"}] and collected.rows == 1
