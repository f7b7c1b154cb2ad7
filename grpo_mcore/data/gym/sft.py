"""Conversion of rollouts to demonstrations for SFT: {"messages", "tools"} or {"input", "output"}."""

from pathlib import Path
from typing import Any

from grpo_mcore.data.gym.grpo import NO_ANSWER, prompt_of
from grpo_mcore.data.gym.rollout import (
    ROUNDING,
    Filtered,
    Rollout,
    check_usable,
    encode,
    final_text,
    input_items,
    is_plain,
    output_items,
)
from grpo_mcore.data.gym.run import transformation
from grpo_mcore.data.gym.summary import Summary
from grpo_mcore.rollout.messages import ItemReader, Message, read_tools, with_instructions

FEW = 100
NO_TURN = "the agent neither said nor called anything"
LEFT_OUT = "reasoning, calls or earlier turns are left out (--format openai keeps them)"


def gym_to_sft(
    source: Path,
    target: Path,
    *,
    reward_threshold: float = 0.95,
    format: str = "openai",
    reasoning: bool = True,
    strict: bool = False,
) -> Summary:
    """Convert the rollouts with a reward of at least `reward_threshold`; one without a reward counts as 0.

    The format "openai" has whole conversations with calls, their results, reasoning (unless `reasoning` is False) and
    tools; "simple" has the user's last text and the agent's last text. Nothing is written where no row is kept. Raises
    DataError.
    """
    too_low = f"reward below {reward_threshold:g}"
    with transformation(source, target, strict=strict) as run:
        summary = run.summary
        prompt = prompt_of("text", "input")

        def conversation(rollout: Rollout) -> dict[str, Any]:
            params = rollout.responses_create_params
            reader = ItemReader(reasoning=reasoning)
            prompt, done = (
                _without_empty(reader.read(items)) for items in (input_items(params), output_items(rollout))
            )
            if not any(message["role"] == "assistant" for message in done):
                raise Filtered(NO_TURN)
            row: dict[str, Any] = {"messages": [*with_instructions(prompt, params.instructions), *done]}
            if tools := read_tools(params.tools, "tools"):
                row["tools"] = tools
            return row

        def texts(rollout: Rollout) -> dict[str, Any]:
            params, done = rollout.responses_create_params, output_items(rollout)
            row, whole = prompt(params, input_items(params))
            answer = final_text(done)
            if not answer.strip():
                raise Filtered(NO_ANSWER)
            if not (whole and is_plain(done)):
                summary.notes[LEFT_OUT] += 1
            row["output"] = answer
            return row

        make = conversation if format == "openai" else texts

        def handle(rollout: Rollout, reward: float | None) -> bytes:
            check_usable(rollout)
            if (reward or 0.0) < reward_threshold - ROUNDING:
                raise Filtered(too_low)
            return encode(make(rollout))

        run.each(handle)
        if 0 < summary.kept < FEW:
            summary.notes[f"fewer than {FEW} demonstrations; a lower --reward_threshold keeps more"] = summary.kept
    return summary


def _without_empty(messages: list[Message]) -> list[Message]:
    """Leave out an assistant that neither says nor calls anything, such as a generation cut off while it reasoned."""
    return [
        message
        for message in messages
        if message["content"] or message["role"] != "assistant" or "tool_calls" in message
    ]
