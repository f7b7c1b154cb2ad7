"""Other forms of the chat API, for agents that speak no chat completions: OpenAI's Responses and Anthropic's Messages.

A request becomes one for a chat completion, which the engines answer as any other, and the answer takes the form that
was asked for. Nothing is kept between requests. With `stream` the events come together, after the whole answer.
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from grpo_mcore.generation.chat.prompt import TOKEN_FIELDS
from grpo_mcore.generation.chat.request import NEUTRAL
from grpo_mcore.rollout.images import data_url
from grpo_mcore.rollout.messages import (
    Item,
    ItemReader,
    MessageError,
    UnknownItem,
    read_content,
    read_messages,
    read_tools,
    scoped,
    with_instructions,
)

Event = tuple[str | None, Any]
"""Name of a server-sent event, None for those without, and its data."""

_SAME = (
    *("model", "temperature", "top_p", "top_k", "seed", "chat_template_kwargs", "tool_choice", "parallel_tool_calls"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *(name for name in NEUTRAL if name not in ("stream", "tool_choice")),  # refused there by name
)
_HOSTED_TOOLS = ("web_search", "web_search_preview", "image_generation")
"""Types of tools that OpenAI's servers run, and that clients such as Codex send without having been asked to."""
_BILLING = "x-anthropic-billing-header"
_ANTHROPIC_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


class DialectError(ValueError):
    """A request has a part that no chat completion has; the message names it."""


@dataclass(frozen=True)
class Dialect:
    """One form of the API: how to read a request, and write an answer, its events and an error of a status."""

    request: Callable[[Mapping[str, Any]], dict[str, Any]]
    answer: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    events: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[Event]]
    error: Callable[[int, Mapping[str, Any]], Mapping[str, Any]]


def chat_events(answer: Mapping[str, Any], request: Mapping[str, Any]) -> Iterator[Event]:
    """Yield a chat completion as its chunks: the message, the reason for its end, and the usage if asked for."""
    (choice,) = answer["choices"]
    common = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    delta = {key: value for key, value in choice["message"].items() if key != "tool_calls"}
    if calls := choice["message"].get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    first = {key: choice[key] for key in ("logprobs", "token_ids") if key in choice}
    asked_for = {key: answer[key] for key in ("prompt_token_ids",) if key in answer}
    yield None, {**common, **asked_for, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **first}]}
    end = {key: choice.get(key) for key in ("finish_reason", "stop_reason")}
    yield None, {**common, "choices": [{"index": 0, "delta": {}, **end}]}
    options = request.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield None, {**common, "choices": [], "usage": answer["usage"]}
    yield None, "[DONE]"


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    chat = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    if isinstance(chat.get("messages"), list):
        chat["messages"] = [_with_recorded_tokens(message) for message in chat["messages"]]
    return chat


def _with_recorded_tokens(message: Any) -> Any:
    """Return a message with its recorded tokens in their own fields: litellm keeps, and sends back, all fields that
    OpenAI's messages do not have in `provider_specific_fields`."""
    kept = message.get("provider_specific_fields") if isinstance(message, dict) else None
    if not isinstance(kept, dict):
        return message
    others = {key: value for key, value in message.items() if key != "provider_specific_fields"}
    return {name: kept[name] for name in TOKEN_FIELDS if name in kept} | others


def of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a chat completion that a request of /v1/responses stands for. Raises DialectError."""
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if body.get(name):
            raise DialectError(f"{name}: nothing is kept between requests; send the whole conversation as input")
    form = _object(_object(body, "text"), "format")
    if form and form.get("type") != "text":
        raise DialectError(f"text.format: {_kind(form)} is not served, leave it at 'text'")
    items = body.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not items:
        raise DialectError("input: a text or a list of items is needed")
    with_spaces = _functions(_list(body, "tools"))
    tools = [{**tool, "name": scoped(space, tool.get("name"))} if space else tool for space, tool in with_spaces]
    try:
        messages = ItemReader().read(msgspec.convert(items, list[Item]))
        messages = read_messages(with_instructions(messages, body.get("instructions")), "input", data_url)
        tools = read_tools(tools, "tools")
    except (MessageError, UnknownItem, msgspec.ValidationError) as error:
        raise DialectError(f"input: {error}") from error
    chat = {name: body[name] for name in _SAME if body.get(name) is not None} | {"messages": messages}
    if effort := _object(body, "reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    return chat | ({"tools": tools} if tools else {})


def _functions(tools: Sequence[Any], namespace: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the functions among the tools of a request with their namespaces, as which Codex sends MCP servers; ""
    without. Tools that OpenAI's servers run are left out. Raises DialectError."""
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            yield namespace, tool
        elif kind == "namespace" and not namespace and tool.get("name"):
            yield from _functions(_list(tool, "tools"), str(tool["name"]))
        elif kind not in _HOSTED_TOOLS:
            raise DialectError(f"tools: {_kind(tool)} is not served, only function")


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of a request, empty if it is not there."""
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise DialectError(f"{name}: an object is needed")
    return value


def _list(body: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return a list of a request, empty if it is not there."""
    value = body.get(name) or []
    if not isinstance(value, list):
        raise DialectError(f"{name}: a list is needed")
    return value


def _kind(part: Any) -> str:
    return repr(part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__)


