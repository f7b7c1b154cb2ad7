"""The typed configuration. `load_recipe` reads YAML, `MasterConfig.model_validate` a dict; neither needs
torch."""

from grpo_mcore.recipe.batch_sizes import (
    batch_equation,
    data_parallel_size,
    model_parallel_size,
    prompts_per_generation_batch,
    samples_per_step,
    world_size,
)
from grpo_mcore.recipe.cluster import ClusterConfig
from grpo_mcore.recipe.data import DataConfig, DatasetEntry
from grpo_mcore.recipe.errors import Problem, RecipeError
from grpo_mcore.recipe.generation import GenerationConfig, VllmConfig
from grpo_mcore.recipe.grpo import AsyncGRPOConfig, GRPOConfig, RewardScalingConfig, RewardShapingConfig
from grpo_mcore.recipe.launch import KubernetesConfig, LaunchConfig, SlurmConfig
from grpo_mcore.recipe.load import Recipe, find_recipe, load_recipe
from grpo_mcore.recipe.loss import ClippedPGLossConfig
from grpo_mcore.recipe.master import MasterConfig
from grpo_mcore.recipe.megatron import MegatronConfig, OptimizerConfig, SchedulerConfig
from grpo_mcore.recipe.outputs import CheckpointingConfig, GRPOLoggerConfig
from grpo_mcore.recipe.policy import PolicyConfig, SequencePackingConfig, TokenizerConfig
from grpo_mcore.recipe.pools import DevicePool, engine_nodes, engine_pool, num_engines, policy_pool
from grpo_mcore.recipe.section import Section
from grpo_mcore.recipe.sft import SFTConfig
from grpo_mcore.recipe.show import resolved_yaml

__all__ = [
    "AsyncGRPOConfig",
    "CheckpointingConfig",
    "ClippedPGLossConfig",
    "ClusterConfig",
    "DataConfig",
    "DatasetEntry",
    "DevicePool",
    "GRPOConfig",
    "GRPOLoggerConfig",
    "GenerationConfig",
    "KubernetesConfig",
    "LaunchConfig",
    "MasterConfig",
    "MegatronConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "Problem",
    "Recipe",
    "RecipeError",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "SFTConfig",
    "SchedulerConfig",
    "Section",
    "SlurmConfig",
    "SequencePackingConfig",
    "TokenizerConfig",
    "VllmConfig",
    "batch_equation",
    "data_parallel_size",
    "engine_nodes",
    "engine_pool",
    "find_recipe",
    "load_recipe",
    "model_parallel_size",
    "num_engines",
    "policy_pool",
    "prompts_per_generation_batch",
    "samples_per_step",
    "resolved_yaml",
    "world_size",
]
