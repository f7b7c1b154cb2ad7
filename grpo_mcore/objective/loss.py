"""The clipped policy-gradient loss of GRPO and its variants, and the loss of SFT, for padded and packed rows alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective.importance import ImportanceWeights, importance_weights
from grpo_mcore.objective.kl import kl_penalty
from grpo_mcore.objective.metrics import age_metrics, mismatch_by_token, mismatch_metrics, ratio_metrics
from grpo_mcore.objective.policy_terms import PolicyTerm, policy_term
from grpo_mcore.objective.reduce import Count, MaskedTokens
from grpo_mcore.recipe import ClippedPGLossConfig, checked_loss


class ClippedPGLossFn:
    """loss = mean(w * policy term) + beta * mean(KL) + mu * mean(NLL of positive samples) - eta * mean(entropy).

    `cfg`: the recipe's section `loss_fn`, or a mapping of its keys; raises RecipeError as a recipe would.
    `prev_equals_curr`: the previous policy is the current one (the first and only optimizer step of a step), so that
    batches need no prev_logprobs. `max_age`: report metrics by trajectory age from 0 to this age, for batches with
    `ages`.
    """

    def __init__(
        self,
        cfg: ClippedPGLossConfig | Mapping[str, Any],
        *,
        prev_equals_curr: bool = False,
        max_age: int | None = None,
    ) -> None:
        if max_age is not None and max_age < 0:
            raise ValueError(f"max_age is {max_age}; it must be 0 or more")
        self.cfg = checked_loss(cfg)
        self.prev_equals_curr = prev_equals_curr
        self.max_age = max_age
        self.needs_entropy = self.cfg.entropy_coeff is not None

    def __call__(
        self, curr_logprobs: Tensor, batch: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the loss of the global batch, and its metrics.

        curr_logprobs: [B, S], or [1, T] with `segments` int64 [T] and `num_segments` (int) in the batch. Element t
        belongs to token t; the first token of a sequence is never trained. batch: advantages, token_mask (as
        curr_logprobs), sample_mask ([B], or as curr_logprobs), and those that the config needs: prev_logprobs,
        generation_logprobs, reference_policy_logprobs (as curr_logprobs), rewards ([B], or as curr_logprobs),
        covariance_marks (as curr_logprobs, above 0 for the tokens that `Marking` chose), entropies (as curr_logprobs,
        with their gradient), ages (int64, as curr_logprobs, or [T] like segments: trajectory age of
        each token). generation_logprobs and ages, if present, also give metrics.
        global_valid_seqs, global_valid_toks: counts over all micro-batches and data-parallel ranks, numbers or
        tensors, see `valid_counts`.

        The loss is a scalar. Metrics are scalars, except that sequence_mult_prob_error_p95 has one value per sequence.
        All are float64 on the device, without a copy to the host. Losses are summed over micro-batches and ranks;
        metrics are for `combine_metrics` and `step_metrics`. Raises ValueError if an entry is missing or has the wrong
        shape.
        """
        cfg = self.cfg
        tokens = MaskedTokens.from_batch(curr_logprobs.shape, batch, global_valid_seqs, global_valid_toks)
        curr = tokens.column(curr_logprobs, "curr_logprobs")
        prev = self.prev_column(curr, batch, tokens)
        generation = self._generation(batch, tokens)
        ages = self.ages_column(batch, tokens)
        advantages = _column(batch, "advantages", tokens, "the policy term")

        term = self.policy_term(curr, self.before_column(prev, batch, tokens), advantages, tokens)
        if term.marked is not None:
            marks = _column(batch, "covariance_marks", tokens, f"loss_fn.policy_term {cfg.policy_term}")
            term = term.with_marks(marks > 0)
        weights = None if generation is None else importance_weights(prev, generation, tokens, cfg, ages)
        policy_loss = objective_mean(self._weighted(term.loss, weights), tokens, cfg)
        loss = policy_loss
        metrics = {"policy_loss": policy_loss.detach()}

        if cfg.reference_policy_kl_penalty > 0 and not cfg.use_kl_in_reward:
            reference = _column(batch, "reference_policy_logprobs", tokens, "loss_fn.reference_policy_kl_penalty > 0")
            penalty = kl_penalty(
                curr,
                reference,
                kind=cfg.reference_policy_kl_type,
                generation=generation if cfg.use_on_policy_kl_approximation else None,
                input_clamp=cfg.kl_input_clamp_value,
                output_clamp=cfg.kl_output_clamp_value,
            )
            kl = objective_mean(penalty, tokens, cfg)
            loss = loss + cfg.reference_policy_kl_penalty * kl
            metrics["kl_penalty"] = kl.detach()

        if cfg.positive_example_nll_weight > 0:
            rewards = _needed(batch, "rewards", "loss_fn.positive_example_nll_weight > 0")
            nll = positive_nll(curr, rewards, tokens, by_micro_batch=cfg.positive_example_nll_divisor == "micro_batch")
            loss = loss + cfg.positive_example_nll_weight * nll
            metrics["positive_nll_loss"] = nll.detach()

        if cfg.entropy_coeff is not None:
            entropies = tokens.column(_needed(batch, "entropies", "loss_fn.entropy_coeff"), "entropies")
            if cfg.entropy_coeff:
                loss = loss - cfg.entropy_coeff * objective_mean(entropies, tokens, cfg)
            metrics["entropy"] = tokens.mean(entropies.detach())

        with torch.no_grad():
            metrics["loss"] = loss.detach()
            metrics["num_valid_samples"] = tokens.num_samples
            metrics |= ratio_metrics(term.ratio.detach(), term.clipped_ratio.detach(), advantages, tokens, cfg)
            by_token: dict[str, Tensor] = {}
            if generation is not None and weights is not None:
                kind = cfg.reference_policy_kl_type
                by_token = mismatch_by_token(prev, generation, weights, kind)
                metrics |= mismatch_metrics(curr.detach(), prev, generation, weights, by_token, tokens, kind)
            if ages is not None:
                metrics |= age_metrics(ages, by_token, tokens, self.max_age)
        return loss, metrics

    def policy_term(self, curr: Tensor, prev: Tensor, advantages: Tensor, tokens: MaskedTokens) -> PolicyTerm:
        """Return the policy term of each token and its ratios. A loss of your own derives from this class and overrides
        this method; importance weights, KL, entropy, means and metrics stay. All float64 [N], flat: log-probs under the
        policy and before the step's first update, and advantages."""
        return policy_term(curr, prev, advantages, tokens, self.cfg)

    def prev_column(self, curr: Tensor, batch: Mapping[str, Any], tokens: MaskedTokens) -> Tensor:
        """Return the log-probs before the update, float64 [N]."""
        no_pass = self.prev_equals_curr or self.cfg.ratio_to_engine
        if self.cfg.force_on_policy_ratio or (batch.get("prev_logprobs") is None and no_pass):
            return curr.detach()
        return _column(batch, "prev_logprobs", tokens, "the policy ratio (without loss_fn.force_on_policy_ratio)")

    def before_column(self, prev: Tensor, batch: Mapping[str, Any], tokens: MaskedTokens) -> Tensor:
        """Return the log-probs to which the policy term's ratio is: `prev`, or the engine's, float64 [N]."""
        if not self.cfg.ratio_to_engine:
            return prev
        return _column(batch, "generation_logprobs", tokens, "loss_fn.ratio_to_engine")

    def _generation(self, batch: Mapping[str, Any], tokens: MaskedTokens) -> Tensor | None:
        for name in ("use_importance_sampling_correction", "use_on_policy_kl_approximation"):
            if getattr(self.cfg, name):
                return _column(batch, "generation_logprobs", tokens, f"loss_fn.{name}")
        if batch.get("generation_logprobs") is None:
            return None
        return _column(batch, "generation_logprobs", tokens, "the mismatch metrics")

    def ages_column(self, batch: Mapping[str, Any], tokens: MaskedTokens) -> Tensor | None:
        """Return the trajectory age of each token, float64 [N]; None if the batch has none."""
        if self.cfg.truncated_importance_sampling_ratio_by_age is not None:
            _needed(batch, "ages", "loss_fn.truncated_importance_sampling_ratio_by_age")
        ages = batch.get("ages")
        if ages is None:
            return None
        packed = tokens.shape[0] == 1 and ages.shape == tokens.shape[1:]
        return tokens.column(ages[None] if packed else ages, "ages")

    def _weighted(self, term: Tensor, weights: ImportanceWeights | None) -> Tensor:
        if not self.cfg.use_importance_sampling_correction or weights is None:
            return term
        return term * weights.weight


