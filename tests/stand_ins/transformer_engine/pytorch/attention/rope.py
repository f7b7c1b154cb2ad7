"""The fused rotary embedding, of packed rows only. The kernel has no factor for sine and cosine."""

import torch

from transformer_engine.pytorch.kernels import kernel, on_cpu, row_positions

apply_fused_qkv_rotary_pos_emb = kernel


@on_cpu
def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate the first d2 dimensions of t [T, heads, d] by angles freqs [positions, 1, 1, d2]; the rest stays."""
    assert fused and tensor_format == "thd" and start_positions is None and not interleaved and cu_seqlens is not None
    assert freqs.dim() == 4 and freqs.shape[1:3] == (1, 1) and freqs.size(-1) <= t.size(-1)
    angles = freqs.float()[torch.cat(row_positions(cu_seqlens, cp_rank, cp_size)), 0]
    first, rest = t[..., : freqs.size(-1)].float(), t[..., freqs.size(-1) :]
    left, right = first.chunk(2, -1)
    rotated = first * angles.cos() + torch.cat([-right, left], -1) * angles.sin()
    return torch.cat([rotated.to(t.dtype), rest], -1)
