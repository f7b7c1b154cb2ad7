"""RMS norm (arXiv 1910.07467, eq. 4), on CPU in slices that stay in the cache.

On CPU, torch's own makes seven passes over float32 copies of a bfloat16 row, and keeps two of them for the backward
pass.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

SLICE_BYTES = 1 << 19


class RMSNorm(torch.nn.Module):
    """RMS norm with Megatron-Core's constructor; sequence-parallel slices have their gradients summed over TP ranks.

    Uses torch's fused kernel, which is for GPUs.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads

    def scale(self) -> Tensor:
        """Return the factors of the normed values; those of centered norms are 1 + weight, in float32."""
        return self.weight.float() + 1.0 if self.centered else self.weight

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale()
        values = x.float() if self.centered else x
        return torch.nn.functional.rms_norm(values, scale.shape, scale, self.eps).to(x.dtype)


class CpuRMSNorm(RMSNorm):
    """RMS norm in slices that stay in the cache."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale(), self.eps)


class WideHeadNorm(torch.nn.Module):
    """RMS norm over the heads of all tensor-parallel ranks together: x [t, 1, heads / TP, d] -> the same shape.

    Has the constructor that Megatron-Core's attention calls for norms of single heads. `heads`: number of heads of the
    whole model.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, *, heads: int, **_: Any) -> None:
        super().__init__()
        self.eps, self.width = eps, heads * hidden_size
        local = self.width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        values = x.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(values.square().sum(-1, keepdim=True))
        # Every rank's heads depend on the sum: its gradient is the sum over the ranks.
        squares = copy_to_tensor_model_parallel_region(squares)
        normed = values * torch.rsqrt(squares / self.width + self.eps) * self.weight.float()
        return normed.to(x.dtype).view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron-Core's sharded tensors, by position in the whole model."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(), dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


class NormedAdd(torch.nn.Module):
    """Norms a part's output before it is added to the residual, in the place of Megatron-Core's `get_bias_dropout_add`.
    `norm`: class of the norm."""

    def __init__(self, norm: Callable[..., torch.nn.Module], config: Any) -> None:
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        normed: Tensor = self.norm(output_with_bias[0])
        return residual + normed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in at least float32.

    x [..., H], weight [H] -> [..., H] in the dtype of `x`. The backward pass keeps x and one number per row.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, wide = _rows(x), torch.promote_types(x.dtype, torch.float32)
        scale = weight.to(wide)
        out = rows.new_empty(rows.shape)
        inverse = torch.empty(rows.size(0), 1, dtype=wide)
        for part in _slices(rows, wide):
            values = rows[part].to(wide, copy=True)
            norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            inverse[part] = norm.square_().div_(rows.size(1)).add_(eps).rsqrt_()
            out[part] = values.mul_(inverse[part]).mul_(scale)
        ctx.save_for_backward(x, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return dx = (g - n * mean(g * n)) * inverse and dw = sum(grad * n); n = x * inverse, g = grad * weight."""
        x, weight, inverse = ctx.saved_tensors
        rows, grads, wide = _rows(x), _rows(grad), inverse.dtype
        scale = weight.to(wide)
        grad_x, grad_weight = rows.new_empty(rows.shape), torch.zeros_like(scale)
        for part in _slices(rows, wide):
            normed = rows[part].to(wide, copy=True).mul_(inverse[part])
            g = grads[part].to(wide, copy=True)
            products = g * normed
            grad_weight += products.sum(0)
            mean = torch.mv(products, scale).div_(-rows.size(1))[:, None]
            grad_x[part] = g.mul_(scale).addcmul_(normed, mean).mul_(inverse[part])
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


def _slices(rows: Tensor, wide: torch.dtype) -> list[slice]:
    size = max(1, SLICE_BYTES // (wide.itemsize * rows.size(1)))
    return [slice(start, start + size) for start in range(0, rows.size(0), size)]
