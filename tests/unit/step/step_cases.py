"""Recipes and scored groups for the tests of a step's parts."""

from typing import Any

from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, TrajectoryRef
from tests.recipes import small_recipe


def config(loss_fn: dict[str, Any] | None = None, **grpo: Any) -> MasterConfig:
    """Return a recipe with 2 prompts x 4 generations and 2 optimizer steps."""
    policy = {"train_global_batch_size": 4, "max_total_sequence_length": 64}
    return small_recipe(policy=policy, grpo=grpo, loss_fn=loss_fn or {})


def group(
    uid: str,
    rewards: list[float | None],
    truncated: bool = False,
    parts: list[dict[str, float]] | None = None,
    lengths: list[int] | None = None,
    solved_at: float | None = None,
) -> Group:
    """Return a group whose sample i has 4 prompt tokens and `lengths[i]` generated ones (default: 6 + i)."""
    lengths = lengths or [6 + i for i in range(len(rewards))]
    samples = tuple(
        TrajectoryRef(
            uid=uid,
            generation_index=i,
            length=4 + length,
            prompt_length=4,
            generated_length=length,
            weight_version=1,
            truncated=truncated,
            finish_reason="length" if truncated else "stop",
            ref=f"{uid}#{i}",
        )
        for i, length in enumerate(lengths)
    )
    named = parts or [{} for _ in rewards]
    scores = tuple(
        Score(reward, None, "", 0.0, part, solved_at=solved_at) for reward, part in zip(rewards, named, strict=True)
    )
    return Group({"uid": uid}, samples, scores)
