"""Experts with LoRA adapters on CPU, beside cpu_kernels.py: a loop over the experts that the tokens chose.

vLLM 0.32 computes them by Triton alone: its `PunicaWrapperBase` leaves `moe_lora_align_block_size` and
`add_lora_fused_moe` out elsewhere, and no experts for CPU call them. Superfluous once they do.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Linear = Callable[[Tensor], Tensor]


def register_adapted_experts() -> None:
    """Let vLLM choose these experts where it would choose Triton's, in this process."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    class AdaptedExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            """The weights stay as they were loaded."""
            if self.moe_config.activation not in (MoEActivation.SILU, MoEActivation.RELU2_NO_MUL):
                raise ValueError(
                    f"on CPU no experts with the activation {self.moe_config.activation.value} take adapters; set "
                    "policy.megatron_cfg.peft.refit to merged"
                )

        def apply(self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **options: Any) -> None:
            context = self._lora_context
            # -1: a request without an adapter. Before the first request vLLM measures memory.
            slots = context.punica_wrapper.token_lora_indices[: len(hidden_states)]
            has = torch.zeros(len(hidden_states), 1, dtype=hidden_states.dtype)
            has[: len(slots), 0] = (slots >= 0).to(has.dtype)
            sides = (
                (w1, context.w13_lora_a_stacked, context.w13_lora_b_stacked),
                (w2, context.w2_lora_a_stacked, context.w2_lora_b_stacked),
            )

            def layers(expert: int, rows: Tensor) -> Iterator[Linear]:
                for weight, downs, ups in sides:
                    pairs = [(down[0, expert], up[0, expert]) for down, up in zip(downs, ups, strict=True)]
                    yield adapted(weight[expert], pairs, has[rows])

            chosen, experts = options["topk_ids"].long(), options["expert_map"]
            chosen = chosen if experts is None else experts[chosen].long()
            gated = options["activation"] is MoEActivation.SILU
            output.copy_(sum_of_experts(hidden_states, chosen, options["topk_weights"], gated, layers))

    theirs = unquantized.backend_to_kernel_cls

    def kernels(backend: Any) -> list[Any]:
        return [AdaptedExperts] if backend is unquantized.UnquantizedMoeBackend.TRITON else theirs(backend)

    unquantized.backend_to_kernel_cls = kernels


def plain(weight: Tensor) -> Linear:
    """Return x -> x weight'."""
    return lambda x: x @ weight.T


def adapted(weight: Tensor, pairs: list[tuple[Tensor, Tensor]], has: Tensor) -> Linear:
    """Return x -> x weight' + (x down' up'), the outputs of several pairs side by side; `has` [T, 1] is 0 for rows
    without an adapter."""

    def linear(x: Tensor) -> Tensor:
        return x @ weight.T + has * torch.cat([x @ down.T @ up.T for down, up in pairs], -1)

    return linear


def sum_of_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gated: bool, layers: Callable[[int, Tensor], Iterator[Linear]]
) -> Tensor:
    """Return, for each token of x [T, H], the sum over its experts of weight * down(act(up(x))).

    chosen [T, K]: index of each of a token's experts, -1 for one of another rank; weights [T, K]. `layers`: up and
    down of an expert for some rows. gated: act(a, b) = silu(a) * b for halves a and b of up's output; else relu(a)^2.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in chosen[chosen >= 0].unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        up, down = layers(expert, rows)
        hidden = up(x[rows])
        if gated:
            gate, linear = hidden.chunk(2, -1)
            inner = nn.functional.silu(gate) * linear
        else:
            inner = hidden.relu().square()
        total.index_add_(0, rows, down(inner).float() * weights[rows, slots, None].float())
    return total.to(x.dtype)