def objective_mean(values: Tensor, tokens: MaskedTokens, cfg: ClippedPGLossConfig) -> Tensor:
    """Return this batch's part of the mean of the loss's terms [N], a scalar.

    token_level_loss: sum over all tokens / their number (DAPO, arXiv 2503.14476). Otherwise the mean over sequences of
    their means or, with sequence_length_normalizer, of their sums / this constant (Dr. GRPO, arXiv 2503.20783), which
    does not favour short correct answers and long wrong ones.
    """
    if cfg.sequence_length_normalizer is not None:
        return tokens.sum(values) / (cfg.sequence_length_normalizer * tokens.global_seqs)
    return tokens.mean(values, by_sequence=not cfg.token_level_loss)


def positive_nll(curr: Tensor, rewards: Tensor, tokens: MaskedTokens, *, by_micro_batch: bool = False) -> Tensor:
    """Return the sum of -curr over the tokens of samples with a positive reward / global_valid_toks (arXiv 2504.05118).

    The paper divides by the tokens of positive samples. Divided by all tokens, a rare positive sample does not weigh
    more than others. `by_micro_batch`: divide by the tokens of positive samples in this micro-batch, as NeMo RL does.
    """
    positive = tokens.expand((tokens.per_sequence(rewards, "rewards") > 0).to(torch.float64))
    if by_micro_batch:
        weight = positive * tokens.weight
        return -(curr * weight).sum() / weight.sum().clamp(min=1)
    return tokens.mean(-curr * positive)


def _needed(batch: Mapping[str, Any], name: str, needed_by: str) -> Tensor:
    value = batch.get(name)
    if value is None:
        raise ValueError(f"{needed_by} needs {name!r}, which is not in the batch; it has: {', '.join(sorted(batch))}")
    return value


def _column(batch: Mapping[str, Any], name: str, tokens: MaskedTokens, needed_by: str) -> Tensor:
    return tokens.column(_needed(batch, name, needed_by).detach(), name)


class NLLLossFn:
    """Supervised loss: sum of -log-prob over valid tokens / global_valid_toks."""

    def __call__(
        self, curr_logprobs: Tensor, batch: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the loss, and metrics to be summed. All are float64 scalars.

        Shapes, masks and counts as for `ClippedPGLossFn`; the batch needs token_mask and sample_mask.
        """
        tokens = MaskedTokens.from_batch(curr_logprobs.shape, batch, global_valid_seqs, global_valid_toks)
        loss = tokens.mean(-tokens.column(curr_logprobs, "curr_logprobs"))
        metrics = {
            "loss": loss.detach(),
            "num_valid_samples": tokens.num_samples,
            "num_valid_tokens": tokens.valid.sum().to(torch.float64),
        }
        return loss, metrics
