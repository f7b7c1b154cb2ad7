from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_mcore.data.gym.sft import LEFT_OUT, NO_TURN
from tests.unit.data.gym.conftest import call, call_output, message, rollout, spec_rollout, thought

TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}


def messages_of(run: Any, output: Any, asked: Any = "1+1?", **options: Any) -> list[dict[str, Any]]:
    """Return the messages after the question."""
    _, rows = run("sft", [rollout(asked, output)], **options)
    return rows[0]["messages"][1:] if rows else []


def openai_call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_question_and_an_answer(run: Any) -> None:
    expected = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    assert run("sft", [spec_rollout(), rollout()])[1] == [{"messages": expected}] * 2


def test_calls_results_and_thoughts(run: Any) -> None:
    output = [
        thought("use the tool"),
        call("add", '{"a": 1}', "c1"),
        call("add", "{bad json", "c2"),
        call_output("2", "c1"),
        call_output([{"type": "output_text", "text": "err"}, {"text": "or"}], "c2"),
        thought("done"),
        message("it is 2"),
    ]
    assert messages_of(run, output) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "use the tool",
            "tool_calls": [openai_call("add", '{"a": 1}', "c1"), openai_call("add", "{bad json", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": [{"type": "text", "text": "err"}, {"type": "text", "text": "or"}],
        },
        {"role": "assistant", "content": "it is 2", "reasoning_content": "done"},
    ]
    assert "reasoning_content" not in json.dumps(messages_of(run, output, reasoning=False))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([message("let me see"), call("f", "{}")], [("assistant", "let me see", 1)]),
        ([message("a"), message("b")], [("assistant", "a", 0), ("assistant", "b", 0)]),
        ([call("f", "{}"), message("b")], [("assistant", "", 1), ("assistant", "b", 0)]),
        ([message("a"), thought("t"), call("f", "{}")], [("assistant", "a", 0), ("assistant", "", 1)]),
        ([message("a"), message("go on", "user")], [("assistant", "a", 0), ("user", "go on", 0)]),
        ([message("rule", "developer"), call("f", "{}")], [("system", "rule", 0), ("assistant", "", 1)]),
        ([call("f", "{}"), call_output("x"), thought("cut off")], [("assistant", "", 1), ("tool", "x", 0)]),
        ([call("f", None), call_output({"ok": 1})], [("assistant", "", 1), ("tool", '{"ok": 1}', 0)]),
        ([message("a"), message("")], [("assistant", "a", 0)]),
    ],
)  # fmt: skip
def test_turns(run: Any, output: Any, expected: Any) -> None:
    got = [(one["role"], one["content"], len(one.get("tool_calls", []))) for one in messages_of(run, output)]
    assert got == expected


def test_results_keep_parts_that_are_not_text(run: Any) -> None:
    image = {"type": "input_image", "image_url": "u"}
    _, result = messages_of(run, [call("f", "{}"), call_output([{"type": "input_text", "text": "see"}, image])])
    assert result["content"] == [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}]


def test_calls_at_the_end_are_kept(run: Any) -> None:
    (turn,) = messages_of(run, [call("f", "{}", "c9")])
    assert turn["tool_calls"] == [openai_call("f", "{}", "c9")]


def test_calls_without_an_id_are_numbered(run: Any) -> None:
    output = [call("f", "{}", None), call("g", "{}", None), call_output("1", None), call_output("2", None)]
    turn, first, second = messages_of(run, output)
    assert [one["id"] for one in turn["tool_calls"]] == ["call_1", "call_2"]
    assert [first["tool_call_id"], second["tool_call_id"]] == ["call_1", "call_2"]


def test_arguments_that_are_an_object_become_text(run: Any) -> None:
    (turn,) = messages_of(run, [{**call("f", ""), "arguments": {"a": 1}}])
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


