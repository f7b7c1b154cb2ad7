"""Recipes of little more than the required keys."""

from typing import Any

from grpo_mcore.recipe import MasterConfig


def small_recipe(prompts: int = 2, generations: int = 4, **sections: Any) -> MasterConfig:
    """Return a recipe of steps of `prompts` x `generations` samples, in one optimizer step unless the section policy
    says otherwise. `sections`: more keys."""
    required: dict[str, Any] = {
        "policy": {"model_name": "m", "train_global_batch_size": prompts * generations},
        "data": {"train": {"data_path": "x.jsonl"}},
        "grpo": {"num_prompts_per_step": prompts, "num_generations_per_prompt": generations},
    }
    more = {name: required.get(name, {}) | section for name, section in sections.items()}
    return MasterConfig.model_validate(required | more)
