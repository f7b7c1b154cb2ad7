"""The matrix products of groups of rows, without biases."""

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.kernels import on_cpu


@on_cpu
def general_grouped_gemm(
    A: Sequence[torch.Tensor],  # noqa: N803
    B: Sequence[torch.Tensor],  # noqa: N803
    out: list[torch.Tensor],
    quantization_params: list[None],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Any = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,  # noqa: N803
    single_output: bool = False,
) -> tuple[Any, ...]:
    """cuBLAS's matrices are by columns: TN is B A^T, NN is B A, NT is B^T A, each of rows by rows."""
    assert len(A) == len(B) == len(quantization_params) and not (gelu or use_bias)
    parts = out[0].split(m_splits) if single_output else out
    for left, right, part in zip(A, B, parts, strict=True):
        left, right = left.float(), right.float()
        product = (right.T if layout[1] == "T" else right) @ (left.T if layout[0] == "T" else left)
        part.copy_(product + part.float() if accumulate else product)
    return out, None, None
