"""The one entrance of a conversation: messages of data rows, rollouts and requests, brought into one form.

A message becomes {"role", "content"}. Its content is text, or a list of text parts where it has several: how they are
joined is the chat template's (`ChatForm.joint`). With images it is a list of parts (rollout/images.py). Reasoning is a
field of its own, `tool_calls` have their arguments as an object, and results are messages of the role `tool`. Fields
that are null are left out, others are kept. What has no such form is refused: MessageError names the message and the
field.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from grpo_mcore.rollout.images import ReadImage, given_image, image_of_part, is_image

Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation", "tool_response"), "tool"),
    "developer": "system",
}
"""Roles of messages that have other names in published data. The text of a `function_call` is the call, or a list of
calls, as JSON."""
KNOWN_ROLES = ("system", "user", "assistant", "tool")

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages have their reasoning."""
_REASONING_LISTS = ("thinking_blocks", "reasoning_details")
"""Names under which litellm and OpenRouter have it in parts. Of an encrypted part there is no text."""
_TEXT_PARTS = (None, "text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
_REASONING_PARTS = ("reasoning", "thinking", "thought")
_TOOL_FIELDS = ("type", "input_schema", "cache_control")
_VALUES_OF_A_SCHEMA = ("default", "const")


class MessageError(ValueError):
    """A conversation that cannot be used. The text says which message, and why."""


def kind_of(value: Any) -> str:
    """Return the name of a value's JSON type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def read_messages(value: Any, name: str, read_image: ReadImage | None = None) -> list[Message]:
    """Return a list of messages in the normal form; messages in the normal form stay as they are. `name` is the field
    that has them, for MessageError. Images are read by `read_image`, and refused without it."""
    if not isinstance(value, list):
        raise MessageError(f"{name!r} must be a list of messages, got {kind_of(value)}")
    if not value:
        raise MessageError(f"{name!r} has no message in it")
    read = (_read_message(message, f"message {number} of {name!r}", read_image) for number, message in enumerate(value))
    return [message for messages in read for message in messages]


def content_text(content: Any) -> str:
    """Return a content in the normal form as one text, where no template says how its parts are joined."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return "" if content is None else str(content)


def join_texts(messages: Iterable[Mapping[str, Any]], joint: str) -> list[Message]:
    """Return the messages with the text parts of each joined. A message with images keeps its parts."""
    joined = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and not any(map(is_image, content)):
            message = {**message, "content": joint.join(part["text"] for part in content)}
        joined.append(dict(message))
    return joined


def refuse_unknown_roles(messages: Sequence[Message], chat_template: Any) -> None:
    """Raise MessageError for a role that the chat template does not name: many templates write any role down, though no
    model knows it, and others leave its messages out. So are calls and tools refused in fields of OLMo's template."""
    for key in {key for message in messages for key in ("function_calls", "functions") if message.get(key)}:
        if not re.search(rf"""(?:\.|\[['"]|\(['"]){key}\b""", str(chat_template)):
            raise MessageError(f"a message has {key!r}, which the chat template does not read: give tool_calls, tools")
    for role in {message["role"] for message in messages} - {*KNOWN_ROLES}:
        if role not in str(chat_template):
            raise MessageError(
                f"the role {role!r} is neither one of {', '.join(KNOWN_ROLES)} nor named in the chat template"
            )


def _read_message(message: Any, where: str, read_image: ReadImage | None = None) -> list[Message]:
    """Return a message in the normal form, behind the results of tools that are parts of it."""
    if isinstance(message, dict) and "role" not in message and {"from", "value"} <= set(message):  # ShareGPT
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": message["from"], "content": message["value"], **others}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise MessageError(f'{where} must have a role and a content, such as {{"role": "user", "content": "..."}}')
    # A template may look at a field's presence alone, so one that is null is none.
    fields = {key: value for key, value in message.items() if value is not None}
    content, calls, older_call = (fields.pop(key, None) for key in ("content", "tool_calls", "function_call"))
    role = fields["role"].strip().lower().replace("-", "_")
    if role == "function_call":
        calls, content = read_list(content, f"{where}: the call", "calls", single=True), None
    elif not calls and older_call is not None:  # OpenAI's older form
        calls = [older_call]
    calls = read_list(calls, f"{where}: tool_calls", "calls")
    fields["role"] = ROLES.get(role, role if role in KNOWN_ROLES else fields["role"])
    if fields["role"] == "tool":
        content = result_content(content)
    read = read_content(content, where, read_image=read_image)
    calls = [read_call(call, where) for call in [*(calls or ()), *read.calls]]
    for key in REASONING_FIELDS:
        if not isinstance(value := fields.get(key, ""), str):
            raise MessageError(f"{where}: {key!r} must be text, got {kind_of(value)}")
    if read.reasoning or not any(fields.get(key) for key in REASONING_FIELDS):
        reasoning = [*_own_reasoning(fields), *read.reasoning]
        fields = {key: value for key, value in fields.items() if key not in REASONING_FIELDS}
        fields |= {"reasoning_content": "\n".join(reasoning)} if reasoning else {}
    has_more = calls or fields.get("generation_token_ids") or any(fields.get(key) for key in REASONING_FIELDS)
    if content is None and not has_more:
        raise MessageError(f"{where} has no content")
    if read.results and not (read.parts or has_more):
        return read.results
    return [*read.results, {**fields, "content": read.value, **({"tool_calls": calls} if calls else {})}]


def _own_reasoning(fields: Mapping[str, Any]) -> list[str]:
    """Return the reasoning in a message's fields of their own: the first that is text, else the parts of a list."""
    if text := next((fields[key] for key in REASONING_FIELDS if fields.get(key)), None):
        return [text] if isinstance(text, str) else []
    parts: list[Any] = next((fields[key] for key in _REASONING_LISTS if isinstance(fields.get(key), list)), [])
    texts = (
        part.get("thinking") or part.get("text") or part.get("summary") for part in parts if isinstance(part, dict)
    )
    return [text for text in texts if isinstance(text, str)]


def result_content(content: Any) -> Any:
    """Return the result of a tool or an environment: a value that is neither text nor parts of it as JSON."""
    if content is None or isinstance(content, str):
        return content
    parts = isinstance(content, list) and all(
        isinstance(part, str) or isinstance(part, dict) and ("type" in part or set(part) == {"text"})
        for part in content
    )
    return content if parts else _as_text(content, "")


@dataclass(slots=True)
class Content:
    """The parts of a content by kind: texts (and, where they are kept, other parts in the chat API's form), reasoning,
    and calls and results of tools."""

    parts: list[Any] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)

    @property
    def value(self) -> str | list[Any]:
        """The content of a message: text, or a list of parts."""
        if len(self.parts) < 2 and all(isinstance(part, str) for part in self.parts):
            return self.parts[0] if self.parts else ""
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in self.parts]


