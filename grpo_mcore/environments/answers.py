r"""The answer of a response: what stands behind its reasoning, and in `<answer>` where there is one.

Reasoning ends with its closing mark, `</think>` and its like, or with Harmony's final channel. It may begin in the
prompt: chat templates of reasoning models write the opening mark. A response whose reasoning is not closed has no
answer. An environment's key `thoughts` chooses other marks, or none.

Imports stay light here: verifier processes import this module.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

Thoughts = Literal["auto", "none"] | tuple[str, str]
"""`auto`: the marks below; `none`: the whole response is the answer; or the two marks around the reasoning."""

UNFINISHED = "no answer: the reasoning is not closed"

_NAMES = "think|thinking|thought|thoughts|reasoning|seed:think|scratchpad"
_OPEN = re.compile(rf"<(?:{_NAMES})>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|begin_of_thought\|>", re.IGNORECASE)
_CLOSE = re.compile(rf"</(?:{_NAMES})>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<\|end_of_thought\|>", re.IGNORECASE)

_CHANNEL = "<|channel|>"
_FINAL = re.compile(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_END_OF_MESSAGE = re.compile(r"<\|(?:end|return|start|call)\|>")
# Harmony's messages as text without the special tokens, which engines leave out.
_PLAIN_ANALYSIS = re.compile(r"\s*analysis", re.IGNORECASE)
_PLAIN_FINAL = "assistantfinal"

_ANSWER = re.compile(
    r"(?:<answer>|<\|begin_of_solution\|>)(.*?)(?:</answer>|<\|end_of_solution\|>|\Z)", re.DOTALL | re.IGNORECASE
)


class Parts(NamedTuple):
    """A response in two parts. `answer` is None where the reasoning is not closed."""

    reasoning: str
    answer: str | None


def split_response(response: str, thoughts: Thoughts = "auto", prompt: str = "") -> Parts:
    """Return the reasoning and the answer of one message. `prompt`, the text before it, may open the reasoning."""
    return split_messages([{"role": "user", "content": prompt}, {"role": "assistant", "content": response}], thoughts)


def split_messages(messages: Sequence[Mapping[str, Any]], thoughts: Thoughts = "auto") -> Parts:
    """Return the reasoning and the answer of a conversation: of the messages that are marked as generated, else of the
    assistant's. Each turn has its own reasoning; there is an answer where the last turn's reasoning is closed."""
    marked = any(message.get("generated") for message in messages)
    before, turns = "", []
    for is_generated, run in itertools.groupby(
        messages, lambda message: bool(message.get("generated") if marked else message["role"] == "assistant")
    ):
        text = "".join(str(message["content"]) for message in run)
        if is_generated:
            turns.append(Parts("", text) if thoughts == "none" else _split_turn(text, thoughts, before))
        before = text
    reasoning = "".join(turn.reasoning for turn in turns)
    if turns and turns[-1].answer is None:
        return Parts(reasoning, None)
    answer = "".join(turn.answer or "" for turn in turns)
    inside = _ANSWER.findall(answer) if thoughts != "none" else []
    return Parts(reasoning, inside[-1].strip() if inside else answer)


def _split_turn(response: str, thoughts: Thoughts, prompt: str) -> Parts:
    opening, closing = _OPEN, _CLOSE
    if isinstance(thoughts, tuple):
        opening, closing = (re.compile(re.escape(mark)) for mark in thoughts)
    elif _CHANNEL in response:
        finals = list(_FINAL.finditer(response))
        if not finals:
            return Parts(response, None)
        end = finals[-1].end()
        return Parts(response[:end], _END_OF_MESSAGE.split(response[end:], maxsplit=1)[0])
    elif _PLAIN_ANALYSIS.match(response):
        reasoning, mark, answer = response.rpartition(_PLAIN_FINAL)
        if mark or prompt.rstrip().endswith("<|start|>assistant"):
            return Parts(reasoning, answer) if mark else Parts(response, None)
    closed = list(closing.finditer(response))
    end = closed[-1].end() if closed else 0
    is_open_in_prompt = any(not prompt[mark.end() :].strip() for mark in opening.finditer(prompt))
    if opening.search(response, end) or is_open_in_prompt and not closed:
        return Parts(response, None)
    return Parts(response[:end], response[end:].lstrip() if end else response)
