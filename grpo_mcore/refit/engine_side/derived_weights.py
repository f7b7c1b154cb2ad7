"""Tensors that vLLM derives from another module's weight and that no checkpoint holds.

Latent attention multiplies by parts of `kv_b_proj`, a Mamba2 mixer convolves with a view of `conv1d.weight`, and some
attention kernels keep the sinks in float32. All must be updated when that weight is exchanged.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from grpo_mcore.refit.engine_side.exchange import (
    Exchange,
    exchange_attributes,
    exchange_parameters,
    exchange_tensor,
    shadow_of,
)


class DerivedWeights:
    """Derived weights of one model, in `dtype`. `parameters`: ids of derived parameters, which no plan fills."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._attention = {id(m.kv_b_proj): m for m in model.modules() if isinstance(m, MLAAttention)}
        # Kernels of Blackwell (FlashInfer, B12X) copy bfloat16 sinks: `attention.impl.sinks` is then no parameter.
        self._with_sinks = [
            m.impl for m in model.modules() if getattr(getattr(m, "impl", None), "sinks", None) is not None
        ]
        self._mixers = {id(m.conv1d): m for m in model.modules() if "conv_weights" in m._buffers}
        self.parameters = {
            id(parameter) for module in self._attention.values() for parameter in module.parameters(recurse=False)
        }

    def follow(self, module: nn.Module, shadow: nn.Module, plain: Tensor | None) -> Iterator[Exchange]:
        """Yield what else must be exchanged when `module` becomes `shadow`. `plain`: its new weight, not packed."""
        if plain is not None and id(module) in self._mixers:
            live = self._mixers[id(module)]._buffers["conv_weights"]
            assert live is not None
            if not _follows_by_itself(live, module):
                yield exchange_tensor(live, plain.view(live.shape))
        if id(module) in self._attention:
            yield from self._attend(self._attention[id(module)], module, shadow)

    def refresh(self) -> None:
        """Let attention kernels copy the sinks again, after an exchange; no-op for those that keep no copy."""
        for kernel in self._with_sinks:
            kernel.process_weights_after_loading(self._dtype)

    def _attend(self, attention: nn.Module, module: nn.Module, shadow: nn.Module) -> Iterator[Exchange]:
        if all(_follows_by_itself(parameter, module) for parameter in attention.parameters(recurse=False)):
            return
        ours, impl = shadow_of(attention), copy.copy(attention.impl)
        ours._modules["kv_b_proj"], ours.__dict__["impl"] = shadow, impl
        if hasattr(impl, "kv_b_proj"):
            impl.kv_b_proj = shadow
        for name in list(ours._parameters):  # vLLM would write into those in use
            del ours._parameters[name]
        ours.process_weights_after_loading(self._dtype)
        if hasattr(impl, "kv_b_proj"):
            impl.kv_b_proj = attention.impl.kv_b_proj
        ours.__dict__["impl"] = attention.impl
        yield from exchange_attributes(attention.impl, impl)
        yield from exchange_attributes(attention, ours)
        yield from exchange_parameters(attention, ours)


def _follows_by_itself(derived: Tensor, module: nn.Module) -> bool:
    """Return whether `derived` is a view of the weight on CUDA, where contents are exchanged and views see them."""
    weight = module._parameters["weight"]
    assert weight is not None
    return derived.is_cuda and derived.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
