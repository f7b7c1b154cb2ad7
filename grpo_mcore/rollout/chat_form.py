"""The form of a conversation that one chat template takes, found out by trying it. SFT, DPO, prompts and the endpoint
use it, so that all show the same text.

Templates disagree about a message that calls tools: most want a call's arguments as an object, DeepSeek as JSON text;
DeepSeek shows calls only beside a text that is null; Llama 3.1 allows one call a message; Mistral refuses ids of calls
that have not nine letters and digits. Llama 3 and Gemma 3 know no calls at all: there they become text of the message,
and results messages of the user, as in a rollout of several turns.

Gemma 2 knows no system prompt: it becomes the beginning of the first question. Qwen 3.5 and Mistral refuse a second
one, gpt-oss and MiniMax leave it out: it is joined to the first, or, later on, becomes a message of the user. Data of
reasoning models often have the reasoning in the text, <think>...</think>. gpt-oss would show it as part of the answer,
so it becomes a field.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from grpo_mcore.rollout.messages import REASONING_FIELDS, join_texts

_NAME, _VALUE, _RESULT = "probe_name", "@@value@@", "@@result@@"
_TEXT, _REASONING, _SYSTEM, _LATER = "@@text@@", "@@reasoning@@", "@@system@@", "@@later@@"
_QUESTION = {"role": "user", "content": "question"}


@dataclass(frozen=True)
class ChatForm:
    """The form that a template takes. Without `calls`, they are written into the text."""

    calls: bool = True
    json_arguments: bool = False
    """Arguments are JSON text."""
    null_text: bool = False
    """The text of a message that only calls is null."""
    one_call: bool = False
    """Several calls of one message are written as messages of their own, each with its result."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits. Others become a hash of themselves."""
    results: bool = True
    """There is a role `tool`."""
    alternate: bool = False
    """Neighbouring messages of one role are joined."""
    system: bool = True
    """There is a role `system`. Without it, a system prompt stands in front of the first question."""
    one_system: bool = False
    """Only one system prompt is shown, at the beginning. Others right behind it are joined to it, later ones become
    messages of the user."""
    reasoning: str = "reasoning_content"
    """The field of a message's reasoning: gpt-oss has `thinking`. Reasoning under another name of REASONING_FIELDS is
    moved there."""
    split_reasoning: bool = False
    """Reasoning at the beginning of an answer's text, <think>...</think>, is moved to its field: the template does not
    look for it there."""
    joint: str = "\n"
    """Separator of the texts of one message: the template's own, or, where it takes one text alone, a line break, as in
    vLLM."""

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in this form. Arguments that are no JSON object stay as they are."""
        shown = join_texts(messages, self.joint)
        if self.one_system:
            first = list(takewhile(lambda message: message.get("role") == "system", shown))
            later = shown[len(first) :]
            shown = [*_joined(first), *({**m, "role": "user"} if m.get("role") == "system" else m for m in later)]
        if not self.system and shown and shown[0].get("role") == "system":
            shown = [*_joined([{**shown[0], "role": "user"}, *shown[1:2]]), *shown[2:]]
        if self.one_call:
            shown = _one_call_each(shown)
        if self.short_ids:
            shown = _with_short_ids(shown)
        shown = [self._message(message) for message in shown]
        return _joined(shown) if self.alternate else shown

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("role") == "tool" and not self.results:
            return {"role": "user", "content": message.get("content")}
        calls = message.get("tool_calls")
        if self.split_reasoning and message.get("role") == "assistant":
            message = _with_reasoning_apart(message)
        texts = [message.pop(key) for key in REASONING_FIELDS if isinstance(message.get(key), str)]
        reasoning = next(filter(None, texts), None)
        if reasoning and self.reasoning == "reasoning_content":
            message |= {self.reasoning: reasoning}
        elif reasoning:
            # gpt-oss refuses reasoning and a text in one message with calls.
            beside = message["content"] if calls and message.get("content") else None
            message |= {self.reasoning: reasoning if beside is None else f"{reasoning}\n{beside}"}
            message |= {} if beside is None else {"content": ""}
        if not calls:
            return {key: value for key, value in message.items() if key != "tool_calls"}
        if not self.calls:
            texts = [message.get("content") or "", *map(_call_text, calls)]
            left = {key: value for key, value in message.items() if key != "tool_calls"}
            return {**left, "content": "\n".join(text for text in texts if text)}
        text = message.get("content") or (None if self.null_text else "")
        return {**message, "content": text, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if not self.json_arguments or not isinstance(function["arguments"], dict):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def chat_form(tokenizer: Any, chat_template: str | None = None) -> ChatForm:
    """Return the form that the tokenizer's chat template takes, or another one given in its place."""
    return _chat_form(tokenizer, str(chat_template or getattr(tokenizer, "chat_template", None)), chat_template)


