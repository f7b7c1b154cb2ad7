"""`ppo`: what a run with a critic has beside the section `grpo`. `value_loss_fn`: the critic's loss. The critic itself
is the section `value`, a policy with a head of one output. The formulas are in objective/critic.py."""

from typing import Annotated, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Probability,
    Section,
)


class GAEConfig(Section):
    """`ppo.adv_estimator`: how rewards and values become the advantage of each token (GAE, arXiv 1506.02438). Tokens
    that the policy did not generate are left out: the estimate goes on at the next one that it did."""

    name: Literal["gae"] = "gae"
    """Estimator."""
    gae_gamma: Probability = 1.0
    """Discount for each generated token."""
    gae_lambda: Probability = 0.95
    """Weight of later tokens, for values and advantages that have none of their own."""
    gae_lambda_value: Probability | None = None
    """gae_lambda of the returns that the critic learns. null: gae_lambda."""
    gae_lambda_policy: Probability | None = None
    """gae_lambda of the advantages. null: gae_lambda."""
    length_adaptive_alpha: PositiveFloat | None = None
    """gae_lambda of a sample's advantages is 1 - 1 / (this x its generated tokens), at least 0, so that longer answers
    look further ahead (VAPO, arXiv 2504.05118). With answers of fewer than 1 / this tokens lambda is 0, and a reward
    reaches their last token alone. null: the same for all samples."""
    normalize_advantages: bool = True
    """Subtract the mean of the advantages of all trained tokens of the step, and divide by their deviation."""


class PPOConfig(Section):
    """`ppo`: train with a critic. The other keys of NeMo RL's section are those of `grpo`, and may stand in either."""

    enabled: bool = False
    """Train with a critic. A recipe that has the section need not say so."""
    ppo_epochs: Positive = 1
    """Passes of the policy over the samples of a step."""
    critic_epochs: Positive = 1
    """Passes of the critic over the samples of a step, before the policy's."""
    policy_training_start_step: NonNegative = 0
    """Number of steps at the start of the run that train the critic alone."""
    adv_estimator: GAEConfig = Field(default_factory=GAEConfig)
    """How rewards and values become advantages."""


class ValueLossConfig(Section):
    """`value_loss_fn`: scale x 0.5 x max((V - R)^2, (V' - R)^2), the mean over all tokens of the optimizer step. V' is
    V within cliprange of the value before the step, R the return."""

    scale: NonNegativeFloat = 1.0
    """Factor on the loss."""
    cliprange: Annotated[float, Field(gt=0)] | None = 0.2
    """Largest change of a value that lowers its loss. null: no limit."""
