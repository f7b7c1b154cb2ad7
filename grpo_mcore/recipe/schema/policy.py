"""`policy`: the model that is trained, its batch sizes and how its batches are packed."""

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.generation import GenerationConfig
from grpo_mcore.recipe.schema.megatron import MegatronConfig
from grpo_mcore.recipe.schema.section import (
    NULL,
    Derived,
    FilledText,
    Fixed,
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    PositiveFloat,
    Section,
)

PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing", "balanced"
]


class TokenizerConfig(Section):
    """`policy.tokenizer`: the tokenizer and its chat template."""

    name: Derived[FilledText] = NULL
    """Hugging Face name or folder of the tokenizer. null: policy.model_name."""
    chat_template: str | None = None
    """Chat template (Jinja text or a file with it) that replaces the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables for the chat template, such as {enable_thinking: true}."""


class SharedPrefixConfig(Section):
    """`policy.sequence_packing.shared_prefix`: samples that begin with the same tokens, such as those of a prompt's
    group and the branches of a conversation."""

    enabled: bool | None = None
    """Compute what samples of a bin have in common at their start once, in training and in the log-prob passes, in the
    steps where this saves at least a tenth of the tokens. Such samples are packed together. null: true on CPU and on
    GPUs without TransformerEngine, whose attention this replaces; needs sequence_packing."""
    min_tokens: Annotated[int, Field(gt=0, multiple_of=32)] = 32
    """Samples share prefixes in whole blocks of this many tokens: a multiple of 32."""


class SequencePackingConfig(Section):
    """`policy.sequence_packing`: several sequences in one bin of tokens, instead of padding."""

    enabled: bool = True
    """Pack sequences into bins. false: padded micro-batches."""
    train_mb_tokens: Derived[Positive] = NULL
    """Capacity of a training bin, in tokens. null: max_total_sequence_length x train_micro_batch_size."""
    logprob_mb_tokens: Derived[Positive] = NULL
    """Capacity of a row of the log-prob passes, in tokens. A row joins as many training bins as fit, at least one.
    null: max_total_sequence_length x logprob_batch_size."""
    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"
    """Packing algorithm."""
    shared_prefix: SharedPrefixConfig = Field(default_factory=SharedPrefixConfig)
    """Common starts of samples, computed once."""


class DynamicBatchingConfig(Section):
    """`policy.dynamic_batching`: micro-batches of samples of similar length, bounded by their padded tokens. Instead of
    sequence_packing, whose bins are fuller."""

    enabled: bool = False
    """Sort samples by length and fill micro-batches up to a token budget."""
    train_mb_tokens: Derived[Positive] = NULL
    """Budget of a training micro-batch: its number of samples times the longest, rounded up. null:
    max_total_sequence_length x train_micro_batch_size."""
    logprob_mb_tokens: Derived[Positive] = NULL
    """Budget of a row of the log-prob passes. A row joins as many training micro-batches as fit, at least one. null:
    max_total_sequence_length x logprob_batch_size."""
    sequence_length_round: Positive = 64
    """Lengths count as the next multiple of this many tokens. Rows are computed without padding."""


class RouterReplayConfig(Section):
    """`policy.router_replay`: training with the experts that the engine chose."""

    enabled: bool = False
    """Record the engine's expert choices and replay them in training and in the log-prob passes."""


class PolicyConfig(Section):
    """`policy`: the model that is trained."""

    model_name: FilledText
    """Hugging Face name or folder of the model."""
    is_vlm: bool = False
    """Whether prompts of agents (NeMo Gym, verifiers) may have images. Other datasets say so by their processor."""
    head: Literal["tokens", "value"] = "tokens"
    """Output of the model's last layer. tokens: a logit for each token. value: one number, for a critic or a reward
    model, whose sections set it."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """The tokenizer and its chat template."""
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those of the model's Hugging Face config, for the policy and the engines, such as
    {max_position_embeddings: 16384}. Exported models have them too."""
    train_global_batch_size: Positive = 512
    """Samples of one optimizer step, over all data-parallel ranks."""
    train_micro_batch_size: Positive = 4
    """Samples of one micro-batch. With packing it only sets the default bin capacity."""
    logprob_batch_size: Derived[Positive] = NULL
    """Samples of one forward pass for log-probs. With packing it only sets the default row capacity. Without, a pass
    joins whole micro-batches of training, at least one. null: train_micro_batch_size."""
    max_total_sequence_length: Positive = 512
    """Maximum length of prompt plus answer, in tokens."""
    precision: Fixed[Literal["auto", "bfloat16", "float32"]] = "auto"
    """Number format of weights and activations. auto: bfloat16, but float32 on CPUs without instructions for bfloat16,
    where that takes many times as long. A run has what its start chose: a resumed one keeps it on any machine."""
    logprob_chunk_size: Positive | None = 1024
    """Number of tokens whose logits exist at one time when log-probs are computed. null: 1024."""
    offload_optimizer_for_logprob: bool = False
    """Keep gradients and optimizer state on the host during the log-prob passes too. No effect on CPU."""
    offload_optimizer_for_generation: bool = True
    """Move the optimizer state to the host while colocated engines generate. false: it stays on the device, which saves
    the way there and back where memory suffices (`grpo-mcore plan`). Gradients are freed in any case. No effect on
    CPU."""
    refit_buffer_size_gb: PositiveFloat = 0.5
    """Size of the refit buffer in GiB."""
    refit_verify: Literal["off", "sample", "full"] = "sample"
    """Checksums of the weights that a refit moved, compared before the engines use them. off: none. sample: all weights
    in an engine's first refit, later a rotating sixteenth of the parameters. full: all weights."""
    refit_parity: Literal["sample"] | Annotated[float, Field(gt=1)] | None = "sample"
    """Comparison of the log-probs of engines and policy on a few samples after a refit. sample: so seldom that it costs
    at most 0.5 % of the run's time, first after some 200 steps; a mean of exp|difference| above 1.05 raises an alarm. A
    number: after every refit, which takes as long as a small step; a larger mean ends the run. null: none."""
    make_sequence_length_divisible_by: Positive | None = None
    """Pad packed rows to multiples of this many tokens, besides the multiple that the layout needs. null: only the
    layout's."""
    max_grad_norm: NonNegativeFloat | None = 1.0
    """Maximum global L2 norm of the gradients; larger ones are scaled down. null or 0: no clipping."""
    deterministic: bool = False
    """Compute each sample in a row of its own and add the gradients in a fixed order, so that other micro-batches, bins
    and one or two data-parallel ranks give the same bits. Needs precision float32, and ranks on CPU. Costs what packing
    saves: docs/disagreement.md."""
    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    """Packing of sequences into bins."""
    dynamic_batching: Annotated[DynamicBatchingConfig, OffWhenNull] = Field(default_factory=DynamicBatchingConfig)
    """Micro-batches bounded by tokens."""
    router_replay: Annotated[RouterReplayConfig, OffWhenNull] = Field(default_factory=RouterReplayConfig)
    """Replay of the engine's expert choices."""
    dtensor_as_megatron: bool = True
    """Read the DTensor policy of a recipe of NeMo RL (dtensor_cfg or automodel_cfg, optimizer, scheduler) as
    megatron_cfg. false: refuse such a recipe."""
    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    """The Megatron-Core policy: layout, optimizer, learning rate."""
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    """How the engines generate."""
