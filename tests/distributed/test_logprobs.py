"""Log-probs of a cut distribution over a vocabulary that two ranks share, against one rank."""

import pytest
import torch

from grpo_mcore.parallel.logprobs import Cut, token_scores
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.logprob_cases import WORDS, case


@pytest.mark.parametrize("cut", [Cut(5), Cut(9, 0.8)], ids=str)
def test_two_ranks_cut_as_one(ranks: RankPool, cut: Cut) -> None:
    hidden, weight, targets = case()
    weight.requires_grad_()
    whole = token_scores(hidden, weight, targets, **WORDS, group=None, vocab_start=0, cut=cut)
    (whole * torch.linspace(-1, 2, whole.numel()).view_as(whole)).sum().backward()
    parts = ranks.run(2, "tests.distributed.logprob_cases:cut_scores", cut)
    for scores, _, _ in parts:
        torch.testing.assert_close(scores, whole.detach(), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(parts[0][1] + parts[1][1], hidden.grad, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat([parts[0][2], parts[1][2]]), weight.grad, atol=1e-5, rtol=0)
