"""A conversation has one form, whichever door it comes in by, and so one prompt."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mcore.data import load_preference_dataset, load_response_dataset
from grpo_mcore.data.gym import gym_to_grpo, gym_to_sft
from grpo_mcore.generation.chat.dialects import of_messages, of_responses
from grpo_mcore.generation.chat.prompt import ChatPrompts
from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout import messages as entrance
from grpo_mcore.rollout.messages import MessageError, read_messages, read_tools
from grpo_mcore.rollout.trajectory import Sampling
from tests.unit.rollout import published_templates as published

PARTS = "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}" + (
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls|tojson }}{% endif %}<end_of_turn>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that joins the parts of a message by nothing."""
TEMPLATES = {
    name: getattr(published, name) for name in ("GEMMA", "GLM", "GPT_OSS", "GPT_OSS_TOOLS", "GEMMA4_TOOLS")
} | {"PARTS": PARTS}
ARGUMENTS, ANSWER = {"x": 2, "y": ["a", None]}, "It is 4."
CHAT = [
    {"role": "developer", "content": "Be brief.", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "Solve it."}, {"type": "text", "text": "x = 2"}]},
    {
        "role": "assistant",
        "content": [{"type": "reasoning", "text": "I call it."}],
        "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "ok"}]},
    {"role": "user", "content": "So?"},
]
ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Solve it."}, {"type": "input_text", "text": "x = 2"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I call it."}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": json.dumps(ARGUMENTS)},
    {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "output_text", "text": "4"}, {"type": "output_text", "text": "ok"}],
    },
    {"role": "user", "content": "So?"},
]
BLOCKS = [
    *CHAT[1:2],
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I call it.", "signature": ""},
            {"type": "tool_use", "id": "c1", "name": "add", "input": ARGUMENTS},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": CHAT[3]["content"]},
            {"type": "text", "text": "So?"},
        ],
    },
]
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return published.tokenizer_of(TEMPLATES[request.param], "<end_of_turn>")


@pytest.fixture
def prompt_of_row(tmp_path: Path, tokenizer: Any) -> Callable[..., list[int]]:
    """Return a function that returns the tokens of a row's prompt."""

    def read(row: dict[str, Any], processor: str, **entry: Any) -> list[int]:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        load = load_preference_dataset if processor == "preference_processor" else load_response_dataset
        data = load({"data_path": str(path), "train_on": "last", **entry}, processor)
        datum = data.processor(data.dataset[0], data.task_spec, tokenizer, None, 0)
        return datum["message_log"][0]["token_ids"].tolist()

    return read


def transformed(transform: Callable[..., Any], tmp_path: Path, **options: Any) -> dict[str, Any]:
    rollout = {
        "responses_create_params": {"input": ITEMS, "tools": [{"type": "function", **FUNCTION}]},
        "response": {"output": [{"type": "message", "role": "assistant", "content": ANSWER}]},
        "reward": 1.0,
    }
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
    transform(tmp_path / "rollouts.jsonl", tmp_path / "out.jsonl", **options)
    return json.loads((tmp_path / "out.jsonl").read_text())