def read_content(
    content: Any, where: str, *, keeps_media: bool = False, read_image: ReadImage | None = None
) -> Content:
    """Read a content: text, or a list of parts by their types. Images are read by `read_image`. Any other part that is
    no text is refused, or with `keeps_media` kept."""
    if isinstance(content, str):
        return Content([content])
    read = Content()
    if content is None:
        return read
    if not isinstance(content, list):
        raise MessageError(f"{where}: the content must be text or a list of parts, got {kind_of(content)}")
    for part in content:
        if isinstance(part, str):
            read.parts.append(part)
            continue
        if not isinstance(part, dict):
            raise MessageError(f"{where}: a part of the content must be text or an object, got {kind_of(part)}")
        kind = part.get("type")
        if kind in _TEXT_PARTS and (kind is not None or "text" in part or "refusal" in part):
            read.parts.append(_text_in(part, ("text", "refusal"), where))
        elif kind in _REASONING_PARTS:
            read.reasoning.append(_text_in(part, ("thinking", "text", "reasoning", "thought", "content"), where))
        elif kind == "tool_use":
            read.calls.append({"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")})
        elif kind == "tool_result":
            result = read_content(part.get("content"), where, read_image=read_image).value
            call = {"tool_call_id": part["tool_use_id"]} if part.get("tool_use_id") is not None else {}
            read.results.append({"role": "tool", **call, "content": result})
        elif keeps_media:
            read.parts.append(_media_part(part))
        elif read_image is not None and is_image(part):
            read.parts.append(_image_part(part, where, read_image))
        else:
            raise MessageError(f"{where} has a part of type {kind!r}, which is not text; {_no_media(part)}")
    return read


def _no_media(part: dict[str, Any]) -> str:
    return "no image is read here" if is_image(part) else "audio and video are not supported"


