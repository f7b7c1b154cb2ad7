"""Responses and Messages at the endpoint: OpenAI's and Anthropic's own clients, against a completion with a thought, a
text and a call, or cut off."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.generation.chat.dialects import DialectError, of_messages, of_responses
from grpo_mcore.generation.chat.engine_chat import Reply
from grpo_mcore.generation.chat.request import ChatRequest, RequestError
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.generation.endpoint import Endpoint, recorded_tokens
from grpo_mcore.rollout.trajectory import Sampling
from tests.unit.generation.chat.endpoints import Engines

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WHOLE = {"role": "assistant", "reasoning_content": "so", "content": "I add.", "tool_calls": [CALL]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {
        **WHOLE,
        "reasoning_content": "hm\nso",
        "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]
"""The chat completion that all dialects below ask for."""


class ChatEngines(Engines):
    """Engines that record what they are asked, and answer with `message`; of a message None they refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.message: dict[str, Any] | None = WHOLE
        self.stop: str | None = None
        self.reason, self.bodies = "tool_calls", list[dict[str, Any]]()
        for worker in self.workers:
            worker.stream = self.stream  # type: ignore[method-assign]

    def stream(self, method: str, kind: str, body: Any, seed: int, **_: Any) -> Iterator[Reply]:
        self.bodies.append(body)
        if self.message is None:
            yield Reply(400, {"error": {"message": "min_p: not served", "type": "BadRequestError", "code": 400}})
            return
        if kind == "tokenize":
            yield Reply(200, {"count": 7, "max_model_len": 9, "tokens": [1] * 7})
            return
        choice = {"index": 0, "message": self.message, "finish_reason": self.reason, "stop_reason": self.stop}
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        choice |= {"token_ids": [1, 2]}
        common = {
            "prompt_token_ids": [3],
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
        }
        yield Reply(200, {**common, "choices": [choice], "usage": usage}, "f", ((3, 0, 12),))


@pytest.fixture
def engines() -> ChatEngines:
    return ChatEngines()


@pytest.fixture
def endpoint(engines: ChatEngines) -> Iterator[Endpoint]:
    endpoint = Endpoint(engines, model="policy", token="secret", host="127.0.0.1", timeout_s=30, seed=5)
    yield endpoint
    endpoint.close()


@pytest.fixture
def gpt(endpoint: Endpoint) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=endpoint.address.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(endpoint: Endpoint) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=endpoint.address.url, api_key="secret", max_retries=0) as client:
        yield client


RESPONSES: dict[str, Any] = {
    "model": "policy",
    "instructions": "Be brief.",
    "max_output_tokens": 50,
    "tools": [{"type": "function", "strict": False, **FUNCTION}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {"type": "reasoning", "id": "rs_0", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
    ],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "policy",
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "max_tokens": 50,
    "stop_sequences": ["END"],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}],
    "messages": [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "thinking", "thinking": "so", "signature": ""},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "2"}]},
    ],
}


def test_responses(gpt: Any, engines: ChatEngines) -> None:
    found = gpt.responses.create(**RESPONSES)
    (asked,) = engines.bodies
    assert asked["messages"] == CONVERSATION and asked["max_tokens"] == 50
    assert asked["tools"] == [{**TOOL, "function": {**FUNCTION, "strict": False}}]
    assert found.status == "completed" and found.output_text == "I add."
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    assert (found.output[2].call_id, found.output[2].arguments) == ("call_1", '{"a": 1}')  # type: ignore[union-attr]
    assert found.usage is not None and (found.usage.input_tokens, found.usage.output_tokens) == (7, 5)
    engines.message, engines.reason = {"role": "assistant", "content": "I"}, "length"
    cut = gpt.responses.create(model="policy", input="1 + 1?")
    assert engines.bodies[-1]["messages"] == [{"role": "user", "content": "1 + 1?"}]
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens" and cut.output_text == "I"


def test_tools_as_codex_sends_them(gpt: Any, engines: ChatEngines) -> None:
    """Those of an MCP server are a namespace, and come back as such; the search on OpenAI's servers is left out."""
    functions = [{"type": "function", **FUNCTION}]
    engines.message = {**WHOLE, "tool_calls": [{**CALL, "function": {"name": "mcp__sums__add", "arguments": "{}"}}]}
    asked = {"model": "policy", "tools": [{"type": "web_search"}, *functions]}
    asked["tools"].append({"type": "namespace", "name": "mcp__sums", "description": "", "tools": functions})
    call = gpt.responses.create(**asked, input="?").output[-1].to_dict()
    assert (call["namespace"], call["name"]) == ("mcp__sums", "add")
    gpt.responses.create(**asked, input=[{"role": "user", "content": "?"}, call])
    assert [tool["function"]["name"] for tool in engines.bodies[1]["tools"]] == ["add", "mcp__sums__add"]
    assert engines.bodies[1]["messages"][1]["tool_calls"][0]["function"]["name"] == "mcp__sums__add"


