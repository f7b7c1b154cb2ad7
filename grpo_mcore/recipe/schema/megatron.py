"""`policy.megatron_cfg`: layout, memory, optimizer and learning rate of the Megatron-Core policy."""

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import (
    NULL,
    Decay,
    Derived,
    Fixed,
    NonNegative,
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    PositiveFloat,
    Section,
    VariableText,
)

RecomputedPart = Literal["core_attn", "mlp", "moe", "shared_experts"]


class OptimizerConfig(Section):
    """`policy.megatron_cfg.optimizer`."""

    optimizer: Fixed[Literal["adam"]] = "adam"
    """Optimizer. With weight_decay above 0 it is AdamW."""
    lr: Annotated[float, Field(gt=0, le=1e5)] = 5.0e-6
    """Maximum learning rate, reached at the end of the warm-up."""
    min_lr: Derived[NonNegativeFloat] = NULL
    """Learning rate at the end of the decay. null: a tenth of lr."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, per optimizer step and unit of learning rate."""
    bf16: Derived[bool] = NULL
    """Weights in bfloat16 with float32 copies in the optimizer. Must agree with policy.precision. null: follow it."""
    params_dtype: Literal["float32"] = "float32"
    """Number format of the optimizer's copy of the weights."""
    adam_beta1: Decay = 0.9
    """Decay of Adam's mean of the gradients."""
    adam_beta2: Decay = 0.999
    """Decay of Adam's mean of the squared gradients."""
    adam_eps: PositiveFloat = 1.0e-8
    """Added to the root of Adam's second moment."""
    use_precision_aware_optimizer: bool = False
    """Update the weights from bfloat16 gradients as they are, without float32 copies of them. Needs TransformerEngine,
    on a GPU, and policy.precision: bfloat16. No effect with optimizer_cpu_offload."""
    optimizer_cpu_offload: bool = False
    """Update optimizer_offload_fraction of the weights on the host, which keeps their float32 copies, moments and
    gradients: 16 bytes a weight. The GPU keeps none of these, and every update waits for the host. Needs
    policy.precision: bfloat16."""
    optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the weights that optimizer_cpu_offload updates on the host. No effect without it."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients to the host and weights back while the host updates others. Only with optimizer_cpu_offload."""
    clip_grad: Derived[NonNegativeFloat] = NULL
    """Same as policy.max_grad_norm. null: its value. Two different values are an error."""


class SchedulerConfig(Section):
    """`policy.megatron_cfg.scheduler`: learning rate and weight decay over time, in RL steps (each may have several
    optimizer steps) or, in SFT, in optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the decay from lr to min_lr, after the warm-up."""
    lr_decay_iters: Derived[Positive] = 1000
    """Steps until the learning rate is at min_lr. With lr_decay_style: constant it only limits the warm-up. null: the
    steps of the run, max_num_steps of grpo, dpo or sft, and more than lr_warmup_iters."""
    lr_warmup_iters: NonNegative = 13
    """Steps of linear warm-up from lr_warmup_init to lr."""
    lr_warmup_init: Derived[NonNegativeFloat] = NULL
    """Learning rate of the first step of the warm-up. null: a tenth of optimizer.lr."""
    start_weight_decay: Derived[NonNegativeFloat] = NULL
    """Weight decay at the first step. null: optimizer.weight_decay."""
    end_weight_decay: Derived[NonNegativeFloat] = NULL
    """Weight decay after lr_decay_iters steps. null: optimizer.weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change from start_weight_decay to end_weight_decay."""


class DistributedDataParallelConfig(Section):
    """`policy.megatron_cfg.distributed_data_parallel_config`."""

    grad_reduce_in_fp32: bool = True
    """Sum gradients over micro-batches and data-parallel ranks in float32. false: in policy.precision; with bfloat16
    the gradient then depends on the number of micro-batches by about half a percent."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather the weights that an update changed while the next forward pass runs, layer by layer: between the optimizer
    steps of one step. After the last of them all weights are gathered, for the refit."""


class PeftConfig(Section):
    """`policy.megatron_cfg.peft`: LoRA. The model is frozen, and each linear layer W learns a low-rank update:
    W + alpha / dim x B A. The reference policy is the model without the updates."""

    enabled: Fixed[bool] = False
    """Train adapters instead of the model."""
    target_modules: Fixed[list[str]] = Field(default_factory=list)
    """Linear layers with an adapter: names (linear_qkv, linear_proj, linear_fc1, linear_fc2; in a Mamba2 mixer in_proj,
    out_proj) or patterns of full names ("*.layers.0.*"). []: all."""
    exclude_modules: Fixed[list[str]] = Field(default_factory=list)
    """Linear layers without an adapter, written the same way, such as "*.local_experts.*"."""
    dim: Fixed[Positive] = 8
    """Rank of the update."""
    alpha: Fixed[PositiveFloat] = 32.0
    """The update is scaled by alpha / dim."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which an input feature of A is left out in a step: for all tokens alike, so that log-probs
    before and during training, and recomputed layers, see the same policy on every layout. Engines, validation and
    export use all features."""
    lora_A_init_method: Literal["xavier", "kaiming", "normal"] = "xavier"
    """Initialisation of A. B starts at zero, so that training starts at the model itself."""
    refit: Literal["merged", "adapters"] = "merged"
    """Content of a refit. merged: all weights, with the adapters added. adapters: the adapters alone, which vLLM then
    applies beside the weights that it has loaded from policy.model_name. It has none for experts, and not for every
    kind of layer."""


