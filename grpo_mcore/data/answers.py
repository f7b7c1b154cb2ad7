"""Find the answers of a conversation in the text that the chat template makes of it.

An answer begins where a generation would begin, and its end belongs to it. A template may show an earlier answer
otherwise than it was generated: Qwen3 and DeepSeek leave out its reasoning, gpt-oss ends it by another token. Such a
place is found by putting a mark into the answer and seeing where it appears.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.turn_tokens import answer_end, first_mark
from grpo_mcore.rollout.messages import REASONING_FIELDS
from grpo_mcore.rollout.turn_end import turn_ends

Chat = Sequence[dict[str, Any]]
Render = Callable[[Chat, bool], str]
"""(messages, whether with generation prompt) -> text. Raises DataError where the template rejects them."""

_MARK = "@@answer@@"
_END_OF_REASONING = "</think>"

log = logging.getLogger(__name__)


def trained_spans(
    render: Render, messages: Chat, answers: Sequence[int], tokenizer: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation up to the last of `answers`, and where each of them begins and ends in it, in
    their order. `answers`: positions of the assistant's messages that are trained on, ascending.

    Raises DataError for an answer without a prompt, and where the template does not show an answer or its place.
    """
    question = next((i for i, message in enumerate(messages) if message["role"] not in ("assistant", "system")), None)
    if len(answers) > 1 and question is not None:  # a greeting is no answer
        answers = [index for index in answers if index > question] or answers
    behind = turn_ends(tokenizer).behind
    if (mark := first_mark(behind, tokenizer)) is not None and behind.partition(mark)[2].strip():
        raise DataError(f"the chat template begins another turn behind the last answer: {behind!r}")
    if answers[0] == 0:
        raise DataError("it begins with an answer, so there is no prompt to answer")
    shown = messages[: answers[-1] + 1]
    conversation = _Conversation(render, shown, tokenizer)
    spans: list[tuple[int, int]] = []
    for index in answers:
        start, stop = conversation.span(index, spans[-1][1] if spans else 0)
        missing = _not_shown(messages[index], conversation.text[start:stop])
        if missing is not None:
            raise DataError(f"the chat template does not show {missing} of message {index}")
        spans.append((start, stop))
    if _reasoning(messages[answers[-1]]) not in "".join(conversation.text[slice(*spans[-1])].split()):
        warn_of_reasoning_left_out(str(tokenizer.chat_template))
    return conversation.text, spans


