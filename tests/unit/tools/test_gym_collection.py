"""`grpo-mcore data collect` writes every rollout, whatever its text is."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types.responses import EasyInputMessageParam
from pydantic import TypeAdapter

from grpo_mcore.data import DataError
from grpo_mcore.data.datasets.files import gym_task
from grpo_mcore.rollout.trajectory import ImageSpan, Score, Trajectory, Turn, content_number
from grpo_mcore.tools.gym_collection import Collected, UnfinishedCollection, rollout_line, write_rollout


def test_a_text_that_is_no_unicode_does_not_cost_all_rollouts() -> None:
    """A tool that cuts its output in the middle of an emoji: JSON carries the half, and a file of text does not."""
    kept, failed = BytesIO(), BytesIO()
    collected = Collected(Path("out.jsonl"), Path("out_failures.jsonl"))
    write_rollout(
        collected, {"reward": 1.0, "response": {"output": [{"output": "cut \ud83d"}]}, "picture": b"\xff"}, kept, failed
    )
    (line,) = kept.getvalue().decode().splitlines()
    assert json.loads(line)["response"]["output"] == [{"output": "cut \ufffd"}] and collected.rows == 1


def test_tools_of_a_prompt_are_kept_images_are_data_urls_and_an_environments_are_refused() -> None:
    image, said = (
        ImageSpan(1, 2, "cat", (1, 2, 4)),
        Turn("assistant", torch.tensor([9]), torch.tensor([-0.5]), True, "cat"),
    )
    prompt = Turn("user", torch.tensor([4, 6, 6, 5]), images=(image,))
    parts = [{"type": "image", "image": b"bytes of a cat"}, {"type": "text", "text": "which?"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    more: Any = {"task": {}, "task_index": 0, "agent": "a", "sampling": {}, "model": "m", "token_ids": True}
    score, end = Score(1.0, None, "", 0.0), (((1, 0, 5),), "stop", False)

    def line(*turns: Turn) -> Any:
        return rollout_line(
            [{"role": "user", "content": parts}], Trajectory("p", 0, turns, *end), score, tools=tools, **more
        )

    written = json.loads(json.dumps(line(prompt, said)))
    TypeAdapter(EasyInputMessageParam).validate_python(written["responses_create_params"]["input"][0])
    task = gym_task(written)
    assert [message["content"] for message in task["messages"]] == [parts] and task["tools"] == tools
    first = content_number("cat")
    assert written["response"]["output"][0]["prompt_token_ids"] == [4, first, first - 1, 5]
    with pytest.raises(DataError, match="p#0: images in an environment's answers cannot be collected yet"):
        line(prompt, said, prompt)


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
