from transformer_engine.pytorch import distributed, fp8, ops, optimizers, permutation, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.module import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "ops",
    "optimizers",
    "permutation",
    "tensor",
]
