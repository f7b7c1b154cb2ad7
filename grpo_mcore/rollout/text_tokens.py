"""The tokens of a text that stands behind another one, and the text of tokens that were generated.

The tokenizers of Llama 2, Mistral and Mixtral put a space before every text. A text that is tokenised by itself and
goes on with another one must not have it: no answer that is generated begins with it.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from grpo_mcore.rollout.turn_end import marks_of

_LINES = ("\n", ">", "a")  # texts that a text can stand behind
_OF_A_CALL = re.compile(r"tool.?(?:call|sep)|python_tag|^\[(?:ARGS|CALL_ID)\]$", re.IGNORECASE)


def tokens_behind(tokenizer: Any, before: str, text: str, **options: Any) -> list[int]:
    """Return the tokens of `text`, which stands behind `before`. The tokenizer adds no special tokens; `options` are
    its further arguments."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, **options)["input_ids"])

    if not before or not _adds_a_space(tokenizer):
        return encode(text)
    marks = tokenizer.convert_ids_to_tokens(sorted(marks_of(tokenizer)))
    mark = next((mark for mark in sorted(marks, key=len, reverse=True) if before.endswith(mark)), None)
    for beginning in _LINES if mark is None else (mark,):
        first, both = encode(beginning), encode(beginning + text)
        if both[: len(first)] == first:
            return both[len(first) :]
    return encode(text)


@lru_cache(maxsize=4)
def _adds_a_space(tokenizer: Any) -> bool:
    """Return whether a text has other tokens by itself than behind another one."""
    try:
        line, letter, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\n", "a", "\na"))
    except Exception:  # a tokenizer of a few words raises for others
        return False
    return [*line, *letter] != [*both]


def text_of(tokenizer: Any, ids: Sequence[int], decoded: str = "") -> str:
    """Return the text of generated tokens, without the special tokens that frame a turn. Those that mark a part of it
    stay: recipes that add <think>, </think> and <answer> as special tokens reward the form that they give, and a tool
    of a custom environment looks for the mark of a call, such as Mistral's [TOOL_CALLS]. `decoded` is the text
    without any of them, if it is known."""
    left_out, marks = _special_ids(tokenizer)
    if marks.isdisjoint(ids):
        return decoded or str(tokenizer.decode(ids, skip_special_tokens=True))
    return str(tokenizer.decode([token for token in ids if token not in left_out], skip_special_tokens=False))


@lru_cache(maxsize=4)
def special_tokens(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: number for number, token in added.items() if token.special}


@lru_cache(maxsize=4)
def _special_ids(tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Return the special tokens without and with those that mark a part of an answer: calls, and those that come in
    pairs, such as <think> and </think>."""
    special = special_tokens(tokenizer)
    marks = {number for token, number in special.items() if _OF_A_CALL.search(token)}
    for closing in special:
        name = re.fullmatch(r"(?:</([A-Za-z][\w:.-]+)>|\[/(THINK)\])", closing)
        opening = closing.replace("/", "", 1)
        if name is not None and opening in special:
            marks |= {special[opening], special[closing]}
    return frozenset(special.values()) - marks, frozenset(marks)
