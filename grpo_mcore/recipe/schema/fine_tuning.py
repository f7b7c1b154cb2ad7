"""`sft`, `dpo` and `rm`: training on given examples. Batch sizes are those of `policy` (policy.train_global_batch_size,
...), counted in samples by `sft` and a regression, and in pairs by `dpo` and a Bradley-Terry model."""

from typing import Literal

from grpo_mcore.recipe.schema.section import (
    NULL,
    Derived,
    Fixed,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Seed,
)

PreferenceLoss = Literal["dpo", "ipo", "simpo"]


class FineTuningConfig(Section):
    """Keys that `sft`, `dpo` and `rm` share."""

    max_num_epochs: Positive = 1
    """Maximum number of passes over the training data."""
    max_num_steps: Positive = 60
    """Maximum number of steps."""
    val_period: NonNegative = 10
    """Steps between two validations. 0: never."""
    val_batches: Positive | None = 8
    """Batches of one validation. null: the whole validation data."""
    val_global_batch_size: Derived[Positive] = NULL
    """Samples, or pairs, of one validation batch. null: policy.train_global_batch_size."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: Fixed[Seed] = 42
    """Seed of the data order."""


class SFTConfig(FineTuningConfig):
    """`sft`. A step is one optimizer step."""


class DPOConfig(FineTuningConfig):
    """`dpo`. A step is one optimizer step on policy.train_global_batch_size pairs. The loss of a pair is
    preference_loss_weight x preference loss + sft_loss_weight x the negative log-prob of the chosen answer."""

    max_num_steps: Positive = 150
    """Maximum number of steps."""
    val_period: NonNegative = 25
    """Steps between two validations. 0: never."""
    preference_loss: PreferenceLoss = "dpo"
    """dpo: -log sigmoid(beta m), where m is the difference of the log-ratios to the reference (arXiv 2305.18290). ipo:
    (m - 1 / (2 beta))^2 (arXiv 2310.12036). simpo: as dpo, with mean log-probs, a target margin and no reference (arXiv
    2405.14734)."""
    reference_policy_kl_penalty: PositiveFloat = 0.05
    """beta: how strongly the policy is kept near the reference. Values of ipo and simpo differ in size: the papers use
    0.1 and 2."""
    preference_average_log_probs: bool = False
    """Divide the log-prob of an answer by its tokens in the preference loss. simpo always does."""
    simpo_margin: NonNegativeFloat = 0.0
    """gamma: the difference of rewards that simpo aims at. No effect on other losses."""
    preference_loss_weight: NonNegativeFloat = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: NonNegativeFloat = 0.0
    """Weight of the chosen answer's negative log-prob, which keeps that answer likely."""
    sft_average_log_probs: Derived[bool] = NULL
    """Divide the log-prob by the tokens in that term. null: dpo.preference_average_log_probs."""


class RMConfig(FineTuningConfig):
    """`rm`: a reward model, which is the policy with a head of one output, read at the last token of a conversation. A
    step is one optimizer step on policy.train_global_batch_size pairs, or samples."""

    val_period: NonNegative = 16
    """Steps between two validations. 0: never."""
    reward_model_type: Literal["bradley_terry", "regression"] = "bradley_terry"
    """bradley_terry: -log sigmoid(r of the chosen answer - r of the rejected one - m), where m is the row's `margin`, 0
    where it has none (arXiv 2307.09288, equation 2). regression: (r - s)^2 / 2, where s is the `score` of an answer."""
