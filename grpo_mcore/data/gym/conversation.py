"""Conversion of Responses API items to chat API messages, which chat templates take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpo_mcore.data.gym.rollout import BadRow, Filtered, Item, encode, kind_of, part_text, text_of

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant", "tool": "tool"}
Message = dict[str, Any]


class Chat:
    """A conversation that is converted part by part; `turn` is the assistant's message that may still grow."""

    def __init__(self, reasoning: bool = True) -> None:
        self.messages: list[Message] = []
        self.turn: Message | None = None
        self.reasoning = reasoning
        self.unnamed_calls = 0
        self.unnamed_results = 0

    def take(self, items: Iterable[Item]) -> list[Message]:
        """Convert the next items. A thought, a text and calls that follow each other are one assistant message.

        Calls get the chat API's form, with the arguments as the policy wrote them; results name their call. Thoughts
        become `reasoning_content`, or are dropped without `reasoning`. `developer` becomes `system`, which templates
        know. An assistant that neither says nor calls anything (a generation cut off while it thought) gets no message.
        Raises BadRow for a malformed item, Filtered for a kind of item that chat messages cannot hold.
        """
        self.messages, self.turn = [], None
        for item in items:
            kind = item.type
            handle = _HANDLERS.get(kind) if kind is not None or item.role is not None else None
            if handle is None:
                raise Filtered(f"an item of type {kind!r}, which chat messages cannot hold")
            handle(self, item)
        return [
            message
            for message in self.messages
            if message["content"] or message["role"] != "assistant" or "tool_calls" in message
        ]

    def message(self, item: Item) -> None:
        role = _ROLES.get("assistant" if item.role is None else item.role)
        if role is None:
            raise BadRow(f"a message of the role {item.role!r}")
        if role == "assistant":
            turn = self.fresh_turn()
            turn["content"] = chat_content(item.content)
            if self.reasoning and isinstance(item.reasoning_content, str) and item.reasoning_content:
                turn["reasoning_content"] = item.reasoning_content
            for call in _list(item.tool_calls, "tool_calls"):
                self.call(*_chat_call(call))
            return
        self.turn = None
        message: Message = {"role": role, "content": chat_content(item.content)}
        if role == "tool":
            message["tool_call_id"] = self.result_id(item.tool_call_id)
        self.messages.append(message)

    def fresh_turn(self) -> Message:
        """Return the assistant's message; a new one unless nothing is said or called in the last."""
        if self.turn is None or self.turn["content"] or "tool_calls" in self.turn:
            self.turn = {"role": "assistant", "content": ""}
            self.messages.append(self.turn)
        return self.turn

    def thought(self, item: Item) -> None:
        if not self.reasoning:
            return
        text = _thoughts(item.summary)
        if more := _thoughts(item.content):
            text = f"{text}\n{more}" if text else more
        if text:
            turn = self.fresh_turn()
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{before}\n{text}" if before else text

    def function_call(self, item: Item) -> None:
        self.call(item.call_id, item.name, item.arguments)

    def call(self, call_id: Any, name: Any, arguments: Any) -> None:
        if not isinstance(name, str) or not name:
            raise BadRow("a call without the name of its function")
        if call_id is None:
            self.unnamed_calls += 1
            call_id = f"call_{self.unnamed_calls}"
        turn = self.turn if self.turn is not None else self.fresh_turn()
        function = {"name": name, "arguments": _as_text(arguments, "{}")}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def call_output(self, item: Item) -> None:
        self.turn = None
        content = chat_content(item.output) if isinstance(item.output, list) else _as_text(item.output, "")
        self.messages.append({"role": "tool", "tool_call_id": self.result_id(item.call_id), "content": content})

    def result_id(self, call_id: Any) -> Any:
        """Return the id of the call that a result answers. Results without an id answer calls without one, in order."""
        if call_id is not None:
            return call_id
        self.unnamed_results += 1
        return f"call_{self.unnamed_results}"


_HANDLERS = {
    None: Chat.message,
    "message": Chat.message,
    "reasoning": Chat.thought,
    "function_call": Chat.function_call,
    "function_call_output": Chat.call_output,
}


def chat_content(content: Any) -> str | list[Any]:
    """Return the text of all parts, or the list of parts in the chat API's form where one of them is not text."""
    text = text_of(content)
    if type(content) is list:
        for part in content:
            if not _is_text(part):
                return [_chat_part(part) for part in content]
    return text


def chat_tools(tools: Any) -> list[Any]:
    """Return tools in the chat API's form ({"type": "function", "function": {...}}), given that form or the flat one of
    the Responses API. Tools that are not functions stay as they are. Raises BadRow."""
    return [_chat_tool(tool) for tool in _list(tools, "tools")]


def with_instructions(messages: list[Message], instructions: Any) -> list[Message]:
    """Put the request's `instructions` before the messages, as a system prompt."""
    if not instructions:
        return messages
    if not isinstance(instructions, str):
        raise BadRow(f"'instructions' must be text, got {kind_of(instructions)}")
    return [{"role": "system", "content": instructions}, *messages]


def _list(value: Any, what: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"{what!r} must be a list, got {kind_of(value)}")
    return value


def _chat_call(call: Any) -> tuple[Any, Any, Any]:
    """Return (id, name, arguments) of a call, with or without the chat API's `function` around name and arguments."""
    if not isinstance(call, dict):
        raise BadRow(f"a call must be an object, got {kind_of(call)}")
    function = call["function"] if isinstance(call.get("function"), dict) else call
    return call.get("id"), function.get("name"), function.get("arguments")


def _chat_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        raise BadRow(f"a tool must be an object, got {kind_of(tool)}")
    if "function" in tool or tool.get("type", "function") != "function":
        return tool
    if not isinstance(tool.get("name"), str):
        raise BadRow("a tool without a name")
    kept = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def _as_text(value: Any, absent: str) -> str:
    if value is None:
        return absent
    return value if isinstance(value, str) else encode(value).decode()


def _thoughts(parts: Any) -> str:
    """Return the texts of a thought's parts, one per line."""
    if not parts:
        return ""
    if type(parts) is str:
        return parts
    texts = [part_text(part) for part in _list(parts, "reasoning")]
    return texts[0] if len(texts) == 1 else "\n".join([text for text in texts if text])


def _is_text(part: Any) -> bool:
    """Return whether a part that `text_of` accepted is text."""
    return type(part) is str or "text" in part or "refusal" in part


def _chat_part(part: Any) -> Any:
    if _is_text(part):
        return {"type": "text", "text": part_text(part)}
    if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
        image = {"url": part["image_url"], **({"detail": part["detail"]} if part.get("detail") else {})}
        return {"type": "image_url", "image_url": image}
    return part
