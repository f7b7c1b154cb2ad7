"""The typed configuration of a run: `load_recipe` reads a YAML file, `MasterConfig.model_validate` a dict.

schema/      the sections: every key with its type, default and meaning
derived.py   numbers that follow from a configuration: batch sizes, devices, engines, log-prob passes
yaml_tree.py values that know the file and line they were written in
nemo_rl/     what makes recipes of NeMo RL load
validation/  what must hold between keys, by topic; `MasterConfig`
loading/     YAML files, `defaults:`, overrides, interpolation; prints resolved recipes and the reference
changes.py   what a resumed run changes

Each uses only those above it.

Imports no torch, and of the other rooms only layout/.
"""

from grpo_mcore.layout import DevicePool, Finding
from grpo_mcore.recipe.changes import Change, changes
from grpo_mcore.recipe.derived import (
    MATH_REWARDS,
    RewardWeights,
    batch_equation,
    bin_tokens,
    bins_per_logprob_row,
    compares_distributions,
    data_parallel_size,
    divides_nodes,
    engine_layout,
    engine_nodes,
    engine_pool,
    environment_class,
    exports_model,
    has_greedy_baseline,
    layout_findings,
    model_parallel_size,
    needs_prev,
    needs_reference,
    num_engines,
    own_attention,
    policy_layout,
    policy_pool,
    prompts_per_generation_batch,
    reads_whole_samples,
    reward_weights,
    samples_per_step,
    samples_together,
    scoring_settings,
    shares_prefixes,
    teacher_copies,
    teacher_engines,
    teacher_findings,
    teacher_policies,
    teacher_pools,
    teacher_ranks,
    teacher_settings,
    teacher_weight,
    trains_on_rewards,
    uses_images,
    weights_by_name,
    world_size,
)
from grpo_mcore.recipe.errors import DEFAULT, Problem, RecipeError, nearest, nearest_hint
from grpo_mcore.recipe.loading.load import Recipe, find_recipe, load_recipe, recipe_folders, recipe_name, shown
from grpo_mcore.recipe.loading.merge import is_override
from grpo_mcore.recipe.loading.show import resolved_yaml, without_secrets
from grpo_mcore.recipe.schema.cluster import ClusterConfig, KubernetesConfig, LaunchConfig, SlurmConfig
from grpo_mcore.recipe.schema.data import (
    DATASETS,
    FILE_DATASETS,
    IMAGE_DATASETS,
    IMAGE_PROCESSOR,
    PREFERENCE_DATASETS,
    UNSET_KEYS,
    DataConfig,
    DatasetEntry,
    SamplerConfig,
    dataset_by_name,
    extract_necessary_env_names,
    unknown_dataset,
)
from grpo_mcore.recipe.schema.distillation import (
    DivergenceConfig,
    DivergenceKind,
    OnPolicyDistillationConfig,
    TeacherConfig,
)
from grpo_mcore.recipe.schema.evaluation import EvalConfig
from grpo_mcore.recipe.schema.fine_tuning import DPOConfig, FineTuningConfig, SFTConfig
from grpo_mcore.recipe.schema.generation import GenerationConfig, VllmConfig
from grpo_mcore.recipe.schema.grpo import (
    AdvEstimatorConfig,
    AsyncGRPOConfig,
    ClippedPGLossConfig,
    GRPOConfig,
    KLType,
    RewardScalingConfig,
    RewardShapingConfig,
    TurnCreditConfig,
    policy_term_options,
)
from grpo_mcore.recipe.schema.master import (
    FINE_TUNING,
    Algorithm,
    RecipeSections,
    algorithm_of,
    only_evaluates,
    runs_grpo,
    settle_algorithm,
)
from grpo_mcore.recipe.schema.megatron import MegatronConfig, OptimizerConfig, PeftConfig, SchedulerConfig
from grpo_mcore.recipe.schema.outputs import CheckpointingConfig, GRPOLoggerConfig
from grpo_mcore.recipe.schema.policy import PolicyConfig, SequencePackingConfig, TokenizerConfig
from grpo_mcore.recipe.schema.ppo import GAEConfig, PPOConfig, ValueLossConfig
from grpo_mcore.recipe.schema.section import CustomCode, Section
from grpo_mcore.recipe.validation.run import VALIDATION_METRICS, unknown_validation_metric
from grpo_mcore.recipe.validation.validate import MasterConfig, checked_loss
