"""Settings of the policy that a model does not allow: adapters, routers, kernels and lengths. `layout.fits` answers for
parallel sizes."""

from __future__ import annotations

from typing import Protocol

from grpo_mcore.families.adapters import PeftSettings, adapter_shape, check_adapters
from grpo_mcore.families.registry import params_of
from grpo_mcore.families.spec import FamilyError, ModelShape


class MegatronSettings(Protocol):
    """The keys of policy.megatron_cfg that are read here."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    expert_tensor_parallel_size: int

    @property
    def moe_token_dispatcher_type(self) -> str: ...
    @property
    def peft(self) -> PeftSettings: ...


def check_settings(shape: ModelShape, megatron: MegatronSettings) -> None:
    """Raise FamilyError for a setting in `megatron` (policy.megatron_cfg) that the model does not allow."""
    if (adapters := adapter_shape(megatron.peft)) is not None:
        sizes = megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size
        refitted = megatron.peft.refit == "adapters"
        check_adapters(params_of(shape), shape, adapters, *sizes, refitted=refitted)
    experts, section = shape.experts, "policy.megatron_cfg."
    if experts is None:
        return
    if megatron.moe_token_dispatcher_type == "allgather" and megatron.pipeline_model_parallel_size > 1:
        raise FamilyError(
            f"{section}moe_token_dispatcher_type allgather needs rows of one length, which pipeline stages do not have"
            "; use alltoall"
        )
    for name, neutral in (
        ("moe_router_load_balancing_type", "none"),
        ("moe_router_bias_update_rate", 0.0),
        ("moe_shared_expert_overlap", False),
    ):
        if (value := getattr(megatron, name)) != neutral:
            raise FamilyError(f"{section}{name} {value}: not supported; set it to {neutral}")


def check_context_parallel(shape: ModelShape, ranks: int, *, fused_attention: bool) -> None:
    """Raise FamilyError if a sequence is split over context-parallel `ranks` for which TransformerEngine has no kernel:
    its ring of ranks takes neither windows nor sinks. `fused_attention`: attention is TransformerEngine's."""
    if ranks == 1 or not fused_attention or not (shape.sinks or any(shape.windows)):
        return
    feature = "attention sinks" if shape.sinks else "windows of keys"
    way = "" if shape.sinks else ", or set policy.sequence_packing.shared_prefix.enabled: true to use our attention"
    raise FamilyError(
        f"policy.megatron_cfg.context_parallel_size {ranks}: TransformerEngine has no attention kernel for {feature} "
        f"over several context-parallel ranks; set it to 1{way}"
    )


def check_attention(shape: ModelShape, precision: str, *, on_gpu: bool, fused_attention: bool) -> None:
    """Raise FamilyError if no attention kernel of GPUs takes this precision or the model's sinks. `fused_attention`:
    attention is TransformerEngine's."""
    if not on_gpu:
        return
    if precision == "float32" and any(map(shape.is_attention_layer, range(shape.num_layers))):
        raise FamilyError(
            "policy.precision float32: attention kernels for packed rows on GPUs take bfloat16 only; set it to "
            "bfloat16, or cluster.platform: cpu"
        )
    if shape.sinks and not fused_attention:
        raise FamilyError(
            "attention sinks on GPUs need the attention of TransformerEngine 2.8 or later; install it, and leave "
            "policy.sequence_packing.shared_prefix.enabled null"
        )


def check_length(shape: ModelShape, tokens: int) -> None:
    """Raise FamilyError if sequences of `tokens` (policy.max_total_sequence_length) need sparse attention."""
    if shape.longest_sequence is not None and tokens > shape.longest_sequence:
        raise FamilyError(
            f"policy.max_total_sequence_length {tokens}: beyond index_topk {shape.longest_sequence} tokens the model's "
            f"indexer chooses keys, which is not supported; set it to at most {shape.longest_sequence}"
        )
