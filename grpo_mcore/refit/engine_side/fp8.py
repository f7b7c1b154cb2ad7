"""FP8 weights of an engine: the layers of vLLM that a refit can fill, and a plain reference of what becomes of them.

vLLM quantises a layer once all its bfloat16 weights are there, at loading and in a refit alike, by `quant_method`. Its
blocks lie in the rank's fused parameter, so bytes are compared after fusing and at one tensor-parallel size. Scales of
channels are those of whole rows, of which ranks may have parts: see `spans_ranks`.
"""

import zlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.plan.proof import checksum

Format = Literal["fp8_per_block", "fp8_per_channel", "mxfp8"]

METHODS: dict[str, Format] = {
    "Fp8PerBlockOnlineLinearMethod": "fp8_per_block",
    "Fp8PerBlockOnlineMoEMethod": "fp8_per_block",
    "Fp8PtpcOnlineLinearMethod": "fp8_per_channel",
    "Fp8PtpcOnlineMoEMethod": "fp8_per_channel",
    "Mxfp8OnlineLinearMethod": "mxfp8",
    "Mxfp8OnlineMoEMethod": "mxfp8",
}
"""vLLM's classes of `quant_method` that quantise by themselves, and their format."""

DONE = "_already_called_process_weights_after_loading"
"""vLLM's mark of a layer that is quantised. A layer that has it is left as it is: in bfloat16, under the old scales."""

LARGEST = 448.0  # of e4m3


def format_of(module: nn.Module) -> Format | None:
    """Return the format of a layer that vLLM quantised when it was loaded; None for others."""
    names = (cls.__name__ for cls in type(getattr(module, "quant_method", None)).__mro__)
    return next((METHODS[name] for name in names if name in METHODS), None)


def spans_ranks(module: Any, name: str) -> bool:
    """Return whether the scales of this weight need the largest values of other ranks, which vLLM asks for while it
    quantises: rows that are divided over ranks, in a format of channels."""
    if format_of(module) != "fp8_per_channel":
        return False
    if name in ("w13_weight", "w2_weight"):
        return name == "w2_weight" and bool(module.quant_method.moe.tp_size > 1)
    return bool(module.input_size != module.input_size_per_partition)


def filled_shape(module: nn.Module, name: str, loaded: Tensor) -> tuple[int, ...]:
    """Return the shape of the part of a parameter that a checkpoint fills. vLLM rounds experts up to whole blocks."""
    if name not in ("w13_weight", "w2_weight") or format_of(module) is None:
        return tuple(loaded.shape)
    config: Any = module.moe_config
    inner, (experts, rows, columns) = config.intermediate_size_per_partition_unpadded, loaded.shape
    return (experts, config.w13_num_shards * inner, columns) if name == "w13_weight" else (experts, rows, inner)


def padded(module: nn.Module, name: str, filled: Tensor, loaded: Tensor) -> Tensor:
    """Return `filled`, experts in their `filled_shape`, in the shape of `loaded`, with zeros."""
    if filled.shape == loaded.shape:
        return filled
    shards = module.moe_config.w13_num_shards if name == "w13_weight" else 1
    whole = filled.new_zeros(loaded.shape)
    part, values = whole.unflatten(1, (shards, -1)), filled.unflatten(1, (shards, -1))
    part[..., : values.shape[2], : values.shape[3]] = values
    return whole


def scale_name(weight: str, kind: Format) -> str:
    """Return the name of a weight's scale in its layer."""
    return f"{weight}_scale_inv" if kind == "fp8_per_block" else f"{weight}_scale"


def quantized(kind: Format, weight: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (e4m3 in the shape of `weight`, its scales) of a weight [..., N, K], bfloat16.

    fp8_per_channel: scale = max(max|w| / 448, 1 / (448 * 512)) of each row, float32 [..., N, 1], and e4m3(w / scale);
    `largest` [..., N, 1]: max|w| of the whole rows, of which `weight` is a part. fp8_per_block: scale =
    max(|w|, 1e-4) / 448 of each 128 x 128, float32 [..., ceil(N / 128), ceil(K / 128)], and e4m3(w * (1 / scale)).
    mxfp8 (OCP Microscaling 1.0): for each 32 along K the smallest power of two under which the largest |w| fits, uint8
    [..., N, K / 32] with 127 added to the exponent, and e4m3(w / power).
    """
    if kind == "fp8_per_channel":
        largest = weight.float().abs().amax(-1, keepdim=True) if largest is None else largest.float()
        scale = (largest / torch.tensor(LARGEST)).clamp(min=1 / (LARGEST * 512))
        return (weight / scale).to(torch.float8_e4m3fn), scale
    if weight.ndim > 2:
        parts = [quantized(kind, part) for part in weight]
        return torch.stack([part for part, _ in parts]), torch.stack([scale for _, scale in parts])
    rows, columns = weight.shape
    if kind == "mxfp8":
        groups = weight.float().view(rows, -1, 32)
        largest = groups.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
        exponent = ((largest / LARGEST).log2().ceil() + 127).clamp(0, 254)
        values = groups / (exponent - 127).exp2()[..., None]
        return values.view(rows, columns).to(torch.float8_e4m3fn), exponent.to(torch.uint8)
    padded = nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-4) / LARGEST
    values = (blocks * (1.0 / scale)[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scale


def dequantized(kind: Format, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 values [..., N, K] that `quantized` weights stand for."""
    if kind == "mxfp8":
        return (weight.float().unflatten(-1, (-1, 32)) * (scale.float() - 127).exp2()[..., None]).flatten(-2)
    if kind == "fp8_per_channel":
        return weight.float() * scale
    rows, columns = weight.shape[-2:]
    scale = scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
    return weight.float() * scale


def check_against_reference(
    path: str, layer: nn.Module, plain: dict[str, Tensor], kind: Format, group: Any = None
) -> None:
    """Raise RefitError if a byte or a scale of a layer that vLLM has just quantised is not that of `quantized`.

    `plain`: its weights before, by name; biases are not looked at. `group`: the engine's tensor-parallel ranks, which
    all call this together where scales span them.
    """
    for name, weight in plain.items():
        if weight.ndim < 2:
            continue
        largest = None
        if spans_ranks(layer, name):
            largest = weight.float().abs().amax(-1, keepdim=True)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        for part, expected in zip((name, scale_name(name, kind)), quantized(kind, weight, largest), strict=True):
            found = layer.get_parameter(part).data
            if kind == "fp8_per_channel" and part == "weight":  # vLLM keeps the linear layer's transposed
                found = found.T.contiguous()
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                different = f"form: {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
            else:
                different = f"{int((found.view(torch.uint8) != expected.view(torch.uint8)).sum())} bytes"
            if not different.startswith("0 "):
                raise RefitError(
                    f"{path}.{part}: vLLM's {kind} quantisation of the new weights differs from the reference in "
                    f"{different}; the engine would compute with other weights than the policy's"
                )


def digest(layer: nn.Module) -> int:
    """Return a checksum of all weights and scales of a quantised layer, in the order of their names."""
    parameters = sorted(layer.named_parameters(recurse=False))
    sums = [checksum(parameter.data, parameter.dtype) for _, parameter in parameters]
    return zlib.crc32(repr(sums).encode())