class MegatronConfig(Section):
    """`policy.megatron_cfg`. Ranks = tensor x pipeline x context x data parallel; the data-parallel size follows from
    the cluster's size."""

    enabled: Literal[True] = True
    """Must be true: the policy is always Megatron-Core."""
    tensor_model_parallel_size: Positive = 1
    """Ranks that share each layer (TP)."""
    pipeline_model_parallel_size: Positive = 1
    """Stages into which the layers are divided (PP)."""
    virtual_pipeline_model_parallel_size: Positive | None = None
    """Model chunks of each stage (VPP): the interleaved schedule, with smaller bubbles and more messages. Needs PP
    above 1. null: 1."""
    context_parallel_size: Positive = 1
    """Ranks that share each sequence (CP). Each computes two chunks, one from the front and one from the back."""
    expert_model_parallel_size: Positive = 1
    """Ranks that share the experts of a layer (EP). EP x ETP must divide TP x CP x DP, the ranks of a pipeline
    stage."""
    expert_tensor_parallel_size: Positive = 1
    """Ranks that share each expert (ETP)."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first pipeline stage. null: an even split."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the last pipeline stage. null: an even split."""
    sequence_parallel: bool = False
    """Split activations by token outside of the tensor-parallel layers. Needs TP above 1."""
    pipeline_dtype: Derived[Literal["bfloat16", "float32"]] = NULL
    """Number format between pipeline stages. Must agree with policy.precision. null: follow it."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """Scope of activation_checkpointing. full: whole layers, of which only the inputs are kept. selective: the
    parts of a layer in recompute_modules."""
    recompute_modules: list[RecomputedPart] | None = None
    """Parts that are recomputed with recompute_granularity: selective. mlp: dense networks. moe: router, routed and
    shared experts; tokens are sent to their experts once more. shared_experts: only these. core_attn: attention without
    its projections, which saves little with the fused kernels of GPUs. null: [core_attn]."""
    empty_unused_memory_level: Literal[0, 1, 2] = 1
    """Free cached device memory when the optimizer moves to the host: 0 only where engines or teachers share the
    device, 1 and 2 always. No effect on CPU."""
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron-Core's TransformerConfig: attention_backend (flash, fused or unfused: the only kernel of
    TransformerEngine's attention), deterministic_mode (true: embeddings and TransformerEngine's attention add gradients
    in a fixed order), batch_p2p_sync (false: do not wait for the device after messages between pipeline stages). Any
    other field is an error."""
    apply_rope_fusion: bool = True
    """Fuse the rotary embedding. Only with TransformerEngine on a GPU, and not for YaRN or latent attention, which its
    kernel does not compute; elsewhere no effect."""
    bias_activation_fusion: bool = True
    """Fuse bias and activation. Only with TransformerEngine on a GPU; elsewhere no effect."""
    gradient_accumulation_fusion: bool = True
    """Add a weight's gradient to its buffer in the product that computes it. Only with TransformerEngine on a GPU;
    elsewhere no effect."""
    freeze_moe_router: bool = True
    """Do not train the expert router. No effect on a dense model."""
    freeze_attention: bool = False
    """Do not train attention, and what takes its place in other layers. For a critic that begins as the policy."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp64"
    """Number format of the expert router's scores. No effect on a dense model."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "sinkhorn"] = "none"
    """Load balancing of the experts. Must be none on a mixture-of-experts model: the others change the log-probs. No
    effect on a dense model."""
    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """Update rate of the router's balancing bias. No effect on a dense model."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens are sent to their experts. allgather pads rows to the longest of all ranks; with PP it is
    read as alltoall, whose results are the same. No effect on a dense model."""
    moe_permute_fusion: bool = True
    """Fuse the reordering of tokens by expert, with TransformerEngine on GPUs. No effect on a dense model."""
    moe_grouped_gemm: bool = True
    """Compute all experts of a rank in one grouped matrix product: on GPUs, in bfloat16, without adapters on experts.
    Otherwise one expert at a time. No effect on a dense model."""
    moe_shared_expert_overlap: bool = False
    """Compute the shared expert while tokens are being sent. No effect on a dense model."""
    dist_ckpt_optim_fully_reshardable: bool = True
    """Write the optimizer state as whole parameters, so that a run resumes on any layout: for this every rank gathers
    the state of its copy of the model in host memory. false: each rank writes and reads its own part, for large models;
    such a checkpoint resumes only with the same TP, PP, EP and ETP. Weights load on any layout."""
    env_vars: Annotated[dict[str, VariableText], OffWhenNull] = Field(default_factory=dict)
    """Environment variables of the policy's ranks, such as {NCCL_NVLS_ENABLE: "0"}. With TP above 1 on GPUs the ranks
    have CUDA_DEVICE_MAX_CONNECTIONS: "1" too, unless it is set here. Not for secrets."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    peft: Annotated[PeftConfig, OffWhenNull] = Field(default_factory=PeftConfig)
    """LoRA."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """Learning rate and weight decay over time."""
    distributed_data_parallel_config: DistributedDataParallelConfig = Field(
        default_factory=DistributedDataParallelConfig
    )
    """Gradient reduction over the data-parallel ranks."""

    @property
    def gathers_tokens(self) -> bool:
        """Whether experts get their tokens by allgather, which needs rows of one length: pipeline stages have none."""
        return self.moe_token_dispatcher_type == "allgather" and self.pipeline_model_parallel_size == 1
