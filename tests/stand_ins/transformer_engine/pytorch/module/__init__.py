"""Layers. Their forward pass is a kernel; without FP8 their extra state is empty."""

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.kernels import kernel

Tracker = Callable[[], Any]


class _Module(torch.nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or not state.numel()

    forward = kernel


class Linear(_Module):
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


class LayerNormLinear(_Module): ...


class GroupedLinear(_Module): ...


class LayerNorm(_Module): ...


class RMSNorm(_Module):
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
        self.eps = eps

    # A norm is an operation, not a module with FP8 state.
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


class DotProductAttention(_Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Tracker | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.softmax_type = softmax_type
        if softmax_type == "learnable":  # float32, whatever the other parameters are
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size, device="cuda"))
