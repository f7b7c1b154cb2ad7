"""Rollouts that NeMo Gym wrote, where a copy is available, and the datasets that read the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.data import load_preference_dataset, load_response_dataset
from grpo_mcore.data.gym import gym_to_dpo, gym_to_grpo, gym_to_sft
from tests.unit.data.gym.conftest import read, rollout, write

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "data" / "gym_rollouts"
TOOLS = FOLDER / "example_tool_call_multireward_example_rollouts.jsonl"
CODE = FOLDER / "competitive_coding_challenges_example_rollouts.jsonl"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no sample rollouts of NeMo Gym in {FOLDER.name} beside it"
)


def originals(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tool_calls_become_conversations_that_load(tmp_path: Path) -> None:
    summary = gym_to_sft(TOOLS, tmp_path / "out.jsonl")
    assert (summary.rows, summary.kept, summary.rewards.high) == (5, 5, 2.0)
    for row, original in zip(read(tmp_path / "out.jsonl"), originals(TOOLS), strict=True):
        params, items = original["responses_create_params"], original["response"]["output"]
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        assert [message["content"] for message in row["messages"][:2]] == [one["content"] for one in params["input"]]
        (call,) = (item for item in items if item["type"] == "function_call")
        (made,) = row["messages"][2]["tool_calls"]
        assert (made["id"], made["function"]["name"]) == (call["call_id"], call["name"])
        assert made["function"]["arguments"] == call["arguments"]
        assert row["messages"][3]["tool_call_id"] == call["call_id"]
        assert row["messages"][4]["content"] == items[-1]["content"][0]["text"]
        (tool,) = params["tools"]
        assert row["tools"][0]["function"] == {key: value for key, value in tool.items() if key != "type"}
    entry = {"dataset_name": "openai_format", "data_path": str(tmp_path / "out.jsonl")}
    loaded = load_response_dataset(entry, "sft_processor").dataset
    arguments = loaded[0]["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert len(loaded) == 5 and arguments == {"city": "New York"}


def test_code_with_text_inputs_and_token_ids(tmp_path: Path) -> None:
    summary = gym_to_grpo(CODE, tmp_path / "out.jsonl")
    assert (summary.kept, summary.without_ground_truth) == (5, 5)
    for row, original in zip(read(tmp_path / "out.jsonl"), originals(CODE), strict=True):
        assert row["input"] == original["responses_create_params"]["input"]
        assert row["output"] == original["response"]["output"][-1]["content"][0]["text"]
    summary = gym_to_sft(CODE, tmp_path / "sft.jsonl", reward_threshold=0.0)
    assert all("reasoning_content" in row["messages"][1] for row in read(tmp_path / "sft.jsonl"))


def test_pairs_of_real_rollouts(tmp_path: Path) -> None:
    rows = originals(CODE)
    for number, row in enumerate(rows):
        row["reward"] = number / 4
    source = write(tmp_path / "in.jsonl", rows)
    gym_to_dpo(source, tmp_path / "out.jsonl")
    (pair,) = read(tmp_path / "out.jsonl")
    assert pair["prompt"] == rows[0]["responses_create_params"]["input"] and pair["reward_gap"] == 1.0
    assert pair["chosen"] == rows[4]["response"]["output"][-1]["content"][0]["text"]


def test_every_output_loads(tmp_path: Path) -> None:
    rows = [rollout("1+1?", answer, reward, expected_answer="2") for answer, reward in (("2", 1.0), ("3", 0.0))]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    for prompt_format in ("text", "messages"):
        gym_to_grpo(source, out, prompt_format=prompt_format)
        row = load_response_dataset({"data_path": str(out)}).dataset[1]
        assert row["ground_truth"] == "2"
        assert row["messages"] == [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "3"}]
        gym_to_dpo(source, out, prompt_format=prompt_format)
        row = load_preference_dataset({"data_path": str(out), "dataset_name": "BinaryPreferenceDataset"}).dataset[0]
        assert row["chosen"] == [{"role": "assistant", "content": "2"}] and row["messages"][0]["content"] == "1+1?"
    gym_to_sft(source, out, format="simple")
    assert load_response_dataset({"data_path": str(out)}, "sft_processor").dataset[0]["messages"][1]["content"] == "2"
