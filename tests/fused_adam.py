"""A stand-in for TransformerEngine's FusedAdam (2.x): its constructor, attributes and state, with torch's AdamW as the
kernel. It updates bfloat16 weights from gradients in `decoupled_grad`, and keeps float32 copies of the weights."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.decoupled_grad = None

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
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {name: torch.zeros_like(param, dtype=torch.float32) for name in NAMES[:2]}
                    state["master_param"] = param.float()
                if param.decoupled_grad is None:
                    continue
                adamw(
                    [state["master_param"]],
                    [param.decoupled_grad.float()],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(group["step"] - 1.0)],
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                param.copy_(state["master_param"])


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
