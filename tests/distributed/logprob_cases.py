"""The function that test_logprobs.py runs on the ranks."""

import torch

from grpo_mcore.parallel.logprobs import Cut, token_scores
from grpo_mcore.parallel.mesh import Address

WORDS = {"vocab_size": 37, "temperature": 0.7, "chunk": 8, "tile": 16, "entropy": True}


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states [23, 16], an output layer of 40 rows and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(23, 16, generator=generator), torch.randn(40, 16, generator=generator)
    return hidden.requires_grad_(), weight, torch.randint(0, 37, (23,), generator=generator)


def cut_scores(address: Address, cut: Cut) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores with this rank's half of the output layer, and the gradients of hidden states and weight."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{address.master_addr}:{address.master_port}",
        rank=address.rank,
        world_size=address.world_size,
    )
    try:
        hidden, weight, targets = case()
        weight = weight[20 * address.rank : 20 * (address.rank + 1)].requires_grad_()
        group, start = torch.distributed.group.WORLD, 20 * address.rank
        scores = token_scores(hidden, weight, targets, **WORDS, group=group, vocab_start=start, cut=cut)
        (scores * torch.linspace(-1, 2, scores.numel()).view_as(scores)).sum().backward()
        return scores.detach(), hidden.grad, weight.grad
    finally:
        torch.distributed.destroy_process_group()