@lru_cache(maxsize=4)
def _chat_form(tokenizer: Any, source: str, chat_template: str | None) -> ChatForm:
    def shows(form: ChatForm, messages: list[dict[str, Any]], *expected: str) -> bool:
        try:
            text = tokenizer.apply_chat_template(form.messages(messages), tokenize=False, **options)
        except Exception:  # a template is code of the model's author
            return False
        twice = "{'probe_key'" in text or '\\"probe_key' in text  # an object as Python writes it, or JSON in JSON
        return not twice and all(part in text for part in expected)

    def alike(form: ChatForm, reasoning: str) -> bool:
        """Return whether reasoning is shown in the same way in its field and in the text."""
        inline = {"role": "assistant", "content": f"<think>\n{_REASONING}\n</think>\n\n{_TEXT}"}
        in_field = {"role": "assistant", "content": _TEXT, reasoning: _REASONING}
        try:
            texts = [
                tokenizer.apply_chat_template(form.messages([_QUESTION, message]), tokenize=False, **options)
                for message in (inline, in_field)
            ]
        except Exception:  # a template is code of the model's author
            return True
        return len({"".join(text.split()) for text in texts}) == 1

    def joint() -> str:
        parts = [{"type": "text", "text": text} for text in (_TEXT, _RESULT)]
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, **options)
        except Exception:  # a template is code of the model's author
            return ChatForm.joint
        between, end, _ = text.partition(_TEXT)[2].partition(_RESULT)
        return between if end and "text" not in between else ChatForm.joint  # not the list as Python or JSON writes it

    options = {"chat_template": chat_template} if chat_template else {}
    answer = {"role": "assistant", "content": _TEXT}
    alternate = not shows(ChatForm(), [_QUESTION, _QUESTION, answer], _TEXT)
    called = [_QUESTION, _calling(1), _result(0)]
    reasoning = None
    for key in REASONING_FIELDS:
        if reasoning is None and shows(ChatForm(reasoning=key), [_QUESTION, {**answer, key: _REASONING}], _REASONING):
            reasoning = key
    apart = reasoning is not None and not alike(ChatForm(reasoning=reasoning), reasoning)
    conversation = [{"role": "system", "content": _SYSTEM}, _QUESTION, answer]
    system = shows(ChatForm(), conversation, _SYSTEM) or not shows(ChatForm(system=False), conversation, _SYSTEM)
    common: dict[str, Any] = {"alternate": alternate, "system": system, "split_reasoning": apart}
    reminded = [*conversation, {"role": "system", "content": _LATER}, _QUESTION, answer]
    if not shows(ChatForm(**common), reminded, _SYSTEM, _LATER):
        common["one_system"] = shows(ChatForm(**common, one_system=True), reminded, _SYSTEM, _LATER)
    common |= {"reasoning": reasoning or "reasoning_content", "joint": joint()}
    for json_arguments in (False, True):
        for null_text in (False, True):
            form = ChatForm(True, json_arguments, null_text, **common)
            if shows(form, [*called, answer], _NAME, _VALUE, _RESULT, _TEXT):
                longer = [_QUESTION, _calling(1, "call_"), _result(0, "call_"), answer]
                form = replace(form, short_ids=not shows(form, longer, _NAME, _VALUE, _RESULT))
                two = [_QUESTION, _calling(2), _result(0), _result(1)]
                return replace(form, one_call=not shows(form, [*two, answer], f"{_NAME}1"))
    form = ChatForm(False, **common)
    return form if shows(form, [*called, answer], _RESULT) else replace(form, results=False)


