"""A sample of ours as a line of a rollouts file, in the form in which NeMo Gym writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_mcore.rollout.trajectory import Score, Trajectory

FAILURE = "_ng_failure_class"


def rollout_line(
    messages: Sequence[Mapping[str, Any]],
    trajectory: Trajectory,
    score: Score,
    *,
    task: Mapping[str, Any],
    task_index: int,
    agent: str,
    sampling: Mapping[str, float],
    model: str,
    token_ids: bool,
) -> dict[str, Any]:
    """`messages`: the prompt; `task`: what its row brings for the verifier. `token_ids`: with the tokens of every turn.

    A sample without a reward gets what a Gym gives one that failed: `_ng_failure_class` and the reason.
    """
    output = []
    seen = trajectory.turns[0].token_ids.tolist()
    first = next((i for i, turn in enumerate(trajectory.turns) if turn.loss_mask), len(trajectory.turns))
    for turn in trajectory.turns[1:first]:
        seen += turn.token_ids.tolist()
    for number, turn in enumerate(trajectory.turns[first:]):
        if not turn.loss_mask:
            output.append({"type": "message", "role": "user", "content": turn.text})
            seen += turn.token_ids.tolist()
            continue
        said = {"type": "output_text", "text": turn.text, "annotations": []}
        item: dict[str, Any] = {
            "id": f"msg_{trajectory.generation_index}_{number}",
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if trajectory.truncated and turn is trajectory.turns[-1] else "completed",
            "content": [said],
        }
        if token_ids:
            assert turn.logprobs is not None
            item["prompt_token_ids"] = list(seen)
            item["generation_token_ids"] = turn.token_ids.tolist()
            item["generation_log_probs"] = turn.logprobs.tolist()
        output.append(item)
        seen += turn.token_ids.tolist()
    line = {
        **task,
        "responses_create_params": {"input": [dict(message) for message in messages], **sampling},
        "response": {
            "id": f"resp_{trajectory.name}",
            "object": "response",
            "model": model,
            "output": output,
            "incomplete_details": {"reason": "max_output_tokens"} if trajectory.truncated else None,
        },
        "reward": score.reward,
        "extracted_answer": score.answer,
        "reward_components": score.rewards_by_name or None,
        "_ng_task_index": task_index,
        "_ng_rollout_index": trajectory.generation_index,
        "agent_ref": {"type": "responses_api_agents", "name": agent},
    }
    return line if score.reward is not None else line | failure(score)


def failure(score: Score) -> dict[str, Any]:
    """What marks a line of a sample without a reward."""
    return {"reward": None, FAILURE: "no_reward", "_ng_failure_message": score.reason}
