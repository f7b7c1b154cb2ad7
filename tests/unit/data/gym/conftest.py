"""Rollouts as NeMo Gym writes them, files of them, and the three transformations with one signature."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.data.gym import Summary, gym_to_dpo, gym_to_grpo, gym_to_sft

Transform = Callable[[Path, Path], Summary]
# Each keeps as much as it can, so that a lost row is noticed.
TRANSFORMS: dict[str, Callable[..., Summary]] = {
    "grpo": gym_to_grpo,
    "grpo messages": partial(gym_to_grpo, prompt_format="messages"),
    "sft": partial(gym_to_sft, reward_threshold=-1e9),
    "sft simple": partial(gym_to_sft, reward_threshold=-1e9, format="simple"),
    "dpo": gym_to_dpo,
    "dpo messages": partial(gym_to_dpo, prompt_format="messages"),
    "dpo stratified": partial(gym_to_dpo, strategy="stratified"),
}


def adds_up(summary: Summary) -> bool:
    return summary.rows == summary.kept + summary.filtered.total() + summary.malformed


def message(text: Any, role: str = "assistant") -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def call(name: str, arguments: str, call_id: str | None = "c1") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id}


def call_output(output: Any, call_id: str | None = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "output": output, "call_id": call_id}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def rollout(
    question: Any = "1+1?", output: Any = "2", reward: Any = 1.0, params: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return a rollout as NeMo Gym writes it. `question` is the text of one user message, or the whole input; `output`
    the text of one message, or the list of items."""
    asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
    done = [message(output)] if isinstance(output, str) else output
    return {
        "responses_create_params": {"input": asked, "metadata": None, "tools": None, **(params or {})},
        "response": {"id": "r", "output": done, "usage": None},
        "reward": reward,
        **more,
    }


def spec_rollout(question: str = "1+1?", output: str = "2", reward: float = 1.0, **params: Any) -> dict[str, Any]:
    """Return a rollout with `output` at the top."""
    asked = [{"role": "user", "content": question}]
    return {"responses_create_params": {"input": asked, **params}, "output": [message(output)], "reward": reward}


def write(path: Path, rows: Iterable[Any]) -> Path:
    """Write a line for each row; bytes are written unchanged."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Skip fsync: with two thousand small files it would take most of the time, and no test crashes the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Summary, list[dict[str, Any]]]]:
    """Return a function run("grpo", rows, **options) -> (summary, rows of the output)."""

    def run_it(name: str, rows: Iterable[Any], **options: Any) -> tuple[Summary, list[dict[str, Any]]]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        source, target = write(tmp_path / "rollouts.jsonl", rows), tmp_path / "out" / "train.jsonl"
        summary = TRANSFORMS[name](source, target, **options)
        assert adds_up(summary)
        assert target.exists() == bool(summary.written)
        return summary, read(target) if target.exists() else []

    return run_it