def test_one_conversation_has_one_prompt_through_all_doors(
    tmp_path: Path, tokenizer: Any, prompt_of_row: Callable[..., list[int]]
) -> None:
    answer = {"role": "assistant", "content": ANSWER}
    openai = {"dataset_name": "openai_format"}
    from_gym = transformed(gym_to_grpo, tmp_path, prompt_format="messages")
    task = {"responses_create_params": {"input": ITEMS, "tools": [FUNCTION]}}
    chats = {"GRPO": prompt_of_row({"input": CHAT, "output": ANSWER, "tools": [TOOL]}, "math_hf_data_processor")}
    chats |= {
        "SFT": prompt_of_row({"messages": [*CHAT, answer], "tools": [FUNCTION]}, "sft_processor", **openai),
        "DPO": prompt_of_row(
            {"prompt": CHAT, "chosen": ANSWER, "rejected": [{"role": "assistant", "content": "5"}], "tools": [TOOL]},
            "preference_processor",
        ),
        "Gym prompts": prompt_of_row(from_gym, "math_hf_data_processor"),
        "Gym demonstrations": prompt_of_row(transformed(gym_to_sft, tmp_path), "sft_processor", **openai),
        "Gym tasks": prompt_of_row(task, "nemo_gym_data_processor", dataset_name="NemoGymDataset"),
    }
    prompts = ChatPrompts(tokenizer, ChatConfig("policy", (Sampling(8),)), len(tokenizer))
    bodies = {
        "chat completions": {"messages": CHAT, "tools": [TOOL]},
        "responses": of_responses({"input": ITEMS, "tools": [{"type": "function", **FUNCTION}]}),
        "messages": of_messages(
            {"system": "Be brief.", "messages": BLOCKS, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
        ),
    }
    chats |= {
        door: prompts.turn(ChatRequest.read(body, ChatConfig("policy", (Sampling(8),))))[0].token_ids.tolist()
        for door, body in bodies.items()
    }
    # Where the answer follows, gpt-oss leaves out the reasoning before a call.
    leaves_out = tokenizer.chat_template == published.GPT_OSS_TOOLS
    for door, tokens in chats.items():
        same = chats["SFT" if leaves_out and door in ("SFT", "DPO", "Gym demonstrations") else "GRPO"]
        assert tokenizer.decode(tokens) == tokenizer.decode(same), door
        assert tokens == same, door


TEXT = st.text("abc", min_size=1, max_size=3)
PART = st.one_of(
    TEXT,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "input_text", "reasoning", "image", "audio"]), "text": TEXT}
    ),
    st.fixed_dictionaries({"text": TEXT | st.none() | st.integers()}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "content": TEXT}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "name": TEXT, "input": st.dictionaries(TEXT, TEXT)}),
    st.none() | st.integers(),
)
CONTENT = st.one_of(TEXT, st.lists(PART, max_size=3), st.none(), st.integers(), st.dictionaries(TEXT, TEXT))
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "human", "function"])


