"""A stand-in for TransformerEngine's FusedAdam (2.x): its constructor, attributes and state, and its update in plain
torch. With `use_decoupled_grad` it updates bfloat16 weights from gradients in `decoupled_grad`, and keeps float32
copies of the weights."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from grpo_mcore.parallel.mesh import on_leave

NAMES = ("exp_avg", "exp_avg_sq", "master_param")


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        assert adam_w_mode and master_weights == use_decoupled_grad and not (amsgrad or store_param_remainders)
        assert {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype} == {torch.float32}
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, settings | {"weight_decay": weight_decay})
        self.master_weights = master_weights
        self.gradient = "decoupled_grad" if use_decoupled_grad else "grad"

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                setattr(param, self.gradient, None)

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        assert name in NAMES and self.state[param][name].dtype == torch.float32
        return self.state[param][name]

    def state_dict(self) -> dict[str, Any]:
        for param, state in self.state.items():
            for name in state:
                self.get_unscaled_state(param, name)
        return super().state_dict()

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = count = group.get("step", 0) + 1
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            step_size, root = lr / (1 - beta1**count), (1 - beta2**count) ** 0.5
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {name: torch.zeros_like(param, dtype=torch.float32) for name in NAMES[:2]}
                    if self.master_weights:
                        state["master_param"] = param.float()
                if (gradient := getattr(param, self.gradient, None)) is None:
                    continue
                # In the order in which torch's AdamW rounds, so that the two can be compared bit for bit.
                weight, gradient = state.get("master_param", param), gradient.float()
                weight.mul_(1 - lr * decay)
                mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
                square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                weight.addcdiv_(mean, (square.sqrt() / root).add_(group["eps"]), value=-step_size)
                if self.master_weights:
                    param.copy_(weight)


def install_fused_adam() -> None:
    """Let Megatron-Core find it as TransformerEngine's, until this process leaves its mesh."""
    from megatron.core import optimizer as builder
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from grpo_mcore.parallel import policy

    packages = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in packages}
    modules[packages[-1]].FusedAdam = FusedAdam
    stack = contextlib.ExitStack()
    stack.enter_context(patch.dict(sys.modules, modules))
    flags = {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}
    stack.enter_context(patch.multiple(distrib_optimizer, **flags))
    stack.enter_context(patch.multiple(builder, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False))
    for module in (builder, optimizer_config):
        stack.enter_context(patch.object(module, "is_te_min_version", lambda version, check_equality=True: True))
    # The layers stay local ones: only the optimizer is TransformerEngine's.
    check, there = policy.check_optimizer, SimpleNamespace(transformer_engine=True, on_gpu=True)
    stack.enter_context(patch.object(policy, "check_optimizer", lambda config, platform: check(config, there)))
    on_leave(stack.close)
