"""An environment of your own with a tool: the policy may ask a calculator before it answers.

A turn of the policy is either a call or an answer:

    prompt   7*8=
    policy   7*8?       a call: what comes before the "?" is computed
    tool     56
    policy   56         an answer: the conversation ends, reward 1 if it is right

A call that is not arithmetic is answered with "?", and the conversation goes on. recipe.yaml beside this file names the
class by its import path. `make_task.py` makes the model and the data, and sft.yaml teaches the model both habits, to
call and to guess; GRPO finds out which of the two pays. The commands are at the top of recipe.yaml.

What it is not: a safe way to run what a model writes. This calculator reads two numbers and an operator and computes
nothing else; programs belong into the sandbox of the environment `code`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn

CALL = "?"
"""Ends a call. The recipe has it as a stop string, so that a turn ends there."""

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_EXPRESSION = re.compile(r"(\d{1,4})([-+*])(\d{1,4})")


def calculate(expression: str) -> str:
    """Return the value of "a+b", "a-b" or "a*b", or "?" for any other expression."""
    match = _EXPRESSION.fullmatch(expression.strip())
    return CALL if match is None else str(_OPERATIONS[match[2]](int(match[1]), int(match[3])))


class Calculator(EnvironmentInterface):
    """Reward 1 for the right answer, whether or not the calculator was called."""

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        """Answer the last turn of each conversation. `metadata` has the fields of each prompt's row."""
        said = [str(messages[-1]["content"]).strip() for messages in message_log_batch]
        calls = [text.endswith(CALL) for text in said]
        right = [text == str(fields["ground_truth"]) for text, fields in zip(said, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[
                {"role": "tool", "content": calculate(text.removesuffix(CALL)) if call else ""}
                for text, call in zip(said, calls, strict=True)
            ],
            metadata=list(metadata),
            next_stop_strings=[[CALL]] * len(said),
            rewards=[float(correct and not call) for correct, call in zip(right, calls, strict=True)],
            terminateds=[not call for call in calls],
            answers=[None if call else text for text, call in zip(said, calls, strict=True)],
            reasons=[
                "called the calculator" if call else "right" if correct else f"wrong: {fields['ground_truth']}"
                for call, correct, fields in zip(calls, right, metadata, strict=True)
            ],
        )
