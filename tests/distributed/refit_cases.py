"""What the ranks of a mesh do in the refit tests; module-level, so that the rank processes find it."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo_mcore.parallel.mesh import Address
from tests.distributed.policy_cases import LayoutCase, make_policy


def parameters(address: Address, model: str, case: LayoutCase, megatron: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a rank of a real policy offers to a refit."""
    from tests.distributed.policy_cases import policy_config

    config = policy_config(model, case).megatron_cfg.model_dump() | megatron
    policy = make_policy(address, model, case, megatron_cfg=config)
    try:
        return {name: tensor.numpy().copy() for name, tensor in policy.weights.parameters().items()}
    finally:
        policy.shutdown()
