"""`on_policy_distillation`: teachers that score the student's own samples. Keys are those of NeMo RL."""

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import (
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    PositiveFloat,
    PositiveShare,
    Probability,
    Section,
)

TeacherBackend = Literal["megatron", "vllm"]


class TeacherConfig(Section):
    """How a teacher's ranks are laid out and what one of their passes holds."""

    backend: TeacherBackend = "megatron"
    """Program that computes a teacher's log-probs. megatron: ranks like the policy's, for every loss. vllm: vLLM
    engines, as many as fit its devices (on CPU 1 beside the policy), which score the sampled tokens: no divergence,
    top_k or top_p."""
    tensor_model_parallel_size: Positive | None = None
    """Tensor-parallel size. null: the policy's; of a vllm teacher, that of policy.generation.vllm_cfg."""
    pipeline_model_parallel_size: Positive | None = None
    """Pipeline stages. null: the policy's; of a vllm teacher, those of policy.generation.vllm_cfg."""
    context_parallel_size: Positive | None = None
    """Context-parallel size; 1 for a vllm teacher. null: the policy's, or 1."""
    expert_model_parallel_size: Positive | None = None
    """Expert-parallel size; 1 for a teacher without experts. null: the policy's; of a vllm teacher, that of
    policy.generation.vllm_cfg."""
    expert_tensor_parallel_size: Positive | None = None
    """Tensor-parallel size of the experts; 1 for a vllm teacher. null: the policy's, or 1."""
    precision: Literal["bfloat16", "float32"] | None = None
    """Number format of the weights. null: the policy's."""
    micro_batch_size: Positive | None = None
    """Samples of one forward pass. With packing it sets the capacity of a row, in multiples of
    policy.max_total_sequence_length. null: as in the policy's log-prob passes. No effect on a vllm teacher."""
    megatron_cfg_overrides: dict[str, Any] = Field(default_factory=dict)
    """Further values that replace those of policy.megatron_cfg for this teacher. No effect on a vllm teacher."""
    gpu_memory_utilization: PositiveShare | None = None
    """Share of a GPU's memory that an engine of a vllm teacher may take. null: that of policy.generation.vllm_cfg."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vllm.EngineArgs for the engines of a vllm teacher."""
    num_nodes: Positive | None = None
    """Nodes that it has to itself, of cluster.num_nodes. null: 1. No effect unless non_colocated_teachers.enabled."""
    gpus_per_node: Positive | None = None
    """Devices of each of these nodes. null: cluster.gpus_per_node."""


class TeacherPlacesConfig(Section):
    """`on_policy_distillation.non_colocated_teachers`: where teachers live and how they are laid out."""

    enabled: bool = False
    """Give each teacher nodes of its own, of those of the cluster: its weights stay there, and the policy's stay where
    they are. false: teachers share the policy's devices, in turns."""
    default_teacher_cfg: TeacherConfig = Field(default_factory=TeacherConfig)
    """Layout of every teacher; also of those that share the policy's devices."""
    teacher_overrides: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Values of single teachers, by alias, that replace those of default_teacher_cfg; in megatron_cfg_overrides and
    vllm_kwargs key by key."""


DivergenceKind = Literal["forward", "reverse", "mixed", "jsd"]


class DivergenceConfig(Section):
    """`on_policy_distillation.divergence`: learn from the teacher's whole distribution, not from sampled tokens alone.
    The teacher sends hidden states, which the policy's ranks project with the teacher's output layer."""

    enabled: bool = False
    """The loss is the mean divergence over trained tokens, in place of loss_fn. Needs grpo.adv_estimator.name: opd and
    one teacher."""
    kl_type: DivergenceKind = "reverse"
    """forward: KL(teacher || policy). reverse: KL(policy || teacher). mixed: a weighted sum of both. jsd: generalised
    Jensen-Shannon (arXiv 2306.13649)."""
    mixed_kl_weight: Probability = 0.5
    """Share of the forward KL. Only for mixed."""
    jsd_beta: Probability = 0.5
    """Share of the teacher in the mixture. 0 is forward, 1 is reverse. Only for jsd."""
    topk_logits_k: Positive | None = None
    """Compare only this many of the teacher's most likely tokens. null: the whole vocabulary."""
    zero_outside_topk: bool = False
    """With topk_logits_k: keep the policy's whole distribution and take the teacher's log-prob outside its k tokens as
    -100. false: both are distributions over the k tokens."""
    temperature: PositiveFloat = 1.0
    """Temperature of both distributions in the loss."""


class OnPolicyDistillationConfig(Section):
    """`on_policy_distillation`: teachers score the student's samples, token by token. The advantage of a token is the
    log-prob of the teacher minus the student's from before the step (arXiv 2601.02780, equation 8)."""

    enabled: bool = False
    """Let teachers score the samples. Needs grpo.adv_estimator.name: opd, or another estimator with opd_weight."""
    teacher_model_by_agent_name: dict[str, str] = Field(default_factory=dict)
    """Folder or Hugging Face name of each teacher, by alias. A sample's teacher is the one whose alias is the name of
    the NeMo Gym agent that produced it, or else of its task."""
    default_teacher_alias: str | None = None
    """Alias of the teacher of all other samples. null: that of the only teacher."""
    strict_agent_name_match: bool = False
    """Refuse samples whose agent or task is not an alias, instead of giving them the default teacher."""
    deduplicate_shared_teacher_checkpoints: bool = True
    """Load a model once if several aliases name it with one layout."""
    use_orm_advantage: bool = False
    """Add the advantage of the rewards (estimator grpo) to that of the teacher, with weight orm_advantage_weight. Only
    for the estimator opd."""
    orm_advantage_weight: NonNegativeFloat = 1.0
    """Weight of the rewards' advantage. No effect without use_orm_advantage."""
    divergence: Annotated[DivergenceConfig, OffWhenNull] = Field(default_factory=DivergenceConfig)
    """Loss over the whole vocabulary."""
    non_colocated_teachers: Annotated[TeacherPlacesConfig, OffWhenNull] = Field(default_factory=TeacherPlacesConfig)
    """Where teachers live and how they are laid out."""