def test_an_input_of_many_turns(run: Any) -> None:
    asked = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        thought("t"),
        call("f", "{}"),
        call_output("x"),
        {"role": "assistant", "content": "ab", "reasoning": "r"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "k", "function": {"name": "g", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "k", "content": "y"},
        {"role": "user", "content": "c"},
    ]
    _, rows = run("sft", [rollout(asked, "done", params={"instructions": "be kind"})])
    assert rows[0]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [openai_call("f", "{}", "c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "assistant", "content": "ab", "reasoning_content": "r"},
        {"role": "assistant", "content": "", "tool_calls": [openai_call("g", "{}", "k")]},
        {"role": "tool", "content": "y", "tool_call_id": "k"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "done"},
    ]


def test_an_answer_is_separate_from_the_inputs_last_message(run: Any) -> None:
    asked = [message("q", "user"), message("prefill")]
    assert messages_of(run, [call("f", "{}")], asked) == [
        {"role": "assistant", "content": "prefill"},
        {"role": "assistant", "content": "", "tool_calls": [openai_call("f", "{}", "c1")]},
    ]


def test_parts_that_are_not_text_are_kept(run: Any) -> None:
    asked = [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "u"}]}
    ]
    _, rows = run("sft", [rollout(asked)])
    assert rows[0]["messages"][0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "u"}},
    ]


@pytest.mark.parametrize("tool", [{"type": "function", **TOOL}, {"type": "function", "function": TOOL}, TOOL])
def test_both_forms_of_tools(run: Any, tool: Any) -> None:
    _, rows = run("sft", [rollout(params={"tools": [tool]})])
    assert rows[0]["tools"] == [{"type": "function", "function": TOOL}]


def test_tools_that_are_not_functions_and_no_tools(run: Any) -> None:
    web = {"type": "web_search_preview"}
    _, rows = run("sft", [rollout(params={"tools": [web]}), rollout(params={"tools": []})])
    assert rows[0]["tools"] == [web] and "tools" not in rows[1]


@pytest.mark.parametrize("output", [[], None, [thought("cut off")], [message("")], [message("hi", "user")]])
def test_rollouts_without_a_turn_of_the_agent(run: Any, output: Any) -> None:
    summary, rows = run("sft", [rollout(output=output)])
    assert rows == [] and summary.filtered == {NO_TURN: 1}


def test_an_item_that_chat_cannot_hold_is_named(run: Any) -> None:
    summary, _ = run("sft", [rollout(output=[{"type": "web_search_call"}, message("x")])])
    assert summary.filtered == {"an item of type 'web_search_call', which chat messages cannot hold": 1}


def test_the_threshold(run: Any) -> None:
    rows = [rollout(str(reward), reward=reward) for reward in (0.94, 0.95, 1.0, 2.0, -1.0, None)]
    summary, kept = run("sft", rows, reward_threshold=0.95)
    assert [row["messages"][0]["content"] for row in kept] == ["0.95", "1.0", "2.0"]
    assert summary.filtered == {"reward below 0.95": 3}
    assert any("fewer than 100 demonstrations" in note for note in summary.notes)


def test_simple(run: Any) -> None:
    rows = [
        rollout("a", "b"),
        rollout("a", [thought("t"), message("b")]),
        rollout([message("s", "system"), message("a", "user")], "b"),
        rollout("a", []),
        rollout([], "b"),
    ]
    summary, kept = run("sft simple", rows)
    assert kept == [{"input": "a", "output": "b"}] * 3
    assert summary.filtered.total() == 2 and summary.notes[LEFT_OUT] == 2


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"_ng_failure_class": "timeout"}, "the rollout failed"),
        ({"_ng_no_persist": True}, "the rollout failed"),
        ({"failure_reason": "no browser"}, "the rollout failed"),
        ({"response": {"status": "incomplete"}}, "cut off at a length limit"),
        ({"response": {"incomplete_details": {"reason": "max_output_tokens"}}}, "cut off at a length limit"),
        ({"mask_sample": True}, "the environment itself says"),
    ],
)
def test_what_failed_or_was_cut_off_is_no_example(run: Any, kind: str, fields: dict[str, Any], reason: str) -> None:
    """Neither a demonstration, nor the chosen or the rejected answer of a pair."""
    rows = [rollout("1+1?", "2"), rollout("1+1?", "3", reward=0.0), rollout("1+1?", "2, but")]
    response = {"output": rows[2].pop("output")} if "output" in rows[2] else rows[2]["response"]
    rows[2] |= {name: value for name, value in fields.items() if name != "response"}
    rows[2]["response"] = response | fields.get("response", {})
    summary, made = run(kind, rows)
    assert len(made) == {"sft": 2, "dpo": 1}[kind] and "but" not in json.dumps(made)
    assert [count for text, count in summary.filtered.items() if reason in text] == [1]
