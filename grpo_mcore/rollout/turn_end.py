"""Which token ends an answer: decided here, from the tokenizer and its chat template, for sampling, for the tokens
between two turns, for SFT and DPO, and for exports.

Most templates put a token behind an answer. It need not be the tokenizer's end of sequence: Gemma 3 has <end_of_turn>,
Phi <|end|>. GLM-4.5 puts none: there the token that begins the next turn ends the answer, such as <|user|>. Some put
another one behind the last answer than behind earlier ones: gpt-oss has <|return|> and <|end|>.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os.path import commonprefix
from typing import Any

_QUESTION, _ANSWER, _REPLY = "question", "@@answer@@", "@@reply@@"


@dataclass(frozen=True)
class TurnEnds:
    """The tokens that end an answer. `eos`: the tokenizer's end of sequence. `token`: the token that the template puts
    behind an answer, None if it puts none. `next`: in that case the tokens that begin the next turn, by its role, user
    or tool. `behind`: the text behind the last answer.
    """

    eos: int
    token: int | None = None
    next: Mapping[str, int] = field(default_factory=dict)
    behind: str = ""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that generation stops at."""
        return tuple(dict.fromkeys([self.eos, *([] if self.token is None else [self.token]), *self.next.values()]))

    def token_before(self, role: str) -> int:
        """Return the token that ends an answer before a message of `role`, where the template puts none behind it."""
        return self.next.get(role, next(iter(self.next.values()), self.eos))


def turn_ends(tokenizer: Any) -> TurnEnds:
    """Return the tokens that end an answer in the tokenizer's chat template. Without a template, and where it
    refuses a short conversation, that is the end of sequence alone."""
    template = getattr(tokenizer, "chat_template", None)
    return TurnEnds(tokenizer.eos_token_id) if template is None else _turn_ends(tokenizer, str(template))


@lru_cache(maxsize=4)
def _turn_ends(tokenizer: Any, chat_template: str) -> TurnEnds:
    eos, marks = tokenizer.eos_token_id, marks_of(tokenizer)
    last = _after_answer(tokenizer)
    behind = {role: after for role in ("user", "tool") if (after := _after_answer(tokenizer, role)) is not None}
    if last is None:
        return TurnEnds(eos)
    last_ids = _ids(tokenizer, last)
    followed = {role: _ids(tokenizer, after) for role, after in behind.items()}
    shared = len(commonprefix([last_ids, followed["user"]])) if "user" in followed else len(last_ids)
    ends = (id_ for i, id_ in enumerate(last_ids) if id_ in marks and (i < shared or id_ == eos))
    token = next(ends, None)
    if token is not None:
        return TurnEnds(eos, token, behind=last)
    begins = {role: ids[count - 1] for role, ids in followed.items() if (count := end_length(ids, last_ids, marks))}
    return TurnEnds(eos, next=begins, behind=last)


def marks_of(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that no text is split into: special tokens, and those that were added to the vocabulary.
    A custom tokenizer may list neither."""
    special, added = (getattr(tokenizer, name, ()) for name in ("all_special_ids", "added_tokens_decoder"))
    return frozenset([tokenizer.eos_token_id, *special, *added])


def end_length(followed: Sequence[int], last: Sequence[int], marks: frozenset[int]) -> int:
    """Return how many of `followed`, the tokens behind an answer that another message follows, end the answer: all up
    to the first mark in what they share with `last`, the tokens behind an answer that nothing follows, or right after
    that. 0 without such a mark."""
    shared = len(commonprefix([list(followed), list(last)]))
    return next((i + 1 for i, token in enumerate(followed[: shared + 1]) if token in marks), 0)


def said_already(
    followed: Sequence[int], last: Sequence[int], stop_token: int | None, marks: frozenset[int], eos: int | None
) -> int:
    """Return how many of `followed`, the tokens that the chat template puts behind an answer, the generated turn has
    already. `last`: what it puts there if nothing follows. `stop_token`: the token that ended the turn, None if none
    did."""
    if stop_token is None:
        return 0
    count = end_length(followed, last, marks)
    ended_otherwise = stop_token == eos and list(last[:1]) == [eos]  # such as <|return|> for <|end|>
    if count and (stop_token == followed[count - 1] or ended_otherwise):
        return count
    return int(bool(last) and list(followed[:1]) == list(last[:1]) == [stop_token])


def _after_answer(tokenizer: Any, role: str | None = None) -> str | None:
    """Return the text behind an answer, which a message of `role` follows, if given. None if the template does not show
    the answer once, or refuses the conversation."""
    shown = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    shown += [] if role is None else [{"role": role, "content": _REPLY}]
    try:
        text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=False)
    except Exception:  # a template is code of the model's author; TurnTemplate says so where several turns are needed
        return None
    return text.partition(_ANSWER)[2] if text.count(_ANSWER) == 1 else None


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
