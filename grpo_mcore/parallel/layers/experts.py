"""A rank's experts: one after the other, as grouped matrix products (one kernel for all of them, however the tokens are
distributed), or on a projection of the hidden states.

With grouped products the parameters are those of Megatron-Core's SequentialMLP, one matrix per expert, so that
checkpoints, refit and Hugging Face's names do not depend on what computes.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from grpo_mcore.families import ModelShape, adapter_shape, grouped_experts
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.parallel.layers.attention import WholeLinear
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.recipe import MegatronConfig


class Experts(SequentialMLP):
    """SequentialMLP whose experts compute on tokens of `width`."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: Any, *, width: int, **how: Any):
        narrow = copy.copy(config)
        narrow.hidden_size = width
        super().__init__(num_local_experts, narrow, submodules, **how)


class OneExpertRouter(TopKRouter):
    """Router of a model with one expert a token whose weight is normalised: score / score = 1, times the model's
    factor. Megatron-Core normalises the weights of several experts only. The router gets a gradient of 0."""

    def routing(self, logits: Tensor, *args: Any, **how: Any) -> tuple[Tensor, Tensor]:
        probs, routing_map = super().routing(logits, *args, **how)
        factor = self.config.moe_router_topk_scaling_factor or 1.0
        return factor * routing_map.to(probs.dtype) + 0.0 * probs, routing_map


class ExpertLayer(MoELayer):
    """MoELayer that lets go of its router's weights. Megatron-Core's keeps them until the next pass, and with them the
    graph that they come from: the layer's input and its gradient."""

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        result = super().postprocess(output, shared_expert_output)
        self.token_dispatcher.probs = self.token_dispatcher.local_probs = None
        return result