def test_responses_as_events(gpt: Any) -> None:
    """The client builds the answer again from its events."""
    with gpt.responses.stream(**RESPONSES) as stream:
        events = list(stream)
        found = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert found.output_text == "I add." and [item.type for item in found.output][-1] == "function_call"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I add."
    (arguments,) = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == '{"a": 1}'


def test_messages(claude: Any, engines: ChatEngines) -> None:
    import anthropic

    found = claude.messages.create(**MESSAGES)
    (asked,) = engines.bodies
    assert asked["messages"] == CONVERSATION and (asked["max_tokens"], asked["stop"]) == (50, ["END"])
    assert asked["tools"] == [TOOL]
    thought, text, use = found.content
    assert (thought.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert use.input == {"a": 1} and found.stop_reason == "tool_use"
    assert (found.usage.input_tokens, found.usage.output_tokens) == (7, 5)
    given = {key: value for key, value in MESSAGES.items() if key not in ("max_tokens", "stop_sequences")}
    assert claude.messages.count_tokens(**given).input_tokens == 7
    begun = [*MESSAGES["messages"], {"role": "assistant", "content": "The answer is"}]
    assert claude.messages.count_tokens(**{**given, "messages": begun}).input_tokens == 7
    with pytest.raises(anthropic.BadRequestError, match="an answer that is begun by the last one is not served"):
        claude.messages.create(**{**MESSAGES, "messages": begun})
    for reason, wanted in (("length", "max_tokens"), ("stop", "end_turn")):
        engines.message, engines.reason = {"role": "assistant", "content": "I"}, reason
        cut = claude.messages.create(**MESSAGES)
        assert cut.stop_reason == wanted and cut.content[0].type == "text"
    engines.stop = "END"
    with claude.messages.stream(**MESSAGES) as stream:
        ended = stream.get_final_message()
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "END")
    engines.message, engines.stop = (
        {**WHOLE, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{"}}]},
        None,
    )
    assert claude.messages.create(**MESSAGES).content[-1].input == {"_raw": "{"}  # type: ignore[union-attr]


def test_messages_as_events(claude: Any) -> None:
    with claude.messages.stream(**MESSAGES) as stream:
        text = "".join(stream.text_stream)
        found = stream.get_final_message()
    assert text == "I add." and found.stop_reason == "tool_use" and found.usage.output_tokens == 5
    thought, said, use = found.content
    assert thought.thinking == "so" and said.text == "I add." and use.input == {"a": 1}  # type: ignore[union-attr]


def test_chat_completions_as_chunks(gpt: Any, engines: ChatEngines) -> None:
    stream = gpt.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "1 + 1?"}], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    first, last, usage = list(stream)
    assert "stream" not in engines.bodies[0] and "stream_options" not in engines.bodies[0]
    delta = first.choices[0].delta
    assert delta.content == "I add." and delta.tool_calls is not None
    of_tokens = first.model_dump()
    assert (of_tokens["prompt_token_ids"], of_tokens["choices"][0]["token_ids"]) == ([3], [1, 2])
    assert delta.tool_calls[0].function is not None and delta.tool_calls[0].function.arguments == '{"a": 1}'
    assert last.choices[0].finish_reason == "tool_calls" and usage.usage is not None and usage.usage.total_tokens == 12


def test_what_no_completion_has_is_refused(gpt: Any, claude: Any, engines: ChatEngines, endpoint: Endpoint) -> None:
    import anthropic
    import openai

    with pytest.raises(openai.BadRequestError, match="previous_response_id: nothing is kept"):
        gpt.responses.create(model="policy", input="?", previous_response_id="resp_1")
    engines.message = None
    with pytest.raises(openai.BadRequestError, match="min_p: not served"):
        gpt.responses.create(model="policy", input="?")
    with pytest.raises(anthropic.BadRequestError, match="min_p: not served"):
        claude.messages.create(**MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="min_p: not served"):
        claude.messages.count_tokens(model="policy", messages=MESSAGES["messages"])
    for path in ("/v1/responses", "/v1/messages", "/v1/chat/completions"):
        body = httpx.post(endpoint.address.url + path, json=[], headers={"x-api-key": "secret"})
        assert body.status_code == 400 and "must be an object" in body.text
        assert httpx.post(endpoint.address.url + path, json={}, headers={"x-api-key": "other"}).status_code == 401


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"input": []}, "input: a text or a list"),
        ({"input": [{"role": "user"}]}, "input: message 0 of 'input' has no content"),
        ({"input": [{"type": "computer_call"}]}, "an item of type 'computer_call', which chat"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input: message 0 of 'input': an image must be a data URL",
        ),
        ({"input": "?", "text": {"format": {"type": "json_schema"}}}, "'json_schema' is not served"),
        ({"input": "?", "tools": [{"type": "custom"}]}, "'custom' is not served, only function"),
        ({"input": "?", "tools": [{"type": "namespace"}]}, "'namespace' is not served, only function"),
    ],
)
def test_responses_that_are_refused(body: dict[str, Any], why: str) -> None:
    with pytest.raises(DialectError, match=why):
        of_responses(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": []}, "a list of messages"),
        ({"messages": [{"role": "tool", "content": "?"}]}, "user, assistant or system"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "an image must be a data URL"),
        ({"messages": [{"role": "user", "content": "?"}], "tools": [{"type": "bash_20250124"}]}, "input_schema"),
        (
            {"messages": [{"role": "user", "content": "?"}], "output_config": {"format": {"type": "json_schema"}}},
            "output_f",
        ),
    ],
)
def test_messages_that_are_refused(body: dict[str, Any], why: str) -> None:
    with pytest.raises(DialectError, match=why):
        of_messages(body)


