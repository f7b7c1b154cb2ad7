"""Parts of checkpointing that need no process group."""

import os
import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.parallel.weights.checkpoint import _ResultFile, make_moments


class FusedAdam(torch.optim.Optimizer):
    """Stand-in for TransformerEngine's: it counts steps by group, and its state has no other names than these."""

    dtypes = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for values in state["state"].values():
            assert all(values[name].dtype == self.dtypes[name] for name in values)
        return state


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, FusedAdam])
def test_an_optimizer_that_has_not_stepped_gets_the_state_that_it_would_create(kind: Any) -> None:
    made, stepped = (kind([torch.ones(3, requires_grad=True)]) for _ in range(2))
    make_moments(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=made)]))
    if kind is not FusedAdam:  # whose step is a kernel
        stepped.param_groups[0]["params"][0].grad = torch.ones(3)
        stepped.step()
        assert made.state_dict()["state"][0].keys() == stepped.state_dict()["state"][0].keys()
    made.state_dict()


def test_a_result_that_a_fork_puts_is_read_once() -> None:
    result = _ResultFile()
    for written in ({0: ["part"] * 100_000}, RuntimeError("the disk is full")):  # more than a pipe holds
        with pytest.raises(queue.Empty):
            result.get_nowait()
        if (child := os.fork()) == 0:
            result.put(written)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert repr(result.get_nowait()) == repr(written)
    with pytest.raises(queue.Empty):
        result.get_nowait()
