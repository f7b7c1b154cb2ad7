"""Which log-probs a step needs besides those of training itself: read from the recipe alone."""

from __future__ import annotations

from grpo_mcore.recipe import MasterConfig


def needs_reference(config: MasterConfig) -> bool:
    """Whether reference log-probs are computed at all."""
    return config.loss_fn.reference_policy_kl_penalty > 0


def needs_prev(config: MasterConfig) -> bool:
    """Whether log-probs from before the step's first update are computed: the policy changes within the step, or what
    it learns depends on them."""
    grpo, loss = config.grpo, config.loss_fn
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    changes = samples > config.policy.train_global_batch_size and not loss.force_on_policy_ratio
    return changes or loss.use_kl_in_reward or grpo.seq_logprob_error_threshold is not None
