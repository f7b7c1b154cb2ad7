"""`policy.megatron_cfg`: layout, memory, optimizer and learning rate of the Megatron-Core policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_mcore.recipe.section import (
    NonNegative,
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    PositiveFloat,
    Probability,
    Section,
)


class OptimizerConfig(Section):
    """`policy.megatron_cfg.optimizer`. Read by parallel/."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW where weight_decay is not 0."""
    lr: PositiveFloat = 5.0e-6
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: NonNegativeFloat = 5.0e-7
    """Learning rate at the end of the decay."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, per optimizer step and unit of learning rate."""
    bf16: bool | None = None
    """Weights in bfloat16 with float32 copies in the optimizer. null: as policy.precision, with which it must
    agree."""
    params_dtype: Literal["float32"] = "float32"
    """Number format of the optimizer's copy of the weights."""
    adam_beta1: Probability = 0.9
    """Decay of Adam's mean of the gradients."""
    adam_beta2: Probability = 0.999
    """Decay of Adam's mean of the squared gradients."""
    adam_eps: PositiveFloat = 1.0e-8
    """Added to the root of Adam's second moment."""
    sgd_momentum: Probability = 0.9
    """Momentum. Only for optimizer sgd."""
    use_distributed_optimizer: bool = True
    """Split the optimizer state over the data-parallel ranks. false: not supported yet."""
    use_precision_aware_optimizer: bool = False
    """Optimizer state in lower precision. No effect yet."""
    clip_grad: NonNegativeFloat | None = None
    """The same as policy.max_grad_norm, and null takes its value; two different values are an error."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer state on the host and step there. Not supported yet."""
    optimizer_offload_fraction: Probability = 0.0
    """Share of the optimizer state that is kept on the host. Not supported yet."""


class SchedulerConfig(Section):
    """`policy.megatron_cfg.scheduler`: learning rate and weight decay over time, counted in steps (turns of
    the RL loop, however many optimizer steps each has; in SFT a step is an optimizer step). Read by
    parallel/."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the decay from lr to min_lr, after the warm-up."""
    lr_decay_iters: Positive = 1000
    """Steps until the learning rate is at min_lr. With constant it only bounds the warm-up."""
    lr_warmup_iters: NonNegative = 13
    """Steps of linear warm-up from lr_warmup_init to lr."""
    lr_warmup_init: NonNegativeFloat = 5.0e-7
    """Learning rate of the first step of the warm-up."""
    start_weight_decay: NonNegativeFloat | None = None
    """Weight decay at the first step. null: optimizer.weight_decay."""
    end_weight_decay: NonNegativeFloat | None = None
    """Weight decay after lr_decay_iters steps. null: optimizer.weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change from start_weight_decay to end_weight_decay."""


class DistributedDataParallelConfig(Section):
    """`policy.megatron_cfg.distributed_data_parallel_config`. Read by parallel/."""

    grad_reduce_in_fp32: bool = True
    """Sum gradients over micro-batches and data-parallel ranks in float32. false: in policy.precision; in bfloat16 the
    gradient then depends on how many micro-batches there are, by half a percent or so."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = True
    """Gather updated weights while the next forward pass already runs. No effect yet: a refit reads the weights right
    after the step, and must find them whole."""


class PeftConfig(Section):
    """`policy.megatron_cfg.peft`: LoRA. The model is frozen, and each linear layer W learns an addition of low rank:
    W + alpha / dim x B A. The engines get both in one; the reference policy is the model without the additions."""

    enabled: bool = False
    """Train adapters instead of the model. Read by parallel/."""
    target_modules: list[str] = Field(default_factory=list)
    """Linear layers with an adapter: names (linear_qkv, linear_proj, linear_fc1, linear_fc2; of a Mamba2 mixer in_proj,
    out_proj), or patterns of full names ("*.layers.0.*"). []: all. Read by families/."""
    exclude_modules: list[str] = Field(default_factory=list)
    """The same, of those that get none, such as "*.local_experts.*". Read by families/."""
    dim: Positive = 8
    """Rank of the addition. Read by families/."""
    alpha: PositiveFloat = 32.0
    """The addition is scaled by alpha / dim. Read by families/."""
    dropout: NonNegativeFloat = 0.0
    """Only 0: with dropout, the log-probs before and in training would differ."""
    lora_A_init_method: Literal["xavier", "kaiming", "normal"] = "xavier"
    """How A starts. Read by parallel/."""
    lora_B_init_method: Literal["zero"] = "zero"
    """B starts at zero: the first step is the model's own."""


class MegatronConfig(Section):
    """`policy.megatron_cfg`. Ranks = tensor x pipeline x context x data parallel; the data-parallel size is
    what the cluster leaves. Read by parallel/."""

    enabled: Literal[True] = True
    """The policy is always Megatron-Core."""
    tensor_model_parallel_size: Positive = 1
    """Ranks that share each layer (TP)."""
    pipeline_model_parallel_size: Positive = 1
    """Stages that the layers are cut into (PP)."""
    virtual_pipeline_model_parallel_size: Positive | None = None
    """Model chunks that each stage holds (VPP): the interleaved schedule, with smaller bubbles and more messages. Needs
    PP above 1. null: 1."""
    context_parallel_size: Positive = 1
    """Ranks that share each sequence (CP): each computes two chunks of it, one from the front and one from the back."""
    expert_model_parallel_size: Positive = 1
    """Ranks that share the experts of a layer (EP). They are the ranks of a pipeline stage, dealt out anew: EP x ETP
    must divide TP x CP x DP."""
    expert_tensor_parallel_size: Positive = 1
    """Ranks that share each expert (ETP)."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first pipeline stage. null: an even split."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the last pipeline stage. null: an even split."""
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions by token too. Needs TP above 1."""
    pipeline_dtype: Literal["bfloat16", "float32"] | None = None
    """Number format between pipeline stages. null: policy.precision, with which it must agree."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """What activation_checkpointing computes again. selective: not supported yet."""
    recompute_modules: list[str] | None = None
    """Modules of the selective recomputation. Not supported yet."""
    empty_unused_memory_level: Literal[0, 1, 2] = 1
    """Return cached device memory when the engines take over: 0 never, otherwise always. No effect on CPU."""
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the family's Megatron-Core settings. Not supported yet."""
    apply_rope_fusion: bool = True
    """Fused rotary embedding, with TransformerEngine on a GPU; elsewhere no effect."""
    bias_activation_fusion: bool = True
    """Fused bias and activation, with TransformerEngine on a GPU; elsewhere no effect."""
    gradient_accumulation_fusion: bool = False
    """Fused weight-gradient accumulation, with TransformerEngine on a GPU; elsewhere no effect."""
    freeze_moe_router: bool = True
    """Do not train the expert router. No effect on a dense model."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp64"
    """Number format of the expert router's scores. No effect on a dense model."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "sinkhorn"] = "none"
    """Load balancing of the experts. Only none: the others change the log-probs. No effect on a dense
    model."""
    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """Update rate of the router's balancing bias. No effect on a dense model."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens travel to their experts. allgather pads rows to the longest of all ranks, and does not go with PP. No
    effect on a dense model."""
    moe_permute_fusion: bool = False
    """Fused reordering of tokens by expert where the device has the kernel. No effect on a dense model."""
    moe_grouped_gemm: bool = True
    """All experts of a rank in one matrix product where the device has it. No effect on a dense model."""
    moe_shared_expert_overlap: bool = False
    """Compute the shared expert while tokens travel. No effect on a dense model."""
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
