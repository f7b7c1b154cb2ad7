"""The section `rehearse`: what a rehearsal assumes of the run, and no other command reads."""

from __future__ import annotations

from grpo_mcore.recipe.schema.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Probability,
    Section,
)


class RehearseConfig(Section):
    """`rehearse`: what `grpo-mcore rehearse` assumes of samples, rewards and devices."""

    device: str | None = None
    """The accelerator, as in `grpo-mcore plan --device`. null: H100, or cpu where cluster.platform is cpu."""
    mean_tokens: Positive | None = None
    """Mean tokens of prompt and answer. null: half of policy.max_total_sequence_length."""
    spread: NonNegativeFloat = 0.7
    """Spread of the answers' lengths: the standard deviation of their logarithm. 0: all are equally long. Answers that
    would exceed the context are truncated."""
    prompt_spread: NonNegativeFloat = 0.4
    """Share of `spread` that lies between prompts; the rest lies between the samples of one prompt."""
    solve_rate: Probability = 0.5
    """Mean reward over the prompts; each has a rate of its own."""
    turns: PositiveFloat = 1.0
    """Mean number of turns of a sample, at most grpo.max_rollout_turns."""
    turn_tokens: Positive = 64
    """Tokens of an environment's message."""
    reward_seconds: NonNegativeFloat = 0.05
    """Median seconds that an environment needs for a sample's turn."""
    reward_spread: NonNegativeFloat = 0.5
    """Standard deviation of the logarithm of these seconds."""
    reward_failures: Probability = 0.0
    """Share of the turns for which the environment finds no reward."""
    save_seconds: NonNegativeFloat | None = None
    """Seconds in which the ranks write a checkpoint. null: at 1 GB/s for each node."""
    start_seconds: NonNegativeFloat = 120.0
    """Seconds that policy and engines need to start."""
    seed: NonNegative = 0
    """Seed of all draws."""
