"""A user's script under torchrun: prints a sum of log-probs and the gradient norm of a step."""

from __future__ import annotations

import sys

import torch

from grpo_mcore.parallel.mesh import Address
from grpo_mcore.tools.parity.rank import LayoutCase, logprobs_and_gradients


def main() -> None:
    address = Address.from_environment()
    found = logprobs_and_gradients(address, sys.argv[1], LayoutCase("TP2", tensor=2))
    total = sum(part.sum().item() for part in found["logprobs"].values())
    if address.rank == 0:
        print(f"RESULT {total:.6f} {found['grad_norm']:.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
