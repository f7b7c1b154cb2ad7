"""Quantised weights: the plain reference against vLLM's own functions, and the errors that it finds."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from grpo_mcore.refit.engine_side import fp8
from grpo_mcore.refit.plan.plan import RefitError

FORMATS: tuple[fp8.Format, ...] = get_args(fp8.Format)


def by_vllm(kind: fp8.Format, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what vLLM's quantiser makes of a weight."""
    torch.compiler.set_stance("force_eager")
    if kind == "fp8_per_block":
        from vllm.utils.deep_gemm import per_block_cast_to_fp8

        result: tuple[Tensor, Tensor] = per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
        return result
    if kind == "fp8_per_channel":
        from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel

        scale = _fp8_channel_scale(weight.abs().amax(-1, keepdim=True))
        return _fp8_quant_per_channel(weight, scale), scale
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    result = _mxfp8_e4m3_quantize_torch(weight)
    return result


def weights() -> list[Tensor]:
    """Return bfloat16 weights [N, K] with everything that a quantiser may treat in its own way."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(192, 320, generator=generator)
    odd = drawn.clone()
    odd[:128, :128] = 0
    odd[0, 200], odd[150, :32], odd[160, 40] = 3e4, 1e-30, -0.0
    midpoints = torch.tensor([448.0, 17.0, 18.0, 19.0, 1.0625, 2.0**-9, 2.0**-10, -17.0]).repeat(128, 16)
    return [part.bfloat16() for part in (drawn, odd, drawn * 1e-4, drawn[:64, :96], midpoints)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_the_reference_is_vllms_quantiser(kind: fp8.Format) -> None:
    for weight in weights():
        for ours, theirs in zip(fp8.quantized(kind, weight), by_vllm(kind, weight), strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


class Layer(nn.Module):
    """A layer with quantised weights, as vLLM leaves it."""

    def __init__(self, kind: fp8.Format, plain: dict[str, Tensor]) -> None:
        super().__init__()
        for name, weight in plain.items():
            for part, value in zip((name, fp8.scale_name(name, kind)), fp8.quantized(kind, weight), strict=True):
                self.register_parameter(part, nn.Parameter(value, requires_grad=False))


def plain() -> dict[str, Tensor]:
    drawn = torch.randn(4, 2048, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    return {"w13_weight": drawn, "w2_weight": drawn[:, :128].transpose(1, 2).contiguous()}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_layer_as_the_reference_makes_it_passes(kind: fp8.Format) -> None:
    layer = Layer(kind, plain())
    fp8.check_against_reference("experts", layer, plain(), kind)
    assert fp8.digest(layer) == fp8.digest(Layer(kind, plain()))


def by_division(weight: Tensor) -> Tensor:
    """Quantise blocks by w / scale in place of w * (1 / scale)."""
    scale = fp8.quantized("fp8_per_block", weight)[1]
    return (weight.float() / scale.repeat_interleave(128, -2).repeat_interleave(128, -1)).to(torch.float8_e4m3fn)


def old_scales(layer: Any, kind: fp8.Format) -> None:
    scale = layer.get_parameter(fp8.scale_name("w2_weight", kind))
    scale.data = fp8.quantized(kind, plain()["w2_weight"] * 2)[1]


def two_experts_scales_swapped(layer: Any, kind: fp8.Format) -> None:
    scale = layer.get_parameter(fp8.scale_name("w13_weight", kind))
    scale.data = scale.data[[1, 0, 2, 3]]


def still_bfloat16(layer: Any, kind: fp8.Format) -> None:
    layer.w13_weight.data = plain()["w13_weight"]


def divided(layer: Any, kind: fp8.Format) -> None:
    layer.w13_weight.data = by_division(plain()["w13_weight"])


def multiplied(layer: Any, kind: fp8.Format) -> None:
    """Quantise channels by w * (1 / scale) in place of w / scale."""
    layer.w13_weight.data = (plain()["w13_weight"] * (1 / layer.w13_weight_scale)).to(torch.float8_e4m3fn)


def blocks_by_tensor(layer: Any, kind: fp8.Format) -> None:
    """Quantise the queries (1,856 rows, no whole blocks) and keys of a fused parameter each by itself."""
    parts = [fp8.quantized(kind, part.contiguous())[0] for part in plain()["w13_weight"].split([1856, 192], 1)]
    layer.w13_weight.data = torch.cat([part.view(torch.uint8) for part in parts], 1).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("kind", "fault", "message"),
    [
        *((kind, old_scales, r"experts.w2_weight_scale\w*: .* differs .* in \d+ bytes") for kind in FORMATS),
        *((kind, two_experts_scales_swapped, r"experts.w13_weight_scale") for kind in FORMATS),
        *((kind, still_bfloat16, r"experts.w13_weight: .* differs .* in") for kind in FORMATS),
        ("fp8_per_block", blocks_by_tensor, r"experts.w13_weight: .* differs .* in \d+ bytes"),
        ("fp8_per_block", divided, r"experts.w13_weight: .* differs .* in \d+ bytes"),
        ("fp8_per_channel", multiplied, r"experts.w13_weight: .* differs .* in \d+ bytes"),
    ],
)
def test_a_layer_with_other_bytes_is_found(kind: fp8.Format, fault: Any, message: str) -> None:
    layer = Layer(kind, plain())
    right = fp8.digest(layer)
    fault(layer, kind)
    assert fp8.digest(layer) != right
    with pytest.raises(RefitError, match=message):
        fp8.check_against_reference("experts", layer, plain(), kind)


def test_the_padding_of_experts_is_zero_between_their_halves() -> None:
    module = type("Experts", (nn.Module,), {"moe_config": type("Config", (), {"w13_num_shards": 2})})()
    filled = torch.arange(1.0, 13.0).view(1, 6, 2)
    whole = fp8.padded(module, "w13_weight", filled, torch.empty(1, 10, 2))
    assert whole[0, :, 0].tolist() == [1, 3, 5, 0, 0, 7, 9, 11, 0, 0]
    assert fp8.padded(module, "w2_weight", filled, torch.empty(1, 6, 4))[0, 0].tolist() == [1, 2, 0, 0]
    assert fp8.padded(module, "w2_weight", filled, filled) is filled
