"""FP8 layers on CPU, beside cpu_kernels.py: linear layers and experts that keep the bytes and scales of vLLM's own
quantisation and multiply by what they stand for, in the number format of the activations.

vLLM 0.32 has kernels for blocks on processors with AMX alone, which pack the bytes, only an emulation of MXFP8 that is
not in the list for CPU, for channels one whose quantiser the CPU build lacks, and no experts without AMX or Triton.
Superfluous once it has them for every processor.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from grpo_mcore.generation.cpu_experts import Linear, plain, sum_of_experts


def register_quantized_layers() -> None:
    """Put the CPU's FP8 layers first in vLLM's lists, in this process."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.online import base, fp8
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod, Fp8PtpcOnlineMoEMethod
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
    from vllm.model_executor.layers.quantization.online.mxfp8 import Mxfp8OnlineMoEMethod
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        amax_for_moe_weight_quant,
        kFp8Static128BlockSym,
        kFp8StaticChannelSym,
        kMxfp8Dynamic,
        weight_amax,
    )
    from vllm.model_executor.utils import replace_parameter
    from vllm.platforms.interface import PlatformEnum

    class BlockKernel(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            """The weight stays as it was quantised."""

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            return nn.functional.linear(A, blocks_dequantized(B, Bs).to(A.dtype))

    class ChannelKernel(FP8ScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return c.weight_quant_key == kFp8StaticChannelSym, "the scales are not those of channels"

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return nn.functional.linear(x, channels_dequantized(layer.weight.T, layer.weight_scale).to(x.dtype), bias)

        def apply_scaled_mm(self, **_: Any) -> Tensor:
            raise AssertionError("apply_weights calls it, and that is replaced")

    class Experts:
        """Experts as they were quantised, and a loop over those that the tokens chose."""

        weight_scale_name: str
        dequantized: Callable[[Tensor, Tensor], Tensor]

        def __init__(self, *, moe: Any) -> None:
            if moe.activation not in (MoEActivation.SILU, MoEActivation.RELU2_NO_MUL):
                raise ValueError(
                    f"on CPU no FP8 experts have the activation {moe.activation.value}; set "
                    "policy.generation.vllm_cfg.precision to bfloat16"
                )
            OnlineMoEMethodBase.__init__(self, moe)

        def _setup_kernel(self, layer: nn.Module, *weights: Tensor | None) -> None:
            names = ("w13_weight", "w2_weight", f"w13_{self.weight_scale_name}", f"w2_{self.weight_scale_name}")
            for name, weight in zip(names, weights, strict=False):
                replace_parameter(layer, name, weight)

        def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
            return None

        def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            sides = [
                (getattr(layer, f"{side}_weight"), getattr(layer, f"{side}_{self.weight_scale_name}"))
                for side in ("w13", "w2")
            ]

            def layers(expert: int, _: Tensor) -> Iterator[Linear]:
                for weight, scale in sides:
                    yield plain(self.dequantized(weight[expert], scale[expert]).to(x.dtype))

            chosen = topk_ids.long() if layer.expert_map is None else layer.expert_map[topk_ids.long()].long()
            return sum_of_experts(x, chosen, topk_weights, layer.activation is MoEActivation.SILU, layers)

    class BlockExperts(Experts, Fp8PerBlockOnlineMoEMethod):
        weight_scale_name, weight_block_size = "weight_scale_inv", [128, 128]
        dequantized = staticmethod(blocks_dequantized)

    class ChannelExperts(Experts, Fp8PtpcOnlineMoEMethod):
        weight_scale_name = "weight_scale"
        dequantized = staticmethod(channels_dequantized)

        def process_weights_after_loading(self, layer: Any) -> None:
            """Quantise w13 as vLLM does w2, in place of a kernel with the same formula."""
            if getattr(layer, "_already_called_process_weights_after_loading", False):
                return
            layer.w13_input_scale = layer.w2_input_scale = None
            weights = [layer.w13_weight.data, layer.w2_weight.data]
            largest = [weight_amax(weight, dim=-1, keepdim=True) for weight in weights]
            largest[1] = amax_for_moe_weight_quant(largest[1], self.moe.tp_size)
            scales = [fp8._fp8_channel_scale(values) for values in largest]
            quantized = [fp8._fp8_quant_per_channel(*pair) for pair in zip(weights, scales, strict=True)]
            self._setup_kernel(layer, *quantized, *scales)
            layer._already_called_process_weights_after_loading = True

    class MxExperts(Experts, Mxfp8OnlineMoEMethod):
        weight_scale_name, weight_block_size = "weight_scale", [1, 32]
        dequantized = staticmethod(dequant_mxfp8_to_bf16)

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, BlockKernel)
    linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, ChannelKernel)
    linear.register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    base._ONLINE_MOE_METHODS.update(
        {kFp8Static128BlockSym: BlockExperts, kFp8StaticChannelSym: ChannelExperts, kMxfp8Dynamic: MxExperts}
    )


def channels_dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """Return weight [N, K] times the scale of its row, float32. scale: float32 [N, 1]."""
    return weight.float() * scale


def blocks_dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """Return weight [N, K] times the scale of its block, float32. scale: float32 [ceil(N / 128), ceil(K / 128)]."""
    rows, columns = weight.shape
    scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight.float() * scale
