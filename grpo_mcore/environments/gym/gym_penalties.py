"""Checks of the form of a NeMo Gym rollout: which faults make its reward 0, and which messages are flagged for an
advantage of their own. Both look at what the policy wrote, not at the score of the Gym's verifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from grpo_mcore.rollout.messages import content_text, read_content
from grpo_mcore.rollout.trajectory import INVALID_TOOL_CALL, MALFORMED_THINKING

TOOL_CALL_MARKS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
THOUGHT_MARKS = ("<think>", "</think>")


class PenaltyTokens(BaseModel):
    """`reward_penalties.token_ids`."""

    model_config = ConfigDict(extra="forbid")

    unwanted: list[int] | None = None
    """Tokens that a rollout must not generate. null: none."""
    think_open: int | None = None
    """Token that opens the reasoning. null: that of env.nemo_gym.thinking_tags, if each of them is one token of the
    policy's tokenizer; otherwise only the text is checked."""
    think_close: int | None = None
    """Token that closes the reasoning."""


class RewardPenalties(BaseModel):
    """`reward_penalties`: conditions under which the reward of a Gym's rollout becomes 0."""

    model_config = ConfigDict(extra="forbid")

    penalize_duplicated_reasoning: bool = False
    """Whether a message that repeats the reasoning right before it costs the reward."""
    penalize_empty_final_answer: bool = False
    """Whether a rollout that ends with neither text nor a tool call loses its reward."""
    penalize_unwanted_tokens: bool = False
    """Whether generating a token of token_ids.unwanted costs the reward."""
    penalize_malformed_think_tag: bool = False
    """Whether malformed reasoning costs the reward: the policy opens it, or does not close it exactly once after a
    prompt that opens it, or a message has a mark of reasoning in its text."""
    token_ids: PenaltyTokens = PenaltyTokens()

    @field_validator("token_ids", mode="before")
    @classmethod
    def _null_is_the_default(cls, value: Any) -> Any:
        return PenaltyTokens() if value is None else value

    @model_validator(mode="after")
    def _has_its_tokens(self) -> RewardPenalties:
        if self.penalize_unwanted_tokens and not self.token_ids.unwanted:
            raise ValueError("penalize_unwanted_tokens needs token_ids.unwanted")
        return self

    def with_thought_tokens(self, tokenizer: Any, marks: Sequence[str]) -> RewardPenalties:
        """Return the penalties with the tokens of the `marks` around the reasoning, if they are needed, none is set,
        and each mark is one token. `tokenizer`: a tokenizer of transformers."""
        tokens = self.token_ids
        if not self.penalize_malformed_think_tag or (tokens.think_open, tokens.think_close) != (None, None):
            return self
        ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in marks]
        if len(ids) != 2 or any(len(tokens_of_mark) != 1 for tokens_of_mark in ids):
            return self
        update = {"think_open": ids[0][0], "think_close": ids[1][0]}
        return self.model_copy(update={"token_ids": tokens.model_copy(update=update)})

    def broken(
        self, output: Sequence[Any], calls: Sequence[tuple[Sequence[int], Sequence[int]]], marks: Sequence[str]
    ) -> list[str]:
        """Return the conditions that a rollout meets, in words. `output`: items of the response; `calls`: (prompt,
        generated tokens) of each call; `marks`: those around the reasoning."""
        items = [item for item in output if isinstance(item, dict)]
        tokens = self.token_ids
        checks = (
            (self.penalize_duplicated_reasoning, "duplicated reasoning", lambda: _repeats_its_reasoning(items)),
            (self.penalize_empty_final_answer, "empty final answer", lambda: _has_no_end(items)),
            (
                self.penalize_unwanted_tokens,
                "unwanted tokens",
                lambda: any(set(tokens.unwanted or ()) & set(generated) for _, generated in calls),
            ),
            (
                self.penalize_malformed_think_tag,
                "malformed thought",
                lambda: (
                    any(mark in _message(item) for item in items for mark in marks)
                    or any(not _closes_its_reasoning(*call, tokens) for call in calls)
                ),
            ),
        )
        return [name for is_on, name, met in checks if is_on and met()]


def flag_of(messages: Sequence[str], tool_marks: Sequence[str], thought_marks: Sequence[str]) -> str:
    """Return what is wrong with the messages of one call: a tool call that was left in the text, or a mark of reasoning
    in it; "" if nothing is."""
    for marks, flag in ((tool_marks, INVALID_TOOL_CALL), (thought_marks, MALFORMED_THINKING)):
        if any(mark in text for mark in marks for text in messages):
            return flag
    return ""


def text_of(content: Any) -> str:
    """Return the text of an item's content, read as at every entrance. Raises MessageError if it is malformed."""
    return content_text(read_content(content, "an item of the output", keeps_media=True).value)


def _message(item: Mapping[str, Any]) -> str:
    is_message = item.get("type", "message") == "message" and item.get("role", "assistant") == "assistant"
    return text_of(item.get("content")) if is_message else ""


def _repeats_its_reasoning(items: Sequence[Mapping[str, Any]]) -> bool:
    for item, after in zip(items, items[1:], strict=False):
        reasoning = text_of(item.get("summary") or item.get("content")) if item.get("type") == "reasoning" else ""
        if reasoning.strip() and reasoning.strip() == _message(after).strip():
            return True
    return False


def _has_no_end(items: Sequence[Mapping[str, Any]]) -> bool:
    if items and items[-1].get("type") == "function_call":
        return False
    messages = [_message(item) for item in items if item.get("type", "message") == "message"]
    return not messages or not messages[-1].strip()


def _closes_its_reasoning(prompt: Sequence[int], generated: Sequence[int], tokens: PenaltyTokens) -> bool:
    if tokens.think_open is None or tokens.think_close is None:
        return True
    count = [
        (list(side).count(tokens.think_open), list(side).count(tokens.think_close)) for side in (prompt, generated)
    ]
    (opened, closed), written = count
    return 0 <= opened - closed <= 1 and written == (0, opened - closed)
