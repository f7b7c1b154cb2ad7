"""Layers. Without FP8 their extra state is empty."""

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.kernels import communicate, kernel, on_cpu

Tracker = Callable[[], Any]


class TransformerEngineBaseModule(torch.nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or not state.numel()


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Tracker | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert parallel_mode in ("column", "row", None) and parameters_split is None
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        rows = out_features // (self.tp_size if parallel_mode == "column" else 1)
        columns = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.in_features, self.out_features, self.use_bias = columns, rows, bias
        self.tp_group, self.return_bias = tp_group, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.parallel_mode, self.sequence_parallel = parallel_mode, self.tp_size > 1 and sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, device=device, dtype=params_dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(rows, device=device, dtype=params_dtype))
        else:
            self.bias = torch.tensor([], dtype=params_dtype, device=device)
        for parameter, split in ((self.weight, 0 if parallel_mode == "column" else 1), (self.bias, 0)):
            if isinstance(parameter, torch.nn.Parameter) and parallel_mode and (split or parallel_mode == "column"):
                parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, split, 1
            if parallel_mode == "row" and parameter is self.bias:
                parameter.sequence_parallel = self.sequence_parallel

    @on_cpu
    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        for name, parameter in self.named_parameters():
            if parameter.dtype != inp.dtype:
                raise TypeError(f"found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}")
        if self.parallel_mode == "column":
            inp = communicate(inp, self.tp_group, "gather" if self.sequence_parallel else "same")
        out = _Product.apply(inp, self.weight, self.fuse_wgrad_accumulation)
        if self.parallel_mode == "row":
            out = communicate(out, self.tp_group, "scatter" if self.sequence_parallel else "reduce")
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class _Product(torch.autograd.Function):
    """x [..., K] times weight [N, K], transposed. If fused, the weight's gradient is added to its `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, fused: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fused = fused
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        above, of_weight = gradients[0], None
        if ctx.needs_input_grad[1]:
            of_weight = above.flatten(0, -2).T @ x.flatten(0, -2)
            if ctx.fused:
                weight.main_grad.add_(of_weight)
                weight.grad_added_to_main_grad = True
                of_weight = torch.full_like(weight, torch.nan)  # memory that nobody may read
        return above @ weight if ctx.needs_input_grad[0] else None, of_weight, None


class LayerNormLinear(TransformerEngineBaseModule):
    forward = kernel  # no layer of ours


class GroupedLinear(TransformerEngineBaseModule):
    forward = kernel  # no layer of ours


class LayerNorm(TransformerEngineBaseModule):
    forward = kernel  # no family has it


class RMSNorm(TransformerEngineBaseModule):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        assert (normalized_shape is None) != (hidden_size is None) and settings.keys() <= {"device", "dtype"}
        size, dtype = normalized_shape or hidden_size, params_dtype or settings.get("dtype")
        make = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(make(size, device=settings.get("device", "cuda"), dtype=dtype))
        self.weight.sequence_parallel = self.sequence_parallel = sequence_parallel
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma

    @on_cpu
    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        x, weight = inp.to(self.weight.dtype).float(), self.weight.float() + float(self.zero_centered_gamma)
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight).to(self.weight.dtype)

    # A norm is an operation, not a module with FP8 state.
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state
