"""`MasterConfig`: the whole recipe as one typed object."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from grpo_mcore.recipe.cluster import ClusterConfig
from grpo_mcore.recipe.data import DataConfig
from grpo_mcore.recipe.grpo import GRPOConfig
from grpo_mcore.recipe.launch import LaunchConfig
from grpo_mcore.recipe.loss import ClippedPGLossConfig
from grpo_mcore.recipe.outputs import CheckpointingConfig, GRPOLoggerConfig
from grpo_mcore.recipe.policy import PolicyConfig
from grpo_mcore.recipe.section import Section
from grpo_mcore.recipe.sft import SFTConfig


class MasterConfig(Section):
    """The whole recipe. `model_validate(dict)` accepts both data layouts, makes every check of `load_recipe`
    and raises RecipeError with all findings; the constructor only checks keys and types."""

    policy: PolicyConfig
    """The model that is trained, and how it generates."""
    data: DataConfig
    """Datasets and their loading."""
    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The policy loss."""
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """The RL loop."""
    sft: SFTConfig = Field(default_factory=SFTConfig)
    """Supervised fine-tuning."""
    env: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Environments by name, each with the keys of its class. Read by environments/."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Machines and deadlines."""
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """The job on a cluster that runs this."""
    logger: GRPOLoggerConfig = Field(default_factory=GRPOLoggerConfig)
    """Logs."""
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    """Checkpoints."""

    @classmethod
    def model_validate(cls, obj: Any, **_options: Any) -> Self:
        """The configuration of a plain dict. Raises RecipeError."""
        from grpo_mcore.recipe.validate import validated
        from grpo_mcore.recipe.yaml_tree import Node

        if isinstance(obj, cls):
            return obj
        return validated(Node.of(obj, "")).config  # type: ignore[return-value]

    @model_validator(mode="after")
    def _fill_derived(self) -> Self:
        from grpo_mcore.recipe.derived import fill_derived

        fill_derived(self)
        return self


def runs_grpo(config: MasterConfig) -> bool:
    """Does the recipe describe a GRPO run: not when it has a section `sft` and none `grpo`."""
    return "grpo" in config.model_fields_set or "sft" not in config.model_fields_set