class LatentMoELayer(ExpertLayer):
    """ExpertLayer whose experts compute on a projection of the hidden states of `width`; router and shared expert take
    the hidden states themselves. (Megatron-Core's own `moe_latent_size` needs TransformerEngine's grouped experts.)"""

    def __init__(self, config: TransformerConfig, *args: Any, width: int, **how: Any) -> None:
        super().__init__(config, *args, **how)
        self.fc1_latent_proj = WholeLinear(config, config.hidden_size, width)
        self.fc2_latent_proj = WholeLinear(config, width, config.hidden_size)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        return super().preprocess(self.fc1_latent_proj(hidden_states)[0], probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        routed = self.fc2_latent_proj(super().postprocess(output, None))[0]
        return routed if shared_expert_output is None else routed + shared_expert_output


class ClampedExperts(Experts):
    """gpt-oss's experts, one after the other: with the rows of gate g and up u alternating, their output is
    W (u' + 1) g' sigmoid(1.702 g') + b, where g' = min(g, clamp) and u' = max(min(u, clamp), -clamp)."""

    def __init__(self, *args: Any, clamp: float, **how: Any) -> None:
        super().__init__(*args, **how)
        self.clamp = clamp
        for expert in self.local_experts:
            # Megatron-Core would also sum its gradient over tensor-parallel ranks; that of an expert is already reduced
            # over the ranks that hold it.
            expert.linear_fc2.bias.sequence_parallel = False

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs [T, H] for tokens [T, H] sorted by expert, each scaled by its probability."""
        outputs = []
        rows = permuted_local_hidden_states.split(tokens_per_expert.tolist())
        for expert, tokens in zip(self.local_experts, rows, strict=True):
            hidden, bias = expert.linear_fc1(tokens)
            gate, up = (hidden + bias).unflatten(-1, (-1, 2)).unbind(-1)
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
            out, bias = expert.linear_fc2((up + 1) * gate * torch.sigmoid(1.702 * gate))
            outputs.append(out + bias)
        weighted = torch.cat(outputs) * permuted_probs.unsqueeze(-1)
        return weighted.to(permuted_local_hidden_states.dtype), None


class GroupedExperts(Experts):
    """Experts that are computed together, without a host synchronisation. `fused`: by TransformerEngine."""

    def __init__(self, *args: Any, fused: bool, **how: Any) -> None:
        super().__init__(*args, **how)
        self.fused = fused
        self.fuse_wgrad_accumulation = False  # as of TransformerEngine's own layers

    def _product(self, rows: Tensor, sizes: Tensor, layer: str) -> Tensor:
        """Return rows [T, K], sizes[i] (int64, on the host) of each expert, times its weight of `layer`: [T, N]."""
        weights = [getattr(expert, layer).weight for expert in self.local_experts]
        if self.fused:
            return FusedGroupedLinear.apply(rows, sizes.tolist(), self.fuse_wgrad_accumulation, *weights)
        ends = sizes.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        return GroupedLinear.apply(rows, ends, *weights)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs [T, H] for tokens [T, H] sorted by expert, each scaled by its probability."""
        rows, config = permuted_local_hidden_states, self.config
        hidden = self._product(rows, tokens_per_expert, "linear_fc1")
        if config.gated_linear_unit:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = config.activation_func(gate) * up
        else:
            hidden = config.activation_func(hidden)
        hidden = (hidden * permuted_probs.unsqueeze(-1)).to(rows.dtype)
        return self._product(hidden, tokens_per_expert, "linear_fc2"), None


class GroupedLinear(torch.autograd.Function):
    """x [T, K] times weights [N, K], one for each consecutive group of rows: [T, N]. Accumulates in float32.

    torch's kernel wants the weights in one tensor. They are copied into one in forward and again in backward, where
    keeping the copy would cost the experts' memory once more in every layer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """`ends`: int32 [experts], on the device of `x`: the row after each group's last."""
        ctx.save_for_backward(x, ends, *weights)
        if not len(x):  # the kernel refuses no rows
            return x.new_zeros(0, weights[0].size(0))
        return torch.nn.functional.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        if not len(x):
            return torch.zeros_like(x), None, *map(torch.zeros_like, weights)
        above = gradients[0].contiguous()  # an expanded gradient has strides that the kernel refuses
        of_x: Tensor | None = None
        of_weights: tuple[Tensor | None, ...] = (None,) * len(weights)
        if ctx.needs_input_grad[0]:
            of_x = torch.nn.functional.grouped_mm(above, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            # Above in columns, x in rows: the only order in which the kernel takes empty and unaligned groups.
            of_weights = torch.nn.functional.grouped_mm(above.t(), x, offs=ends).unbind()
        return of_x, None, *of_weights


class FusedGroupedLinear(torch.autograd.Function):
    """GroupedLinear by TransformerEngine's products, which take the weights where they are and can add their gradients
    to their buffers in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], accumulates: bool, *weights: Tensor) -> Tensor:
        """`sizes`: rows of each group. `accumulates`: add the weights' gradients to their `main_grad`."""
        ctx.save_for_backward(x)
        ctx.weights, ctx.sizes, ctx.accumulates = weights, sizes, accumulates
        out = x.new_empty(len(x), weights[0].size(0))
        _grouped(weights, x.split(sizes), [out], m_splits=sizes)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), weights, sizes = ctx.saved_tensors, ctx.weights, ctx.sizes
        above = gradients[0].contiguous()
        of_x: Tensor | None = None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x)
            _grouped(weights, above.split(sizes), [of_x], layout="NN", m_splits=sizes, grad=True)
        if any(ctx.needs_input_grad[3:]):
            # With accumulation nobody reads them: they tell Megatron-Core that the backward pass has come this far.
            of_weights = [torch.empty_like(weight) for weight in weights]
            targets = [weight.main_grad for weight in weights] if ctx.accumulates else of_weights
            rows = {"m_splits": sizes, "layout": "NT", "grad": True, "accumulate": ctx.accumulates}
            _grouped(x.split(sizes), above.split(sizes), targets, single_output=False, **rows)
            for weight in weights if ctx.accumulates else ():
                weight.grad_added_to_main_grad = True
        return of_x, None, None, *of_weights


def _grouped(
    left: Sequence[Tensor], right: Sequence[Tensor], out: Sequence[Any], *, single_output: bool = True, **how: Any
) -> None:
    """Fill `out` with the products of the pairs of matrices, in cuBLAS's order of the two."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    if any(map(len, right)):  # without a row there is no product
        pairs, nothing = (list(left), list(right), list(out)), [None] * len(left)
        general_grouped_gemm(*pairs, nothing, left[0].dtype, single_output=single_output, **how)
    elif not how.get("accumulate"):
        for tensor in out:
            tensor.zero_()


def computes_in_groups(
    shape: ModelShape, layout: PolicyLayout, settings: MegatronConfig, dtype: torch.dtype, platform: Platform
) -> bool:
    """Whether the experts are computed as grouped products: the recipe asks for it and the kernel takes them."""
    if not (platform.grouped_products and settings.moe_grouped_gemm):
        return False
    element = 2 if dtype is torch.bfloat16 else 4
    return grouped_experts(shape, layout.expert_tensor, element, adapter_shape(settings.peft))
