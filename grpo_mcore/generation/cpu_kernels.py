"""Kernels that vLLM's CPU build lacks or does not use, registered as a plug-in of vLLM; nothing happens on GPUs.

- RMS norms: vLLM 0.32 uses plain PyTorch norms and relies on the compiler to fuse them, but our CPU engines run without
  it. Per norm that is six passes over float32 copies: 190 to 330 us against 50 for 128 rows of 512 in bfloat16.
- Experts without a gate (Nemotron 3): vLLM 0.32 refuses them on CPU. Superfluous once its `CPUUnquantizedExperts`
  supports the activation RELU2_NO_MUL.
- Sigmoid routing without groups of experts (MiniMax-M2): vLLM 0.32's `CPURouter` has it only with groups; one group is
  the same. Superfluous once the router does that itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PROVIDER = "vllm_c_cpu"
PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}  # vLLM's `ir_op_priority`


def register_cpu_kernels() -> None:
    """Register the kernels with vLLM in this process, once."""
    from vllm import ir
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    _register_norms()
    _allow_experts_without_gate()
    _route_by_sigmoid()


def _register_norms() -> None:
    from vllm import ir

    def plain(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        return weight is not None and weight.dtype == x.dtype and variance_size is None

    def plain_add(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return plain(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()

    @ir.ops.rms_norm.register_impl(PROVIDER, supports_args=plain)
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=plain_add, inplace=True)
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


def _allow_experts_without_gate() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    theirs: Any = CPUUnquantizedExperts
    post_init, supports = FusedMoEConfig.__post_init__, theirs._supports_activation
    pack, apply = theirs.process_weights_after_loading, theirs.apply
    ungated = MoEActivation.RELU2_NO_MUL

    def allow_on_cpu(self: Any) -> None:
        try:
            post_init(self)  # its last check refuses every activation without a gate
        except NotImplementedError:
            if self.activation is not ungated:
                raise

    def keep_unpacked(self: Any, layer: torch.nn.Module) -> None:
        if self.moe_config.activation is not ungated:
            pack(self, layer)

    def compute(self: Any, **given: Any) -> None:
        if given["activation"] is ungated:
            names = ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids")
            squared_relu_experts(*[given[name] for name in names])
        else:
            apply(self, **given)

    FusedMoEConfig.__post_init__ = allow_on_cpu
    theirs._supports_no_act_and_mul = staticmethod(lambda: True)
    theirs._supports_activation = staticmethod(lambda activation: activation is ungated or supports(activation))
    theirs.process_weights_after_loading, theirs.apply = keep_unpacked, compute


def squared_relu_experts(output: Tensor, x: Tensor, up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> None:
    """Set output [T, H] to the sum over each token's experts e of weight * relu(x up_e')^2 down_e'.

    up [E, F, H], down [E, H, F], weights and chosen [T, K]: float32 weight and index of each of a token's experts.
    """
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        hidden = (x[rows] @ up[expert].T).relu().square()
        total.index_add_(0, rows, (hidden @ down[expert].T).float() * weights[rows, slots, None])
    output.copy_(total)


def _route_by_sigmoid() -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    init = CPURouter.__init__

    def one_group(self: Any, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk and self.custom_routing_function is None:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    CPURouter.__init__ = one_group
