"""`grpo-mcore data collect` writes every rollout, whatever its text is."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.data import DataError
from grpo_mcore.tools.gym_collection import Collected, UnfinishedCollection, write_rollout


def test_a_text_that_is_no_unicode_does_not_cost_all_rollouts() -> None:
    """A tool that cuts its output in the middle of an emoji: JSON carries the half, and a file of text does not."""
    kept, failed = BytesIO(), BytesIO()
    collected = Collected(Path("out.jsonl"), Path("out_failures.jsonl"))
    write_rollout(
        collected, {"reward": 1.0, "response": {"output": [{"output": "cut \ud83d"}]}, "picture": b"\xff"}, kept, failed
    )
    (line,) = kept.getvalue().decode().splitlines()
    assert json.loads(line)["response"]["output"] == [{"output": "cut \ufffd"}] and collected.rows == 1


def test_an_interrupted_collection_goes_on_where_it_was(tmp_path: Path) -> None:
    output, settings = tmp_path / "out.jsonl", {"env": {"math": {}}, "--num_repeats": 2}
    prompts: Any = [{"uid": f"t:{number}"} for number in range(4)]
    with pytest.raises(KeyboardInterrupt) as interrupted, UnfinishedCollection(output, settings) as first:
        assert len(list(first.missing(prompts, {}))) == 4
        first.add("t:2", [{"reward": 1.0}, {"reward": None}])
        first.add("t:0", [{"reward": 0.0, "text": "\ud83d ä"}, {"reward": 0.0}])
        raise KeyboardInterrupt
    assert "2 prompts are done" in interrupted.value.__notes__[0]
    with first.path.open("ab") as file:
        file.write('{"uid": "t:1", "lines": ["ä'.encode()[:-1])  # killed while it wrote
    with pytest.raises(DataError, match="interrupted collection that differ in --num_repeats; delete it"):
        UnfinishedCollection(output, settings | {"--num_repeats": 3})
    asked: dict[str, None] = {}
    with UnfinishedCollection(output, settings) as second:
        with pytest.raises(DataError, match="another collection writes it; wait for its end"):
            UnfinishedCollection(output, settings)
        assert [prompt["uid"] for prompt in second.missing(prompts[:3], asked)] == ["t:1"]
        second.add("t:1", [{"reward": 0.5}])
        groups = dict(second.groups())
        assert list(asked) == ["t:0", "t:1", "t:2"] and list(groups) == ["t:2", "t:0", "t:1"]
        assert groups["t:0"][0]["text"] == "\ufffd ä" and groups["t:1"] == [{"reward": 0.5}]
        second.is_done = True
    assert not list(tmp_path.iterdir())


def test_a_collection_that_fails_before_its_first_prompt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError), UnfinishedCollection(tmp_path / "out.jsonl", {}):
        raise OSError
    assert not list(tmp_path.iterdir())


def test_a_damaged_line_is_sampled_again_with_those_behind_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), UnfinishedCollection(tmp_path / "out.jsonl", {}) as first:
        for uid in "abc":
            first.add(uid, [{"reward": 1.0}])
        raise KeyboardInterrupt
    text = first.path.read_bytes()
    first.path.write_bytes(text.replace(b'{"uid": "b"', b"\0" * 11))
    with UnfinishedCollection(tmp_path / "out.jsonl", {}) as second:
        assert [uid for uid, _ in second.groups()] == ["a"]
        assert [prompt["uid"] for prompt in second.missing([{"uid": uid} for uid in "abc"], {})] == ["b", "c"]  # type: ignore[typeddict-item]
