"""The prompt that a dataset hands to the loop: `DatumSpec`, with its messages; and the fields of a row."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_mcore.rollout.trajectory import ImageSpan


class Message(TypedDict):
    """One message of a log. `content` is the text that was tokenised, chat template included."""

    role: str
    content: str
    token_ids: NotRequired[Tensor]
    """int64 [n]"""
    token_loss_mask: NotRequired[Tensor]
    """Examples only. int64 [n]: 1 where the token is trained on."""
    images: NotRequired[tuple[ImageSpan, ...]]
    """Where the tokens of images stand in `token_ids`."""


LLMMessageLogType = list[Message]


class DatumSpec(TypedDict):
    """One prompt, ready for a rollout (or one example, ready for supervised training)."""

    message_log: LLMMessageLogType
    length: int
    """Tokens of all messages."""
    extra_env_info: dict[str, Any]
    """Values for the environment, such as `ground_truth`, and the row's other fields."""
    loss_multiplier: float
    """0 marks a prompt that is too long or invalid. It is excluded from the batches and counted."""
    idx: int
    """Index in the dataset it was taken from."""
    task_name: str
    uid: str
    """Names the prompt for the whole run by its task and line or row, for example `data-train:17`."""
    rejected_log: NotRequired[LLMMessageLogType]
    """Pairs only. The prompt with the rejected answer; `message_log` has the chosen one, `length` counts both."""
    score: NotRequired[float]
    """Reward models only. What the answer is worth, or the margin by which the chosen one is better."""
    teacher_prompt: NotRequired[Tensor]
    """int64 [n]. The prompt as teachers get it, with the row's hint. Absent: as the policy does."""
    images: NotRequired[dict[str, bytes]]
    """Bytes of the images of all messages, as they were given, by digest (`families.images.image_digest`)."""
    stop_strings: NotRequired[list[str] | None]
    """Strings that end a generation, besides the recipe's; an environment may change them for later turns."""


def field_of(row: dict[str, Any], key: str) -> Any:
    """Return the value of a field, None where there is none. Dots lead into records and lists, also those that are JSON
    text, unless a field has that very name: `reward_model.ground_truth`, `answers.0`."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if isinstance(value, str) and value[:1] in ("{", "["):
            value = _from_json(value)
        if isinstance(value, dict):
            value = value.get(part)
        else:
            value = value[int(part)] if isinstance(value, list) and part.isdigit() and int(part) < len(value) else None
    return value


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
