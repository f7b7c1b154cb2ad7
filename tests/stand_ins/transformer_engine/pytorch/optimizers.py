"""Adam with the real one's constructor and state, whose step is a kernel, and the kernels of gradient clipping."""

from tests import fused_adam
from transformer_engine.pytorch.kernels import kernel


class FusedAdam(fused_adam.FusedAdam):
    step = kernel


class FusedSGD: ...


multi_tensor_applier = multi_tensor_scale = multi_tensor_l2norm = kernel
