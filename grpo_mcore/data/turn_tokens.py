"""What an environment says between two generated turns, as tokens, in the words of the chat template.

Nothing that was generated is rendered or tokenised again. The template is shown placeholders and says what stands
between an answer and the next generation: the answer's end, the environment's message, the generation prompt.
"""

from __future__ import annotations

from os.path import commonprefix
from typing import Any

import torch

from grpo_mcore.data.interfaces import DataError
from grpo_mcore.rollout.exact_tokens import said_already
from grpo_mcore.rollout.trajectory import Turn

_QUESTION, _ANSWER, _SAID = "question", "@@answer@@", "@@said@@"


class TurnTemplate:
    """Makes the environment's turns for one tokenizer.

    Raises DataError where the chat template does not show a message after an answer, each once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        between = self._after_answer(_check(self._render(_message("user", _SAID))))
        self._has_tool_role = self._knows_tools()
        # How an answer ends, whatever follows. Where the policy has said its end marker, it is not said twice.
        self._end = self._ids(commonprefix([between, self._after_answer(self._render())]))

    def turn(self, text: str, role: str = "user", stop_token: int | None = None) -> Turn:
        """The environment's message `text`, and all that the template puts around it.

        `role`: `tool` where the template has it, else `user`. `stop_token`: the token that ended the generated turn
        before, if one did. `Turn.text` has the answer's end marker even where `token_ids` leave it to that turn.
        """
        role = "tool" if role == "tool" and self._has_tool_role else "user"
        between = self._after_answer(self._render(_message(role, text)))
        ids = self._ids(between)
        said = said_already(ids, self._end, stop_token, self._tokenizer.eos_token_id)
        return Turn(role, torch.tensor(ids[said:], dtype=torch.int64), text=between)

    def _render(self, *after: dict[str, str]) -> str:
        shown = [_message("user", _QUESTION), _message("assistant", _ANSWER), *after]
        try:
            return self._tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=bool(after))
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            raise DataError(
                "grpo.max_rollout_turns above 1: the chat template refuses a conversation of several turns: "
                f"{type(error).__name__}: {error}; set another policy.tokenizer.chat_template"
            ) from error

    @staticmethod
    def _after_answer(rendered: str) -> str:
        return rendered.partition(_ANSWER)[2]

    def _knows_tools(self) -> bool:
        """Whether the template has words for what a tool says, and accepts it without a call before."""
        source = str(self._tokenizer.chat_template)
        if "'tool'" not in source and '"tool"' not in source:
            return False
        try:
            _check(self._render(_message("tool", _SAID)))
        except DataError:
            return False
        return True

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _check(rendered: str) -> str:
    for what, placeholder in (("an earlier answer", _ANSWER), ("the message after it", _SAID)):
        count = rendered.count(placeholder)
        if count != 1:
            raise DataError(
                f"grpo.max_rollout_turns above 1: the chat template shows {what} {count} times instead of once; "
                "set another policy.tokenizer.chat_template"
            )
    if rendered.index(_SAID) < rendered.index(_ANSWER):
        raise DataError(
            "grpo.max_rollout_turns above 1: the chat template shows an answer after the message that follows it; "
            "set another policy.tokenizer.chat_template"
        )
    return rendered


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