def _image_part(part: dict[str, Any], where: str, read_image: ReadImage) -> dict[str, Any]:
    if (value := image_of_part(part)) is None and read_image is given_image:
        return {"type": "image"}  # a column of its row has it
    try:
        return {"type": "image", "image": read_image(value)}
    except (ValueError, OSError) as error:
        raise MessageError(f"{where}: {error}") from error


def _text_in(part: dict[str, Any], keys: Sequence[str], where: str) -> str:
    text = part.get(keys[0])
    if text is None:
        text = next((part[key] for key in keys if part.get(key) is not None), None)
    if not isinstance(text, str):
        raise MessageError(f"{where}: the text of a part must be text, got {kind_of(text)}")
    return text


def _media_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part in the chat API's form."""
    if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    return part


def read_call(call: Any, where: str) -> Message:
    """Return a call of a tool with its arguments as an object: the API has JSON text, but chat templates write the JSON
    themselves. Arguments that are not a JSON object stay what the model wrote."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(f"{where}: a call must have the name of its function")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise MessageError(f"{where}: the arguments of a call must be an object or text, got {kind_of(arguments)}")
    if not isinstance(arguments, dict):
        try:
            parsed = json.loads(arguments) if arguments and arguments.strip() else {}
        except ValueError:
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    outside = {key: value for key, value in call.items() if value is not None and (key == "id" or "function" in call)}
    inside = {key: value for key, value in function.items() if key != "id" and value is not None}
    return {"type": "function", **outside, "function": {**inside, "arguments": arguments}}


def read_tools(value: Any, name: str) -> list[Message]:
    """Return the tools that a conversation may call: a list of objects, each or all of which may be JSON text, as may
    their parameters. A function without the chat API's frame {"type": "function", "function": ...}, as in the Responses
    and Messages APIs, gets it; tools that are no functions stay as they are. Fields that are null are left out."""
    return [_without_nulls(_read_tool(tool, name)) for tool in read_list(value, name, "tools")]


def _without_nulls(schema: Any) -> Any:
    if isinstance(schema, dict):
        shown = {key: value for key, value in schema.items() if value is not None or key in _VALUES_OF_A_SCHEMA}
        return {key: _without_nulls(value) for key, value in shown.items()}
    return [*map(_without_nulls, schema)] if isinstance(schema, list) else schema


def _read_tool(tool: Any, name: str) -> Message:
    if not isinstance(tool, dict):
        raise MessageError(f"{name!r} must be a list of tools, got a list with {kind_of(tool)}")
    if "function" not in tool and tool.get("type") in (None, "function", "custom"):
        function = {key: value for key, value in tool.items() if key not in _TOOL_FIELDS}
        schema = {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
        tool = {"type": "function", "function": function | schema}
    function = tool.get("function", tool)
    if tool.get("type", "function") == "function" and not (
        isinstance(function, dict) and isinstance(function.get("name"), str)
    ):
        raise MessageError(f"{name!r} has a tool without a name")
    if isinstance(function, dict) and isinstance(parameters := function.get("parameters"), str) and parameters.strip():
        function = {**function, "parameters": _parsed(parameters, name)}
    return {**tool, "function": function} if "function" in tool else function


def read_list(value: Any, name: str, kind: str, *, single: bool = False) -> list[Any]:
    """Return a list, which may be JSON text (a table's cells often are), as may its elements. `kind` says what is in
    it, for MessageError. With `single`, one object is a list of it."""
    if isinstance(value, str) and value.strip():
        value = _parsed(value, name)
    value = [value] if single and isinstance(value, dict) else value
    if value not in (None, "") and not isinstance(value, list):
        raise MessageError(f"{name!r} must be a list of {kind}, got {kind_of(value)}")
    return [_parsed(element, name) if isinstance(element, str) else element for element in value or []]


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise MessageError(f"{name!r} is text that is not JSON ({error})") from error


def scoped(namespace: Any, name: Any) -> Any:
    """Return the name under which the policy knows a function of a namespace; one without a namespace keeps its own."""
    return f"{namespace}__{name}" if namespace and name else name


class Item(Struct, omit_defaults=True, gc=False):
    """One item of a conversation in the Responses API: a message, a call, the result of a call, or reasoning."""

    type: str | None = None
    role: str | None = None
    content: Any = None
    name: Any = None
    namespace: Any = None
    arguments: Any = None
    call_id: Any = None
    output: Any = None
    summary: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning_content: Any = None
    thinking: Any = None
    reasoning: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None

    @property
    def is_message(self) -> bool:
        return self.type == "message" or (self.type is None and self.role is not None)


class UnknownItem(Exception):
    """A kind of item that chat messages cannot hold."""


class ItemReader:
    """Converts the items of a conversation, part by part, to messages as the chat API has them, which `read_messages`
    brings into the normal form. Without `reasoning`, it is dropped."""

    def __init__(self, *, reasoning: bool = True) -> None:
        self._reasoning = reasoning
        self._messages: list[Message] = []
        self._turn: Message | None = None
        """The assistant's message that may still grow."""
        self._unnamed_calls = 0
        self._unnamed_results = 0

    def read(self, items: Iterable[Item]) -> list[Message]:
        """Convert the next items. Reasoning, a text and calls that follow each other are one assistant message.

        Calls have their arguments as the policy wrote them; results name their call. Raises MessageError for a
        malformed item, UnknownItem for a kind of item that chat messages cannot hold.
        """
        self._messages, self._turn = [], None
        for item in items:
            if item.is_message:
                self._add_message(item)
            elif item.type == "reasoning":
                texts = [*_item_texts(item.summary), *_item_texts(item.content)]
                self._add_reasoning("\n".join(filter(None, texts)))
            elif item.type == "function_call":
                self._add_call(item.call_id, scoped(item.namespace, item.name), item.arguments)
            elif item.type == "function_call_output":
                self._add_result(item.call_id, item.output)
            else:
                raise UnknownItem(f"an item of type {item.type!r}, which chat messages cannot hold")
        return self._messages

    def _add_message(self, item: Item) -> None:
        role = item.role or "assistant"
        role = ROLES.get(role, role)
        if role not in KNOWN_ROLES:
            raise MessageError(f"a message of the role {role!r}")
        if role == "tool":
            self._add_result(item.tool_call_id, item.content)
            return
        read = read_content(item.content, "a message", keeps_media=True)
        if role != "assistant":
            self._turn = None
            self._messages.append({"role": role, "content": None if item.content is None else read.value})
            return
        turn = self._open_turn()
        turn["content"] = read.value
        reasoning = _own_reasoning({key: getattr(item, key) for key in (*REASONING_FIELDS, *_REASONING_LISTS)})
        self._add_reasoning("\n".join(filter(None, [*reasoning, *read.reasoning])), turn)
        calls = [*read_list(item.tool_calls, "tool_calls", "calls"), *read.calls] if item.tool_calls else read.calls
        for call in calls:
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise MessageError(f"a call must be an object, got {kind_of(call)}")
            self._add_call(call.get("id"), function.get("name"), function.get("arguments"))

    def _open_turn(self) -> Message:
        """Return the assistant's message; a new one unless nothing is said or called in the last."""
        if self._turn is None or self._turn["content"] or "tool_calls" in self._turn:
            self._turn = {"role": "assistant", "content": ""}
            self._messages.append(self._turn)
        return self._turn

    def _add_reasoning(self, text: str, turn: Message | None = None) -> None:
        if self._reasoning and text:
            turn = turn if turn is not None else self._open_turn()
            turn["reasoning_content"] = "\n".join(filter(None, [turn.get("reasoning_content"), text]))

    def _add_call(self, call_id: Any, name: Any, arguments: Any) -> None:
        if not isinstance(name, str) or not name:
            raise MessageError("a call without the name of its function")
        if call_id is None:
            self._unnamed_calls += 1
            call_id = f"call_{self._unnamed_calls}"
        turn = self._turn if self._turn is not None else self._open_turn()
        function = {"name": name, "arguments": _as_text(arguments, "{}")}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _add_result(self, call_id: Any, output: Any) -> None:
        """Add a call's result. Results without an id answer calls without one, in order."""
        self._turn = None
        if call_id is None:
            self._unnamed_results += 1
            call_id = f"call_{self._unnamed_results}"
        output = result_content(output)
        content = read_content(output, "a result", keeps_media=True).value
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _item_texts(value: Any) -> list[str]:
    read = read_content(value, "reasoning")
    return [*read.parts, *read.reasoning]


def _as_text(value: Any, absent: str) -> str:
    if value is None:
        return absent
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def with_instructions(messages: list[Message], instructions: Any) -> list[Message]:
    """Return the messages behind a request's `instructions`, as a system prompt."""
    if not instructions:
        return messages
    if not isinstance(instructions, str):
        raise MessageError(f"'instructions' must be text, got {kind_of(instructions)}")
    return [{"role": "system", "content": instructions}, *messages]
