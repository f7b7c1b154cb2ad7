"""Losses of preference training (DPO, IPO, SimPO) and of reward models, for pairs of a chosen and a rejected answer in
packed rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_mcore.objective.reduce import Count, MaskedTokens
from grpo_mcore.recipe import DPOConfig


def dpo_loss(margin: Tensor, beta: float) -> Tensor:
    """Return -log sigmoid(beta m) (Rafailov et al. 2023, equation 7). `margin`: log-ratio to the reference of the
    chosen answer minus that of the rejected one."""
    return -logsigmoid(beta * margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """Return (m - 1 / (2 beta))^2 (Azar et al. 2023, equation 17)."""
    return (margin - 1 / (2 * beta)).square()


def simpo_loss(margin: Tensor, beta: float, target: float) -> Tensor:
    """Return -log sigmoid(beta m - gamma) (Meng et al. 2024, equation 6). `margin`: mean log-prob of the chosen answer
    minus that of the rejected one; `target`: gamma."""
    return -logsigmoid(beta * margin - target)


class PreferenceLossFn:
    """loss = mean over pairs of (preference weight * preference loss + SFT weight * -log-prob of the chosen answer)."""

    def __init__(self, cfg: DPOConfig) -> None:
        """`cfg`: the recipe's section `dpo`."""
        self.cfg = cfg

    def __call__(
        self, curr_logprobs: Tensor, batch: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the loss, and its metrics for `combine_metrics`.

        Samples 2k and 2k + 1 are the chosen and the rejected answer of pair k. Shapes and masks as for
        `ClippedPGLossFn`; the batch needs token_mask, sample_mask and, but for simpo, reference_sums: the log-prob of
        each answer under the reference, summed over its tokens, one value per sample or per token. global_valid_seqs:
        pairs over all micro-batches and data-parallel ranks. Raises ValueError if the samples are no pairs.

        A reward is beta times the log-ratio to the reference (simpo: times the mean log-prob); accuracy is the share of
        pairs whose chosen answer has the higher reward. All values are float64 scalars.
        """
        cfg = self.cfg
        tokens = MaskedTokens.from_batch(curr_logprobs.shape, batch, global_valid_seqs, global_valid_toks)
        _check_pairs(tokens)
        by_simpo = cfg.preference_loss == "simpo"
        sums = tokens.sum_by_sequence(tokens.column(curr_logprobs, "curr_logprobs"))[:-1]
        counts = tokens.tokens_by_sequence[:-1].clamp(min=1)
        ratios = sums if by_simpo else sums - tokens.per_sequence(_reference(batch), "reference_sums")[:-1]
        if by_simpo or cfg.preference_average_log_probs:
            ratios = ratios / counts
        beta, margin = cfg.reference_policy_kl_penalty, ratios[0::2] - ratios[1::2]
        match cfg.preference_loss:
            case "dpo":
                preference = dpo_loss(margin, beta)
            case "ipo":
                preference = ipo_loss(margin, beta)
            case "simpo":
                preference = simpo_loss(margin, beta, cfg.simpo_margin)
        chosen = -(sums / counts if cfg.sft_average_log_probs else sums)[0::2]
        weight = tokens.sample_weight[:-1][0::2]

        def mean(of_pairs: Tensor) -> Tensor:
            return torch.dot(of_pairs.to(torch.float64), weight) / tokens.global_seqs

        preference_loss, sft_loss = mean(preference), mean(chosen)
        loss = cfg.preference_loss_weight * preference_loss + cfg.sft_loss_weight * sft_loss
        rewards = beta * ratios.detach()
        metrics = {
            "loss": loss,
            "preference_loss": preference_loss,
            "sft_loss": sft_loss,
            "accuracy": mean(rewards[0::2] > rewards[1::2]),
            "rewards_chosen_mean": mean(rewards[0::2]),
            "rewards_rejected_mean": mean(rewards[1::2]),
            "rewards_margin_mean": mean(rewards[0::2] - rewards[1::2]),
            "num_valid_samples": weight.sum(),
            "num_valid_tokens": tokens.valid.sum().to(torch.float64),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}


class RewardLossFn:
    """The mean over pairs of -log sigmoid(r_chosen - r_rejected - margin) (Bradley-Terry, arXiv 2307.09288, equation
    2), or the mean over samples of (r - score)^2 / 2. r is what a head of one output says of a whole conversation."""

    def __init__(self, *, pairs: bool) -> None:
        self.pairs = pairs

    def __call__(
        self, values: Tensor, batch: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the loss, and its metrics for `combine_metrics`.

        Shapes, masks and pairs as for `PreferenceLossFn`, with values in place of log-probs; r is that of a sample's
        only trained token. The batch needs `rewards`: the score of each sample, or of a chosen answer the margin and of
        a rejected one 0. global_valid_seqs: pairs, or samples. All values are float64 scalars.
        """
        tokens = MaskedTokens.from_batch(values.shape, batch, global_valid_seqs, global_valid_toks)
        rewards = tokens.sum_by_sequence(tokens.column(values, "values"))[:-1]
        labels, weight = tokens.per_sequence(batch["rewards"], "rewards")[:-1], tokens.sample_weight[:-1]
        if self.pairs:
            _check_pairs(tokens)
            weight, (chosen, rejected) = weight[0::2], (rewards[0::2], rewards[1::2])
            margins = chosen - rejected
            terms = -logsigmoid(margins - labels[0::2])
            of_kind = {
                "accuracy": margins > 0,
                "rewards_chosen_mean": chosen,
                "rewards_rejected_mean": rejected,
                "rewards_margin_mean": margins,
            }
        else:
            terms = 0.5 * (rewards - labels).square()
            of_kind = {"rewards_mean": rewards, "reward_error_mean": (rewards - labels).abs()}
        means = {
            name: torch.dot(of_term.to(torch.float64), weight) / tokens.global_seqs
            for name, of_term in ({"loss": terms} | of_kind).items()
        }
        counts = {"num_valid_samples": weight.sum(), "num_valid_tokens": tokens.valid.sum().to(torch.float64)}
        return means["loss"], {name: value.detach() for name, value in (means | counts).items()}


def _check_pairs(tokens: MaskedTokens) -> None:
    if tokens.num_segments % 2:
        raise ValueError(f"{tokens.num_segments} samples in a row are no pairs")


def _reference(batch: Mapping[str, Any]) -> Tensor:
    if batch.get("reference_sums") is None:
        raise ValueError(f"the batch has no 'reference_sums'; it has: {', '.join(sorted(batch))}")
    return batch["reference_sums"]
