"""The function that the refit tests run on the ranks."""

import numpy as np

from grpo_mcore.parallel.mesh import Address
from grpo_mcore.tools.parity.rank import LayoutCase, make_policy


def parameters(address: Address, model: str, case: LayoutCase) -> dict[str, np.ndarray]:
    """Return the tensors that a policy rank offers to a refit."""
    policy = make_policy(address, model, case)
    try:
        return {name: tensor.numpy().copy() for name, tensor in policy.weights.parameters().items()}
    finally:
        policy.shutdown()
