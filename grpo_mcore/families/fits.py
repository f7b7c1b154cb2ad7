"""Which layouts a model allows. Layouts on which Megatron-Core would fail an assertion or compute wrong results are
rejected here, naming the key to change."""

from __future__ import annotations

from typing import Protocol

from grpo_mcore.families.adapters import PeftSettings, adapter_shape, check_adapters
from grpo_mcore.families.registry import params_of
from grpo_mcore.families.shards import chunk_layers, stage_layers
from grpo_mcore.families.spec import FamilyError, ModelShape, check_tensor_parallel


class LayoutSettings(Protocol):
    """The keys of policy.megatron_cfg that are read here."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    sequence_parallel: bool

    @property
    def moe_token_dispatcher_type(self) -> str: ...
    @property
    def peft(self) -> PeftSettings: ...


def check_fit(shape: ModelShape, megatron: LayoutSettings) -> None:
    """Raise FamilyError if `megatron` (policy.megatron_cfg) describes a layout that the model does not allow."""
    check_tensor_parallel(shape, megatron.tensor_model_parallel_size)
    _check_stages(shape, megatron)
    if (adapters := adapter_shape(megatron.peft)) is not None:
        sizes = megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size
        refitted = megatron.peft.refit == "adapters"
        check_adapters(params_of(shape), shape, adapters, *sizes, refitted=refitted)
    if shape.experts is None:
        _check_no_experts(shape, megatron)
    else:
        _check_experts(shape, megatron)


def check_context_parallel(shape: ModelShape, ranks: int, *, fused_attention: bool) -> None:
    """Raise FamilyError if a sequence is split over context-parallel `ranks` for which TransformerEngine has no kernel:
    its ring of ranks takes neither windows nor sinks. `fused_attention`: attention is TransformerEngine's."""
    if ranks == 1 or not fused_attention or not (shape.sinks or any(shape.windows)):
        return
    what = "attention sinks" if shape.sinks else "windows of keys"
    way = "" if shape.sinks else ", or set policy.sequence_packing.shared_prefix.enabled: true to use our attention"
    raise FamilyError(
        f"policy.megatron_cfg.context_parallel_size {ranks}: TransformerEngine has no attention kernel for {what} over "
        f"several context-parallel ranks; set it to 1{way}"
    )


def check_length(shape: ModelShape, tokens: int) -> None:
    """Raise FamilyError if sequences of so many tokens (policy.max_total_sequence_length) need sparse attention."""
    if shape.longest_sequence is not None and tokens > shape.longest_sequence:
        raise FamilyError(
            f"policy.max_total_sequence_length {tokens}: beyond index_topk {shape.longest_sequence} tokens the model's "
            f"indexer chooses keys, which is not supported; set it to at most {shape.longest_sequence}"
        )


def _check_stages(shape: ModelShape, megatron: LayoutSettings) -> None:
    stages, chunks = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    if chunks > 1 and stages == 1:
        raise FamilyError(
            f"policy.megatron_cfg.virtual_pipeline_model_parallel_size {chunks} needs pipeline_model_parallel_size "
            "above 1"
        )
    chunk_layers(shape.num_layers, stages, chunks, first, last)


def _check_no_experts(shape: ModelShape, megatron: LayoutSettings) -> None:
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if (size := getattr(megatron, name)) > 1:
            raise FamilyError(
                f"policy.megatron_cfg.{name} {size}: this {shape.family} model has no experts; set it to 1"
            )


def _check_experts(shape: ModelShape, megatron: LayoutSettings) -> None:
    experts, at = shape.experts, "policy.megatron_cfg."
    assert experts is not None
    parallel, tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    if experts.count % parallel:
        raise FamilyError(
            f"{at}expert_model_parallel_size {parallel} does not divide the {experts.count} experts of this "
            f"{shape.family} model"
        )
    if experts.ffn_hidden_size % tensor:
        raise FamilyError(
            f"{at}expert_tensor_parallel_size {tensor} does not divide the experts' intermediate size "
            f"{experts.ffn_hidden_size}"
        )
    if shape.biases and tensor > 1:
        raise FamilyError(f"{at}expert_tensor_parallel_size {tensor}: the experts of a {shape.family} model stay whole")
    if experts.active == 1 and experts.normalized and not experts.sigmoid:
        raise FamilyError(
            f"a {shape.family} model with one expert per token, whose weight is then always 1, is not supported"
        )
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        raise FamilyError(
            f"{at}sequence_parallel must be true for a model with experts under tensor parallelism: without it every "
            "tensor-parallel rank sends all tokens to the experts"
        )
    if megatron.moe_token_dispatcher_type == "allgather" and megatron.pipeline_model_parallel_size > 1:
        raise FamilyError(
            f"{at}moe_token_dispatcher_type allgather needs rows of one length, which pipeline stages do not have; use "
            "alltoall"
        )
    stages, chunks = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    first = stage_layers(
        shape.num_layers,
        stages,
        megatron.num_layers_in_first_pipeline_stage,
        megatron.num_layers_in_last_pipeline_stage,
    )[0]
    if stages > 1 and chunks == 1 and not any(shape.is_expert_layer(layer) for layer in first):
        raise FamilyError(
            f"{at}num_layers_in_first_pipeline_stage: the {len(first)} layers of the first stage have no experts; it "
            "needs at least one layer with experts, because checkpoints keep the experts' optimizer settings there"
        )
    for name, neutral in (
        ("moe_router_load_balancing_type", "none"),
        ("moe_router_bias_update_rate", 0.0),
        ("moe_shared_expert_overlap", False),
    ):
        if (value := getattr(megatron, name)) != neutral:
            raise FamilyError(f"{at}{name} {value}: not supported; set it to {neutral}")