def _with_reasoning_apart(message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer whose text begins with reasoning with the reasoning in a field, unless it has some there."""
    text = message.get("content")
    if not isinstance(text, str) or any(message.get(key) for key in REASONING_FIELDS):
        return message
    reasoning, end, answer = text.partition("</think>")
    begun = reasoning.lstrip().startswith("<think>")  # else the generation prompt has said it
    if not end or not (begun or reasoning.endswith("\n")):
        return message
    return {
        **message,
        "content": answer.lstrip(),
        REASONING_FIELDS[0]: reasoning.lstrip().removeprefix("<think>").strip(),
    }


def _calling(calls: int, kind: str = "") -> dict[str, Any]:
    functions = [{"name": f"{_NAME}{number}", "arguments": {"probe_key": _VALUE}} for number in range(calls)]
    made = [{"id": f"{kind}probeid0{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _result(number: int, kind: str = "") -> dict[str, Any]:
    called = f"{kind}probeid0{number}"
    return {"role": "tool", "tool_call_id": called, "name": f"{_NAME}{number}", "content": _RESULT}


def _call_text(call: dict[str, Any]) -> str:
    shown = {key: call["function"][key] for key in ("name", "arguments")}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each call of a message followed by its result: by its id, else in order."""
    shown: list[dict[str, Any]] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            shown.append(message)
            continue
        results = []
        while position < len(messages) and messages[position].get("role") == "tool":
            results.append(messages[position])
            position += 1
        ids = [call.get("id") for call in calls]
        for number, (call, call_id) in enumerate(zip(calls, ids, strict=True)):
            first = {**message, "tool_calls": [call]}
            later = {"role": message["role"], "content": "", "tool_calls": [call]}
            shown.append(later if number else first)
            fitting = [i for i, r in enumerate(results) if call_id is not None and r.get("tool_call_id") == call_id]
            if not fitting and results and results[0].get("tool_call_id") not in ids:
                fitting = [0]
            shown += [results.pop(index) for index in fitting[:1]]
        shown += results
    return shown


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids of nine letters and digits. A call without an id gets its number, a result without
    one that of the next call."""
    shown, waiting, count = list[dict[str, Any]](), list[str](), 0
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = [_short_id(call.get("id") or count + number) for number, call in enumerate(calls)]
            calls = [{**call, "id": call_id} for call, call_id in zip(calls, waiting, strict=True)]
            message, count = {**message, "tool_calls": calls}, count + len(calls)
        elif message.get("role") == "tool":
            call_id = message.get("tool_call_id")
            called = _short_id(call_id) if call_id else next(iter(waiting), _short_id(0))
            message, waiting = {**message, "tool_call_id": called}, [other for other in waiting if other != called]
        shown.append(message)
    return shown


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    return text if re.fullmatch("[A-Za-z0-9]{9}", text) else blake2b(text.encode(), digest_size=5).hexdigest()[:9]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with neighbours of one role as one, but results, each of which answers a call of its own."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        before = shown[-1] if shown else {}
        if before.get("role") == message["role"] != "tool" and not (
            before.get("tool_calls") or message.get("tool_calls")
        ):
            texts = [part for part in (before.get("content"), message.get("content")) if part]
            if any(isinstance(part, list) for part in texts):  # with images
                lists = [part if isinstance(part, list) else [{"type": "text", "text": part}] for part in texts]
                shown[-1] = {**before, **message, "content": [part for parts in lists for part in parts]}
            else:
                shown[-1] = {**before, **message, "content": "\n\n".join(texts)}
        else:
            shown.append(message)
    return shown
