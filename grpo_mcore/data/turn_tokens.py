"""Tokenisation of an environment's message between two generated turns, according to the chat template, and
the ends of answers that are trained on.

Generated text is never rendered or tokenised again. The template is rendered with placeholders to find the text between
an answer and the next generation: the answer's end, the environment's message, the generation prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpo_mcore.data.interfaces import DataError
from grpo_mcore.rollout.images import ImageReader, take_images
from grpo_mcore.rollout.text_tokens import tokens_behind
from grpo_mcore.rollout.turn_end import marks_of, said_already, turn_ends

if TYPE_CHECKING:
    from grpo_mcore.rollout.trajectory import ImageSpan, Turn

_QUESTION, _ANSWER, _REPLY = "question", "@@answer@@", "@@reply@@"


def answer_end(tokenizer: Any, next_role: str = "user") -> str:
    """Return the text that ends an answer, to be trained on: what the template puts behind it; where that has no
    special token (GLM), also the one that begins the next turn, of `next_role` (user or tool), which ends a turn there;
    else the tokenizer's end-of-sequence token."""
    ends = turn_ends(tokenizer)
    if ends.token is not None:
        return ends.behind
    return ends.behind + tokenizer.convert_ids_to_tokens(ends.token_before(next_role))


def first_mark(text: str, tokenizer: Any) -> str | None:
    """Return the first special token in a text, None if there is none."""
    marks = {*tokenizer.all_special_tokens, *(token.content for token in tokenizer.added_tokens_decoder.values())}
    places = [(text.index(mark), -len(mark), mark) for mark in marks if mark and mark in text]
    return min(places)[2] if places else None


def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of the special tokens. Others that were added to the vocabulary, such as <think> of Qwen 3, are
    ordinary text that a model may be shown and may write."""
    added = (token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special)
    return tuple(mark for mark in {*getattr(tokenizer, "all_special_tokens", ()), *added} if mark)


def marks_of_a_question(tokenizer: Any) -> tuple[str, ...]:
    """Return the special tokens that the chat template writes around a question: role markers and ends of turns, not
    the beginning of the text, which may be HTML (<s>). None where it refuses a question alone."""
    return _marks_of_a_question(tokenizer, str(getattr(tokenizer, "chat_template", None)))


@lru_cache(maxsize=4)
def _marks_of_a_question(tokenizer: Any, chat_template: str) -> tuple[str, ...]:
    messages = [{"role": "user", "content": _QUESTION}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is code of the model's author
        return ()
    special = {*special_texts(tokenizer)} - {getattr(tokenizer, "bos_token", None)}
    return tuple(sorted(mark for mark in special if mark and mark in text))


class TurnTemplate:
    """Makes the environment's turns for one tokenizer.

    Raises DataError where the chat template does not show an answer and the message after it exactly once each.
    """

    def __init__(
        self, tokenizer: Any, images: ImageReader | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        """`images`: what prompts need of the model's images. None: a message with one is refused. `variables`: a row's
        `chat_template_kwargs`."""
        self._tokenizer, self._images, self._variables = tokenizer, images, variables or {}
        _check(self._render(_message("user", _REPLY)))
        self._has_tool_role = self._supports_tool_role()
        self._marks = marks_of(tokenizer)
        self._special = special_texts(tokenizer)
        self._last = self._ids(self._after_answer(self._render()))

    def turn(self, content: str | list[Any], role: str = "user", stop_token: int | None = None) -> Turn:
        """Return the environment's message, a text or its parts with images, as a turn, with everything that the
        template puts around it. The end of the answer before is not repeated where the policy has generated it. Raises
        ValueError for an image that the model cannot read.

        The text of a special token in it stays text: what an environment says, a policy can influence. The role `tool`
        becomes `user` where the template lacks it. `stop_token` is the token that ended the generated
        turn before, if any. `Turn.text` has the answer's end marker even where that turn's tokens hold it.
        """
        role = "tool" if role == "tool" and self._has_tool_role else "user"
        (message,), images = take_images([{"role": role, "content": content}])
        # A text with the text of a special token is rendered by a stand-in, and stays text.
        texts = [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
        stand_ins = {
            f"@@{number}{_REPLY}": text
            for number, text in enumerate(texts)
            if any(mark in text for mark in self._special)
        }
        by_text = {text: stand_in for stand_in, text in stand_ins.items()}
        if isinstance(content, str):
            message["content"] = by_text.get(content, content)
        for part in message["content"] if isinstance(content, list) else ():
            if "text" in part:
                part["text"] = by_text.get(part["text"], part["text"])
        rendered = self._after_answer(self._render(message))
        pieces = re.split(f"({'|'.join(stand_ins)})", rendered) if stand_ins else [rendered]
        ids, before, between = list[int](), _ANSWER, ""
        for piece in pieces:
            shown = stand_ins.get(piece, piece)
            ids += self._ids(shown, before, special=piece not in stand_ins) if shown else []
            before, between = shown or before, between + shown
        ids = ids[said_already(ids, self._last, stop_token, self._marks, self._tokenizer.eos_token_id) :]
        spans: tuple[ImageSpan, ...] = ()
        if images and self._images is None:
            raise ValueError("it has an image, and the recipe has no prompts with images")
        if self._images is not None:
            [(ids, spans)] = self._images.expand([ids], images)
        import torch  # heavy, and not needed where rows are only checked

        from grpo_mcore.rollout.trajectory import Turn

        return Turn(role, torch.tensor(ids, dtype=torch.int64), text=between, images=spans)

    def _render(self, *after: dict[str, str]) -> str:
        shown = [_message("user", _QUESTION), _message("assistant", _ANSWER), *after]
        try:
            return self._tokenizer.apply_chat_template(
                shown, tokenize=False, add_generation_prompt=bool(after), **self._variables
            )
        except Exception as error:  # a template is code of the model's author and may raise anything
            raise DataError(
                "grpo.max_rollout_turns above 1: the chat template rejects a conversation of several turns: "
                f"{type(error).__name__}: {error}; set another policy.tokenizer.chat_template"
            ) from error

    @staticmethod
    def _after_answer(rendered: str) -> str:
        return rendered.partition(_ANSWER)[2]

    def _supports_tool_role(self) -> bool:
        """Return whether the template has the role `tool` and accepts it without a call before."""
        source = str(self._tokenizer.chat_template)
        if "'tool'" not in source and '"tool"' not in source:
            return False
        try:
            _check(self._render(_message("tool", _REPLY)))
        except DataError:
            return False
        return True

    def _ids(self, text: str, before: str = _ANSWER, *, special: bool = True) -> list[int]:
        """Return the tokens of a text behind another one; without `special`, those of its characters alone."""
        options = {} if special else {"split_special_tokens": True}
        return tokens_behind(self._tokenizer, before, text, **options)


def _check(rendered: str) -> str:
    for part, placeholder in (("an earlier answer", _ANSWER), ("the message after it", _REPLY)):
        count = rendered.count(placeholder)
        if count != 1:
            raise DataError(
                f"grpo.max_rollout_turns above 1: the chat template shows {part} {count} times instead of once; "
                "set another policy.tokenizer.chat_template"
            )
    if rendered.index(_REPLY) < rendered.index(_ANSWER):
        raise DataError(
            "grpo.max_rollout_turns above 1: the chat template shows an answer after the message that follows it; "
            "set another policy.tokenizer.chat_template"
        )
    return rendered


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