def texts_in(value: Any) -> list[str]:
    """Return the values of a message that a model should see."""
    if isinstance(value, dict):
        return [text for key, inner in value.items() if key not in ("type", "role") for text in texts_in(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in texts_in(inner)]
    return [] if value is None else [str(value)]


@given(st.lists(st.fixed_dictionaries({"role": ROLE, "content": CONTENT}, optional={"reasoning": TEXT}), max_size=3))
def test_nothing_vanishes(messages: list[dict[str, Any]]) -> None:
    """Every text of a conversation is in its normal form, or it is refused."""
    try:
        read = read_messages(messages, "messages")
    except MessageError as error:
        assert "'messages'" in str(error)
        return
    shown = json.dumps(read)
    assert all(text in shown for text in texts_in(messages))
    assert read_messages(read, "messages") == read


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("message", "normal"),
    [
        ({"from": "human", "value": "a"}, [{"role": "user", "content": "a"}]),
        ({"role": "user", "content": ["a", {"text": "b"}]}, [{"role": "user", "content": ["a", "b"]}]),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
         [{"role": "assistant", "content": "no"}]),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, "a"], "reasoning": "r", "weight": 0},
         [{"role": "assistant", "content": "a", "reasoning_content": "r\nt", "weight": 0}]),
        ({"role": "assistant", "content": None, "tool_calls": [{"name": "f", "id": None, "arguments": None}]},
         [{"role": "assistant", "content": "", "tool_calls": [CALL]}]),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": " "}},
         [{"role": "assistant", "content": "", "tool_calls": [CALL]}]),
        ({"role": "assistant", "content": None, "reasoning_content": "t"},
         [{"role": "assistant", "content": "", "reasoning_content": "t"}]),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{x"}}],
            },
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{x"}}],
                }
            ],
        ),
        ({"role": "assistant", "content": "a", "tool_calls": json.dumps([json.dumps({"name": "f"})])},
         [{"role": "assistant", "content": "a", "tool_calls": [CALL]}]),
        ({"role": "assistant", "content": "a", "tool_calls": "[]"}, [{"role": "assistant", "content": "a"}]),
        ({"role": "assistant", "content": "a", "reasoning": None, "reasoning_details": [
            {"type": "reasoning.summary", "summary": "s"}, {"type": "reasoning.encrypted", "data": "x"}]},
         [{"role": "assistant", "content": "a", "reasoning_content": "s", "reasoning_details": [
            {"type": "reasoning.summary", "summary": "s"}, {"type": "reasoning.encrypted", "data": "x"}]}]),
        ({"role": "assistant", "content": "a", "thinking_blocks": [{"type": "thinking", "thinking": "t"}]},
         [{"role": "assistant", "content": "a", "reasoning_content": "t",
           "thinking_blocks": [{"type": "thinking", "thinking": "t"}]}]),
        ({"role": "tool", "content": {"a": 1}}, [{"role": "tool", "content": '{"a": 1}'}]),
        ({"role": "tool", "content": [1, "é"]}, [{"role": "tool", "content": '[1, "é"]'}]),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": None}]},
         [{"role": "tool", "tool_call_id": "c", "content": ""}]),
    ],
)  # fmt: skip
def test_forms_of_a_message(message: dict[str, Any], normal: list[dict[str, Any]]) -> None:
    read = read_messages([message], "messages")
    parts = [
        {**one, "content": [{"type": "text", "text": text} for text in one["content"]]}
        if isinstance(one["content"], list)
        else one
        for one in normal
    ]
    assert read == parts and read_messages(read, "messages") == read


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("hi", "'messages' must be a list of messages, got text"),
        ([], "'messages' has no message in it"),
        ([{"role": "user", "content": "a"}, None], "message 1 of 'messages' must have a role and a content"),
        ([{"role": 5, "content": "a"}], "message 0 of 'messages' must have a role"),
        ([{"role": "user", "content": None}], "message 0 of 'messages' has no content"),
        ([{"role": "user", "content": 5}], "the content must be text or a list of parts, got a number"),
        ([{"role": "user", "content": [5]}], "a part of the content must be text or an object, got a number"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "the text of a part must be text, got null"),
        ([{"role": "user", "content": [{"type": "video", "text": ""}]}],
         "has a part of type 'video', which is not text"),
        ([{"role": "user", "content": [{"video": "u"}]}], "has a part of type None, which is not text"),
        ([{"role": "assistant", "content": "a", "reasoning_content": ["t"]}],
         "'reasoning_content' must be text, got a list"),
        ([{"role": "assistant", "content": "a", "tool_calls": {"name": "f"}}],
         "tool_calls\" must be a list of calls, got an object"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{"id": "c"}]}], "must have the name of its function"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": [1]}]}],
         "the arguments of a call must be an object or text, got a list"),
    ],
)  # fmt: skip
def test_messages_that_are_refused_by_every_door(messages: Any, why: str) -> None:
    with pytest.raises(MessageError, match=why):
        read_messages(messages, "messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages) and messages:
        with pytest.raises(RequestError, match=why) as refused:
            ChatRequest.read({"messages": messages}, ChatConfig("policy", (Sampling(8),)))
        assert refused.value.status == 400


def test_tools() -> None:
    web = {"type": "web_search"}
    tools = [TOOL, FUNCTION, {"type": "function", "strict": None, **FUNCTION}, json.dumps(TOOL)]
    assert read_tools([*tools, web], "tools") == [TOOL] * 4 + [web]
    exported = {**TOOL["function"], "description": None, "parameters": json.dumps(TOOL["function"]["parameters"])}
    assert read_tools([{**TOOL, "function": exported}], "tools") == [TOOL]
    of_all_tools = {"type": "object", "properties": {"a": {"type": "string", "default": None, "enum": None}, "b": None}}
    of_one = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
    (read,) = read_tools([{"name": "f", "parameters": of_all_tools}], "tools")
    assert read["function"]["parameters"] == of_one
    for wrong in ([5], [{"description": "d"}], [{"type": "function", "function": {"name": 1}}], {"a": 1}, 0):
        with pytest.raises(MessageError, match="'tools' "):
            read_tools(wrong, "tools")


def test_a_role_that_the_template_does_not_name_is_refused(tokenizer: Any) -> None:
    prompts = ChatPrompts(tokenizer, ChatConfig("policy", (Sampling(8),)), len(tokenizer))
    request = ChatRequest.read({"messages": [{"role": "critic", "content": "a"}]}, ChatConfig("policy", (Sampling(8),)))
    with pytest.raises(RequestError, match="the role 'critic' is neither one of .* nor named in the chat template"):
        prompts.turn(request)[0].token_ids.tolist()
    entrance.refuse_unknown_roles([{"role": "critic"}], "{% if m.role == 'critic' %}")
    calling = {"role": "assistant", "content": "I look.", "function_calls": "f(x=1)"}
    with pytest.raises(MessageError, match="has 'function_calls', which the chat template does not read"):
        entrance.refuse_unknown_roles([calling], "{{ 'function_calls' }}")
    entrance.refuse_unknown_roles([calling], "{{ m['content'] + m['function_calls'] }}")
