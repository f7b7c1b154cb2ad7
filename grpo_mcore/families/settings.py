"""Settings of the policy that a model does not allow: adapters, routers, kernels and lengths. `layout.fits` answers for
parallel sizes."""

from typing import Protocol

from grpo_mcore.families.adapters import AdapterShape, PeftSettings, adapter_shape, adapters_of, check_adapters
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


DETERMINISTIC_SCORES = 1 << 30
"""Sequences x heads x tokens^2 of a packed row from which on TransformerEngine takes no deterministic kernel of cuDNN
on Hopper, whose backward pass needs 128 bytes each (SM90_DET_FUSED_THD_BWD_MAX_BHSS)."""
SINKS_CUDNN = 92600
"""Version of cuDNN from which on TransformerEngine trusts its backward pass of sinks in packed rows."""


def check_fused_attention(
    shape: ModelShape, tensor: int, tokens: int, *, cudnn: int | None, deterministic: bool
) -> None:
    """Raise FamilyError if TransformerEngine has no attention kernel for the model, over `tensor` ranks and with
    sequences of up to `tokens`. Without flash-attn, which is not part of the installation, cuDNN's is the only one.

    `cudnn`: its version, 90200 for 9.2.0; None: unknown. `deterministic`: NVTE_ALLOW_NONDETERMINISTIC_ALGO is 0."""
    unfused = "set policy.megatron_cfg.model_overrides.attention_backend: unfused, which keeps all scores in memory"
    if shape.sinks and cudnn is not None and cudnn < SINKS_CUDNN:
        raise FamilyError(
            f"attention sinks: TransformerEngine trains them with cuDNN 9.26 or later, and here is {cudnn // 10000}."
            f"{cudnn // 100 % 100}; run scripts/setup_gpu.sh cudnn, or {unfused}"
        )
    reason = None
    if shape.sinks:
        reason = "the model's attention sinks"
    elif any(map(shape.is_attention_layer, range(shape.num_layers))):
        if shape.num_heads // tensor * tokens**2 >= DETERMINISTIC_SCORES:
            reason = f"{shape.num_heads // tensor} heads a rank with sequences of {tokens} tokens"
    if deterministic and reason is not None:
        raise FamilyError(
            f"NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: TransformerEngine has no deterministic attention for {reason}; "
            f"remove the variable and policy.megatron_cfg.model_overrides.deterministic_mode, or {unfused}"
        )


def check_images(shape: ModelShape) -> None:
    """Raise FamilyError if samples with images cannot be trained on this model."""
    if shape.vision is not None:
        return
    reason = "it has no tower that is known here; Qwen2.5-VL, Qwen3-VL and Qwen3.5 have (vision_config, mrope_section)"
    if shape.family == "gemma3_text":
        reason = "the tokens of its images attend to each other both ways, and attention here is causal"
    raise FamilyError(f"policy.model_name: images for a {shape.family} model are not supported: {reason}")


def check_length(shape: ModelShape, tokens: int) -> None:
    """Raise FamilyError if sequences of `tokens` (policy.max_total_sequence_length) need sparse attention."""
    if shape.longest_sequence is not None and tokens > shape.longest_sequence:
        raise FamilyError(
            f"policy.max_total_sequence_length {tokens}: beyond index_topk {shape.longest_sequence} tokens the model's "
            f"indexer chooses keys, which is not supported; set it to at most {shape.longest_sequence}"
        )


ALIGNED = 16
"""Bytes of which rows of matrices must be a multiple: grouped kernels read them through descriptors."""


def grouped_experts(shape: ModelShape, expert_tensor: int, element: int, adapters: AdapterShape | None) -> bool:
    """Whether GPUs' kernels of grouped products take the model's experts: bfloat16 with rows of a multiple of 16 bytes,
    no biases. Adapters on experts need their linear layers one by one."""
    if shape.experts is None or shape.biases or element != 2:
        return False
    widths = (shape.experts.latent_size or shape.hidden_size, shape.experts.ffn_hidden_size // expert_tensor)
    adapted = adapters_of(params_of(shape), adapters) if adapters else {}
    return not any(width * element % ALIGNED for width in widths) and all(param.expert is None for param in adapted)
