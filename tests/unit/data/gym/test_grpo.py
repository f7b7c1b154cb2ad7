from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_mcore.data.gym.grpo import CONTEXT_LEFT_OUT, NO_ANSWER, NO_QUESTION, NO_TRUTH_AT_ALL
from grpo_mcore.data.interfaces import DataError
from tests.unit.data.gym.conftest import call, message, rollout, spec_rollout


def test_the_documented_rows(run: Any) -> None:
    """The output has exactly the fields that the specification shows."""
    _, rows = run("grpo", [spec_rollout("What is 2+2?", "4", ground_truth="4"), spec_rollout("Say hi", "hi")])
    assert rows == [{"input": "What is 2+2?", "output": "4", "ground_truth": "4"}, {"input": "Say hi", "output": "hi"}]


def test_the_same_rows_as_the_documented_script(run: Any) -> None:
    """The rows are those of the documented script, for rollouts that it handles correctly."""
    rollouts = [
        {
            "responses_create_params": {
                "input": [{"role": "system", "content": "s"}, *({"role": "user", "content": q} for q in questions)],
                "metadata": {"answer": str(number)},
            },
            "output": [{"type": "function_call", "name": "f"}, {"type": "message", "content": said}],
            "reward": number / 4,
        }
        for number, (questions, said) in enumerate(
            [(("a", "b"), "x"), (("c",), [{"text": "y"}]), (("d",), [{"text": "z"}]), (("é\n\u2028",), "ü")]
        )
    ]

    def documented(row: dict[str, Any]) -> dict[str, Any]:
        params, content = row["responses_create_params"], row["output"][-1]["content"]
        return {
            "input": params["input"][-1]["content"],
            "output": content if isinstance(content, str) else content[0]["text"],
            "ground_truth": params["metadata"]["answer"],
        }

    assert run("grpo", rollouts)[1] == [documented(row) for row in rollouts]
    kept = run("grpo", rollouts, reward_threshold=0.5)[1]
    assert kept == [documented(row) for row in rollouts if row["reward"] >= 0.5]


@pytest.mark.parametrize(
    ("params", "more", "found", "place"),
    [
        ({"ground_truth": "a", "metadata": {"ground_truth": "b"}}, {}, "a", "responses_create_params.ground_truth"),
        ({"metadata": {"ground_truth": "b", "answer": "c"}}, {}, "b", "responses_create_params.metadata.ground_truth"),
        ({"metadata": {"answer": "c"}}, {"expected_answer": "d"}, "c", "responses_create_params.metadata.answer"),
        ({"metadata": None}, {"expected_answer": "d"}, "d", "expected_answer"),
        ({"metadata": {"answer": None}}, {"ground_truth": "d"}, "d", "ground_truth"),
        ({"metadata": {"answer": "  "}}, {"expected_answer": "d"}, "d", "expected_answer"),
        ({}, {"verifier_metadata": {"expected_answer": "d"}}, "d", "verifier_metadata.expected_answer"),
        ({}, {"reference_answer": "d"}, "d", "reference_answer"),
        ({"ground_truth": 0}, {}, 0, "responses_create_params.ground_truth"),
        ({}, {"expected_answer": False}, False, "expected_answer"),
        ({}, {"ground_truth": [{"call": "f"}]}, [{"call": "f"}], "ground_truth"),
        ({}, {"expected_answer": []}, [], "expected_answer"),
    ],
)
def test_the_places_of_the_ground_truth(run: Any, params: Any, more: Any, found: Any, place: str) -> None:
    summary, rows = run("grpo", [rollout(params=params, **more)])
    assert rows[0]["ground_truth"] == found and type(rows[0]["ground_truth"]) is type(found)
    assert summary.ground_truth_from == {place: 1} and summary.without_ground_truth == 0


def test_the_policys_answer_is_not_a_ground_truth(run: Any) -> None:
    summary, rows = run("grpo", [rollout(answer="x", extracted_answer="x", predicted="x")])
    assert "ground_truth" not in rows[0] and summary.without_ground_truth == 1
    assert summary.notes[NO_TRUTH_AT_ALL] == 1


def test_a_place_given_by_the_user(run: Any) -> None:
    rows = [
        rollout(**{"expected_answer": "usual", "reward_model": {"ground-truth": "own"}}),
        rollout(**{"expected_answer": "usual"}),
        rollout(params={"input": "q", "sol": {"text": "params"}}, expected_answer="usual"),
    ]
    keys = ["reward_model.ground-truth", "responses_create_params.sol.text"]
    summary, found = run("grpo", rows, ground_truth_keys=keys)
    assert [row["ground_truth"] for row in found] == ["own", "usual", "params"]
    assert summary.ground_truth_from == {keys[0]: 1, "expected_answer": 1, keys[1]: 1}


