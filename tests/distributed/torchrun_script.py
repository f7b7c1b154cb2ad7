"""A user's script under torchrun: prints a sum of log-probs and the gradient norm of a step. A rank of the pool can run
it too."""

import os
import sys
from unittest import mock

import torch

from grpo_mcore.parallel.mesh import Address
from grpo_mcore.tools.parity.rank import LayoutCase, logprobs_and_gradients


def main() -> None:
    total, norm = computed(sys.argv[1])
    if os.environ["RANK"] == "0":
        print(f"RESULT {total:.6f} {norm:.6f}")
    torch.distributed.destroy_process_group()


def computed(model: str) -> tuple[float, float]:
    found = logprobs_and_gradients(Address.from_environment(), model, LayoutCase("TP2", tensor=2))
    return sum(part.sum().item() for part in found["logprobs"].values()), found["grad_norm"]


def in_the_pool(address: Address, model: str, agent_port: int) -> tuple[float, float]:
    """Compute it in a rank of the pool, with the variables that torchrun sets. Its agent listens at `agent_port`."""
    places = {"RANK": address.rank, "WORLD_SIZE": address.world_size, "LOCAL_RANK": address.local_rank}
    there = {"MASTER_ADDR": address.master_addr, "MASTER_PORT": agent_port}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in (places | there | agent).items()}):
        return computed(model)


if __name__ == "__main__":
    main()