def as_response(answer: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat completion as an answer of /v1/responses."""
    (choice,), usage = answer["choices"], answer["usage"]
    names = [(space, tool["name"]) for space, tool in _functions(request.get("tools") or ()) if space]
    spaces = {scoped(space, name): {"namespace": space, "name": name} for space, name in names}
    message, cut = choice["message"], choice["finish_reason"] in ("length", "abort")
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        output.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": content, "status": status})
    if message["content"] or not message.get("tool_calls"):
        text: dict[str, Any] = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
            "logprobs": [],
        }
        output.append({"type": "message", "id": _id("msg"), "role": "assistant", "status": status, "content": [text]})
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        output.append({
            "type": "function_call", "id": _id("fc"), "call_id": call["id"], "name": name, "arguments": arguments,
            "status": status, **spaces.get(name, {}),
        })  # fmt: skip
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": answer["created"],
        "model": answer["model"],
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "output": output,
        "parallel_tool_calls": True,
        "temperature": request.get("temperature"),
        "top_p": request.get("top_p"),
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def response_events(response: Mapping[str, Any], request: Mapping[str, Any]) -> Iterator[Event]:
    """Yield an answer of /v1/responses as its events."""
    numbers = iter(range(10**9))

    def event(kind: str, **data: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(numbers), **data}

    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(response["output"]):
        position = {"output_index": index, "item_id": item["id"]}
        empty = {**item, "status": "in_progress"} | {key: [] for key in ("content",) if key in item}
        if item["type"] == "function_call":
            empty["arguments"] = ""
        yield event("response.output_item.added", output_index=index, item=empty)
        if item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **position, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done", **position, name=item["name"], arguments=item["arguments"]
            )
        elif item["type"] == "message":
            (part,) = item["content"]
            position["content_index"] = 0
            yield event("response.content_part.added", **position, part={**part, "text": ""})
            yield event("response.output_text.delta", **position, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **position, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **position, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{response['status']}", response=response)


def of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a chat completion that a request of /v1/messages stands for. Raises DialectError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DialectError("messages: a list of messages is needed")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise DialectError("messages: each needs a content and a role, user, assistant or system")
    if body.get("system"):
        messages = [{"role": "system", "content": body["system"]}, *messages]
    messages = [
        {**message, "content": _system(message.get("content"))} if message["role"] == "system" else message
        for message in messages
    ]
    tools = _list(body, "tools")
    if other := [tool for tool in tools if not isinstance(tool, dict) or "input_schema" not in tool]:
        raise DialectError(f"tools: {_kind(other[0])} is not served, only tools with an input_schema")
    try:
        spoken = [message for message in messages if message["role"] != "system" or message["content"]]
        messages = read_messages(spoken, "messages", data_url)
        tools = read_tools(tools, "tools")
    except MessageError as error:
        raise DialectError(str(error)) from error
    shaped = _object(body, "output_format") or _object(_object(body, "output_config"), "format")
    for name, value in (("output_format", shaped), ("mcp_servers", body.get("mcp_servers"))):
        if value:
            raise DialectError(f"{name}: not served; leave it out")
    choice = _object(body, "tool_choice").get("type", "auto")
    alone = bool(_object(body, "tool_choice").get("disable_parallel_tool_use"))
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat |= {"messages": messages, "tool_choice": choice} | ({"parallel_tool_calls": False} if alone else {})
    if body.get("max_tokens") is not None:
        chat["max_tokens"] = body["max_tokens"]
    if effort := _object(body, "output_config").get("effort"):
        chat["reasoning_effort"] = effort
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    return chat | ({"tools": tools} if tools else {})


def _to_answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """Read a request of /v1/messages that asks for an answer. Raises DialectError where the last message is the
    assistant's: it would be the beginning of the answer."""
    chat = of_messages(body)
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        raise DialectError("messages: an answer that is begun by the last one is not served; end with the user's turn")
    return chat


def _system(content: Any) -> str:
    """Return the text of a system prompt without the one that Claude Code puts in front: it differs in each request,
    so that no prompt would begin as the one before."""
    try:
        texts = read_content(content, "system").parts
    except MessageError as error:
        raise DialectError(str(error)) from error
    return "".join(text for text in texts if not text.startswith(_BILLING))


def as_message(answer: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat completion as an answer of /v1/messages."""
    (choice,), usage = answer["choices"], answer["usage"]
    message, content = choice["message"], list[dict[str, Any]]()
    if thought := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or []:
        arguments = _arguments(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    reasons = {"length": "max_tokens", "abort": "max_tokens", "tool_calls": "tool_use"}
    stop = choice.get("stop_reason") if choice["finish_reason"] == "stop" else None
    return {
        "id": _id("msg"),
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": "stop_sequence" if stop else reasons.get(choice["finish_reason"], "end_turn"),
        "stop_sequence": stop,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def _arguments(text: str) -> Any:
    """Return the arguments of a call; those that are no JSON object, which the API has no form for, as `_raw`."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return {"_raw": text}
    return arguments if isinstance(arguments, dict) else {"_raw": text}


def message_events(message: Mapping[str, Any], request: Mapping[str, Any]) -> Iterator[Event]:
    """Yield an answer of /v1/messages as its events."""

    def event(kind: str, **data: Any) -> Event:
        return kind, {"type": kind, **data}

    usage = {**message["usage"], "output_tokens": 0}
    yield event(
        "message_start", message={**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    )
    for index, block in enumerate(message["content"]):
        match block["type"]:
            case "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            case "thinking":
                empty = {**block, "thinking": ""}
                delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            case _:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield event("message_delta", delta=end, usage={"output_tokens": message["usage"]["output_tokens"]})
    yield event("message_stop")


def _messages_error(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    kind = _ANTHROPIC_ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


CHAT = Dialect(_chat, lambda answer, _: dict(answer), chat_events, lambda _, body: body)
RESPONSES = Dialect(of_responses, as_response, response_events, lambda _, body: body)
MESSAGES = Dialect(_to_answer, as_message, message_events, _messages_error)
COUNTED_MESSAGES = replace(MESSAGES, request=of_messages)