@pytest.mark.parametrize("key", ["", "a..b", "responses_create_params", "response.output", "reward", "output"])
def test_invalid_places(run: Any, key: str) -> None:
    with pytest.raises(DataError, match="ground truth's key"):
        run("grpo", [rollout()], ground_truth_keys=[key])


@pytest.mark.parametrize("field", ["class", "a b", "é", "_ng_task_index", "__init__", "0", "instructions", "tools"])
def test_a_field_of_any_name(run: Any, field: str) -> None:
    for row, key in (
        (rollout(**{field: "7"}), field),
        (rollout(params={field: "7"}), f"responses_create_params.{field}"),
    ):
        assert run("grpo", [row], ground_truth_keys=[key])[1][0]["ground_truth"] == "7"


def test_no_ground_truth(run: Any) -> None:
    summary, rows = run("grpo", [rollout(expected_answer="2")], ground_truth=False)
    assert rows == [{"input": "1+1?", "output": "2"}]
    assert summary.without_ground_truth is None and "ground truth" not in str(summary)


def test_a_threshold_of_0_keeps_all_rollouts(run: Any) -> None:
    rows = [rollout(str(reward), reward=reward) for reward in (-2.0, 0.0, 19.4)] + [rollout("none")]
    del rows[-1]["reward"]
    assert [row["input"] for row in run("grpo", rows)[1]] == ["-2.0", "0.0", "19.4", "none"]
    assert [row["input"] for row in run("grpo", rows, reward_threshold=0.0)[1]] == ["-2.0", "0.0", "19.4", "none"]


def test_the_threshold_tolerates_rounding(run: Any) -> None:
    rewards = [1.0, 0.9999999999999998, 0.999999, 0.5]
    summary, rows = run("grpo", [rollout(str(reward), reward=reward) for reward in rewards], reward_threshold=1.0)
    assert [row["input"] for row in rows] == ["1.0", "0.9999999999999998"]
    assert summary.filtered == {"reward below 1": 2} and summary.kept == 2


def test_all_parts_of_a_text(run: Any) -> None:
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "1+"}, {"type": "input_text", "text": "1?"}]}]
    done = [
        {
            "type": "message",
            "role": "assistant",
            "content": [{"text": "it is"}, {"type": "reasoning", "text": "1 more"}, {"refusal": "2"}],
        }
    ]
    assert run("grpo", [rollout(asked, done)])[1] == [{"input": "1+\n1?", "output": "it is\n2"}]


def test_the_agents_last_message_is_the_output(run: Any) -> None:
    done = [message("first"), message("mine"), message("well done", "user"), call("f", "{}")]
    assert run("grpo", [rollout(output=done)])[1][0]["output"] == "mine"


def test_unusable_rollouts_are_counted(run: Any) -> None:
    no_question = rollout([message("be brief", "system")])
    no_answer = rollout(output=[call("f", "{}")])
    summary, rows = run("grpo", [no_question, no_answer, rollout("1?", output=[], expected_answer="2")])
    assert summary.filtered == {NO_QUESTION: 1, f"{NO_ANSWER}, and no ground truth": 1}
    assert rows == [{"input": "1?", "output": "", "ground_truth": "2"}]


def test_context_is_dropped_with_a_note_or_kept_as_messages(run: Any) -> None:
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    whole = rollout(
        [message("be brief", "developer"), message("1+1?", "user"), message("2"), message("and 1+2?", "user")],
        params={"tools": tools, "instructions": "be kind"},
    )
    summary, rows = run("grpo", [whole, rollout()])
    assert [row["input"] for row in rows] == ["and 1+2?", "1+1?"] and summary.notes[CONTEXT_LEFT_OUT] == 1
    summary, rows = run("grpo", [whole, rollout()], prompt_format="messages")
    assert rows[0]["input"] == [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 1+2?"},
    ]
    assert rows[0]["tools"] == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert rows[1]["input"] == [{"role": "user", "content": "1+1?"}] and "tools" not in rows[1]
    assert CONTEXT_LEFT_OUT not in summary.notes


def test_text_is_written_unchanged(run: Any, tmp_path: Any) -> None:
    run("grpo", [rollout("é 漢 \U0001f600", 'say "x"\n')])
    raw = (tmp_path / "out" / "train.jsonl").read_bytes()
    assert "é 漢 \U0001f600".encode() in raw and raw.count(b"\n") == 1
    assert json.loads(raw)["output"] == 'say "x"\n'
