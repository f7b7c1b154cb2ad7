"""Which log-prob passes a step makes before it trains. Light: the plan of a run asks it too."""

from __future__ import annotations

from grpo_mcore.recipe import MasterConfig, samples_per_step


def needs_reference(config: MasterConfig) -> bool:
    """Whether reference log-probs are computed at all."""
    return config.loss_fn.reference_policy_kl_penalty > 0


def needs_prev(config: MasterConfig) -> bool:
    """Whether log-probs from before the step's first update are computed: the policy changes within the step, or what
    it learns depends on them."""
    grpo, loss = config.grpo, config.loss_fn
    changes = samples_per_step(config) > config.policy.train_global_batch_size
    return changes or loss.use_kl_in_reward or grpo.seq_logprob_error_threshold is not None