class _Conversation:
    """`text` is the conversation as the template shows it, with the end of its last message, an answer."""

    def __init__(self, render: Render, messages: Chat, tokenizer: Any) -> None:
        self._render, self._messages, self._tokenizer = render, list(messages), tokenizer
        self._special = tuple(mark for mark in tokenizer.all_special_tokens if mark)
        self.text = self._ended(self._messages)

    def span(self, index: int, after: int) -> tuple[int, int]:
        """Return where the answer at `index` begins and ends, both behind `after`."""
        start = self._start(index, after)
        stop = len(self.text) if index == len(self._messages) - 1 else self._stop(index, start)
        if not after <= start < stop:
            raise DataError(f"the chat template does not show where the answer of message {index} begins and ends")
        return start, stop

    def _ended(self, messages: Chat) -> str:
        """Return a conversation that ends with an answer, with its end: where the template puts no special token behind
        it, what ends an answer elsewhere."""
        text = self._render(messages, False)
        end = answer_end(self._tokenizer, "tool" if messages[-1].get("tool_calls") else "user")
        if text.endswith(end) or text.rstrip().endswith(self._special):
            return text
        behind = turn_ends(self._tokenizer).behind  # it may be text, without a special token
        return text + (end.removeprefix(behind) if text.endswith(behind) else end)

    def _start(self, index: int, after: int) -> int:
        try:
            prompt = self._render(self._messages[:index], True)
        except DataError:  # it takes the conversation only as a whole
            prompt = ""
        if prompt and self.text.startswith(prompt):
            return len(prompt)
        # The template shows earlier turns differently now, or an answer without the reasoning that its prompt begins.
        bound = self._begin_of_text(index)
        after = max(after, self._end_of_text(index - 1))
        for header in _headers(self._tokenizer, str(self._tokenizer.chat_template)):
            position = self.text.rfind(header, after, bound)
            if position >= 0:
                return position + len(header)
        mark = first_mark(self.text[after:bound], self._tokenizer)  # DeepSeek goes on right after a tool's result
        if mark is None:
            raise DataError(f"the chat template does not show where the answer of message {index} begins")
        return self.text.index(mark, after) + len(mark)

    def _stop(self, index: int, start: int) -> int:
        messages = self._messages[: index + 1]
        alone = self._ended(messages)
        if start < len(alone) and self.text.startswith(alone):
            return len(alone)
        text_end = self._end_of_text(index)
        marked = self._ended([*messages[:-1], _marked_behind(messages[-1])])
        tail = alone[_end_of_marked(marked, alone, self._special) :]
        if self.text.startswith(tail, text_end):
            return text_end + len(tail)
        behind = self.text[text_end : self._begin_of_text(index + 1)]
        places = [(behind.index(mark), -len(mark), mark) for mark in self._special if mark in behind]
        if not places:
            raise DataError(
                f"the chat template puts no end behind the answer of message {index}: no token of the tokenizer "
                f"ends it ({behind.strip()!r:.60}); train_on: last leaves earlier answers out"
            )
        start_of_mark, _, mark = min(places)  # an answer in the middle ends otherwise, as in gpt-oss
        return text_end + start_of_mark + len(mark)

    def _begin_of_text(self, index: int) -> int:
        """Return where a message begins: its reasoning, its text, or else the name of its first call."""
        shown = self._with(index, _marked_before)
        if _MARK not in shown and self._messages[index].get("tool_calls"):  # it leaves out the text beside a call
            shown = self._with(index, _marked_name)
        if _MARK not in shown:
            raise DataError(f"the chat template does not show message {index}")
        return _alike(shown.partition(_MARK)[0], self.text)

    def _end_of_text(self, index: int) -> int:
        return _end_of_marked(self._with(index, _marked_behind), self.text, self._special)

    def _with(self, index: int, marked: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
        """Return the conversation with a mark in one message."""
        return self._ended([*self._messages[:index], marked(self._messages[index]), *self._messages[index + 1 :]])


def _end_of_marked(marked: str, text: str, special: Sequence[str]) -> int:
    """Return where in `text` the message ends that has the mark at its end in `marked`."""
    behind = marked.rpartition(_MARK)[2]
    same = _alike(behind[::-1], text[::-1])
    closing = behind[: len(behind) - same]  # a quotation mark of an argument, say
    if _MARK not in marked or any(mark in closing for mark in special):
        raise DataError("the chat template shows what follows a message differently for another text of it")
    return len(text) - same


def _alike(text: str, other: str) -> int:
    """Return the number of characters with which both begin."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[low:middle] == other[low:middle] else (low, middle - 1)
    return low


@lru_cache(maxsize=4)
def _headers(tokenizer: Any, chat_template: str) -> list[str]:
    """Return what the generation prompt adds to a conversation, then its beginnings, the longest first: whole marks and
    lines."""
    question = [{"role": "user", "content": "question"}]
    with_prompt, without = (
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=prompt)
        for prompt in (True, False)
    )
    whole = with_prompt.removeprefix(without)
    ends = [part.end() for part in re.finditer(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|[^<>\[\]\s]+|.", whole)]
    return [whole[:end] for end in reversed(ends) if whole[:end].strip()]


def _marked_before(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with marks where its reasoning begins, and its text, or else the name of its first call."""
    marked, text = dict(message), message.get("content") or ""
    if _END_OF_REASONING in text:
        reasoning, _, answer = text.rpartition(_END_OF_REASONING)
        before, begin, thinking = reasoning.partition("<think>") if "<think>" in reasoning else ("", "", reasoning)
        marked["content"] = f"{before}{begin}{_MARK}{thinking}{_END_OF_REASONING}{_MARK}{answer}"
    elif text or not message.get("tool_calls"):
        marked["content"] = _MARK + text
    else:
        marked = _marked_name(message)
    for field in REASONING_FIELDS:
        marked |= {field: _MARK + message[field]} if message.get(field) else {}
    return marked


def _marked_name(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with a mark at the name of its first call."""
    call, *others = message["tool_calls"]
    function = call.get("function", call)
    marked = {**function, "name": f"{_MARK}{function.get('name')}"}
    return {**message, "tool_calls": [{**call, "function": marked} if "function" in call else marked, *others]}


def _marked_behind(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with a mark at its end: behind its text, or in the last argument of its last call."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": (message.get("content") or "").rstrip() + _MARK}
    function = calls[-1].get("function", calls[-1])
    marked = {**function, "arguments": _marked_arguments(function.get("arguments"))}
    last = {**calls[-1], "function": marked} if "function" in calls[-1] else marked
    return {**message, "tool_calls": [*calls[:-1], last]}


def _marked_arguments(arguments: Any) -> Any:
    if isinstance(arguments, dict):
        name, value = next(reversed(arguments.items()), ("argument", ""))
        return {**arguments, name: (value if isinstance(value, str) else json.dumps(value)) + _MARK}
    text = str(arguments or "{}").rstrip()
    closing = '"}' if text.endswith('"}') else text[-1:]
    return text.removesuffix(closing) + _MARK + closing


def _reasoning(message: dict[str, Any]) -> str:
    """Return a message's reasoning without white space."""
    fields = (message.get(field) for field in REASONING_FIELDS)
    text = next((field for field in fields if field), None)
    return "".join(
        (text or (message.get("content") or "").rpartition(_END_OF_REASONING)[0].rpartition("<think>")[2]).split()
    )


@lru_cache(maxsize=4)
def warn_of_reasoning_left_out(chat_template: str) -> None:  # once
    log.warning(
        "the chat template leaves out the reasoning of answers that are trained on: the policy learns to answer without"
    )


def _not_shown(message: dict[str, Any], span: str) -> str | None:
    """Return what of a message its span in the text lacks, in words; None if nothing. White space does not count, nor
    reasoning and the text beside calls, which templates leave out by design (gpt-oss shows it as reasoning)."""
    shown = "".join(span.split())
    calls = message.get("tool_calls") or ()
    for call in calls:
        name = call.get("function", call).get("name") if isinstance(call, dict) else None
        if isinstance(name, str) and "".join(name.split()) not in shown:
            return f"the call of {name!r}"
    text = "".join((message.get("content") or "").rpartition(_END_OF_REASONING)[2].split())
    return None if calls or text.removeprefix("<think>") in shown else "the text"