def test_recorded_tokens_come_back_through_litellm(endpoint: Endpoint, engines: ChatEngines) -> None:
    """The answer was tokenised again: litellm sends what it does not know in a field of its own."""
    recorded = {"prompt_token_ids": [3], "generation_token_ids": [1, 2], "generation_log_probs": [-0.5, -0.25]}
    turn = {"role": "assistant", "content": "a"}
    kept = {**turn, "provider_specific_fields": {**recorded, "refusal": None}}
    asked = [{"role": "user", "content": "?"}, kept, {**turn, "provider_specific_fields": None}]
    url, headers = endpoint.address.url + "/v1/chat/completions", {"x-api-key": "secret"}
    assert httpx.post(url, json={"messages": asked}, headers=headers).status_code == 200
    (body,) = engines.bodies
    assert body["messages"][1] == turn | recorded and recorded_tokens({"messages": body["messages"][:2]}) == [3, 1, 2]


def test_what_claude_code_says_anew_in_each_request_is_not_in_the_prompt() -> None:
    """No prompt began as the one before; vLLM leaves it out too."""
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"}
    told = [header, {"type": "text", "text": "You are an agent."}, {"type": "text", "text": "\nBe brief."}]
    later = {"role": "system", "content": [{"type": "text", "text": "Hurry."}]}
    asked = [{"role": "user", "content": "?"}, later]
    assert of_messages({"system": told, "messages": asked})["messages"] == [
        {"role": "system", "content": "You are an agent.\nBe brief."},
        {"role": "user", "content": "?"},
        {"role": "system", "content": "Hurry."},
    ]
    assert of_messages({"system": [header], "messages": asked[:1]})["messages"] == asked[:1]


def test_several_texts_of_a_message_stay_apart() -> None:
    texts = [{"type": "text", "text": "Solve it."}, {"type": "text", "text": "Use Python."}]
    results = [{"type": "tool_result", "tool_use_id": "1", "content": texts}]
    shown = {"role": "tool", "tool_call_id": "1", "content": texts}
    found = of_messages({"messages": [{"role": "user", "content": [*results, *texts]}]})["messages"]
    assert found == [shown, {"role": "user", "content": texts}]
    given = [{"type": "input_text", "text": part["text"]} for part in texts]
    call = {"type": "function_call_output", "call_id": "1", "output": given}
    assert of_responses({"input": [call, {"role": "user", "content": given}]})["messages"] == found


@pytest.mark.parametrize("read", [of_responses, of_messages])
def test_fields_of_vllm_reach_the_check_of_chat_completions(read: Any) -> None:
    """There they have an effect or are refused by name: min_p draws from a distribution that is not trained."""
    given = {
        "stop": ["END"],
        "stop_token_ids": [3],
        "min_p": 0.1,
        "presence_penalty": 0,
        "structured_outputs": {"json": {}},
    }
    turn = {"role": "user", "content": "?"}
    found = read({"input": [turn], "messages": [turn], "stream": True, **given})
    assert {name: found[name] for name in given} == given and "stream" not in found
    config = ChatConfig("policy", (Sampling(8),))
    with pytest.raises(RequestError, match="min_p: 0.1 is not served, leave it at 0"):
        ChatRequest.read(found, config)
    effort = {"reasoning": {"effort": "low"}, "output_config": {"effort": "low"}}
    assert read({"input": [turn], "messages": [turn], **effort})["reasoning_effort"] == "low"


def test_turns_of_the_assistant_are_kept_apart() -> None:
    """Two texts in a row are two turns; a call after a text belongs to it."""
    said = [{"role": "assistant", "content": text} for text in ("a", "b")]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": json.dumps({})}
    found = of_responses({"input": [{"role": "developer", "content": "x"}, *said, call]})["messages"]
    assert [message["role"] for message in found] == ["system", "assistant", "assistant"]
    assert [message["content"] for message in found] == ["x", "a", "b"]
    assert "tool_calls" in found[2] and "tool_calls" not in found[1]


NAMES = ["type", "role", "content", "text", "input", "messages", "tools", "tool_choice", "summary", "format", "system"]
WORDS = ["user", "assistant", "reasoning", "thinking", "tool_use", "tool_result", "message", "function", "id"]
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), ANY, max_size=5))
def test_any_other_request_is_refused_with_a_reason(body: dict[str, Any]) -> None:
    for read in (of_responses, of_messages):
        try:
            found = read(body)
        except DialectError:
            continue
        assert found["messages"] and all(message["role"] for message in found["messages"])
