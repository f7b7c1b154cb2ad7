"""Say in a few words what a recipe trains: algorithm, loss, KL, entropy, adapters and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.recipe.derived import Algorithm, environment_class, trains_on_rewards
from grpo_mcore.recipe.loading.load import recipe_folders
from grpo_mcore.recipe.schema.data import extract_necessary_env_names
from grpo_mcore.recipe.schema.grpo import ClippedPGLossConfig
from grpo_mcore.recipe.validation.validate import MasterConfig


def headline(config: MasterConfig, algorithm: Algorithm = "grpo", rows: Sequence[int | None] = ()) -> dict[str, str]:
    """Return the lines of a run's header that say what it trains, by name. `rows`: of the training and the validation
    data; None where there is none."""
    lines = {}
    if algorithm == "grpo":
        lines = {"algorithm": _algorithm(config), "loss": _loss(config.loss_fn)}
    elif algorithm == "dpo":
        lines = {"loss": f"{config.dpo.preference_loss} of pairs, beta {config.dpo.reference_policy_kl_penalty:g}"}
    elif algorithm == "rm":
        lines = {"loss": f"{config.rm.reward_model_type.replace('_', '-')} of the score at a conversation's end"}
    elif not config.on_policy_distillation.enabled:
        lines = {"loss": "negative log-likelihood of the answers' tokens"}
    if (peft := config.policy.megatron_cfg.peft).enabled:
        lines["adapters"] = f"LoRA of rank {peft.dim}, alpha {peft.alpha:g}; the model is frozen"
    if algorithm == "grpo" and trains_on_rewards(config):
        names = extract_necessary_env_names(config.data) or config.env
        lines["rewards"] = "; ".join(_rewards(name, config.env.get(name, {})) for name in names)
    counts = (f"{count:,} rows to {verb}" for count, verb in zip(rows, ("train", "validate"), strict=False) if count)
    lines["data"] = ", ".join(counts)
    return {name: text for name, text in lines.items() if text}


def preset_of(config: MasterConfig) -> str | None:
    """Return the preset of recipes/presets/ whose values the recipe has, that with most of them; None if none fits."""
    folder = next((path / "presets" for path in recipe_folders() if (path / "presets").is_dir()), Path("presets"))
    values = config.model_dump()
    fitting = [
        (sum(map(len, tree.values())), name)
        for name, tree in _presets(folder.resolve())
        if "loss_fn" in tree and _has(values, tree)  # others choose no objective
    ]
    return max(fitting)[1] if fitting else None


@cache
def _presets(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(file.stem, yaml.safe_load(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.yaml"))]


def _has(values: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
    """Return whether all leaves of a preset are among the values of a recipe."""
    return all(
        _has(values.get(name) or {}, item) if isinstance(item, Mapping) else values.get(name) == item
        for name, item in tree.items()
        if name != "_override_" and not str(item).startswith("${")  # the value of another key
    )


def _algorithm(config: MasterConfig) -> str:
    estimator, grpo = config.grpo.adv_estimator, config.grpo
    advantages = estimator.path or f"advantages by {estimator.name}"
    if config.ppo.enabled:
        advantages = "advantages by gae with a critic"
    preset = preset_of(config)
    parts = [f"preset {preset}, {advantages}" if preset else advantages]
    if grpo.use_dynamic_sampling:
        parts.append("dynamic sampling")
    if grpo.reward_shaping.enabled:
        parts.append("shaped rewards")
    return ", ".join(parts)


def _loss(loss: ClippedPGLossConfig) -> str:
    """Return ratio and clip, average, KL and entropy of a loss."""
    bounds = f"{1 - loss.ratio_clip_min:g} to {1 + loss.ratio_clip_max:g}"
    if loss.path:
        kind = loss.path
    elif loss.policy_term != "clip":
        kind = f"policy term {loss.policy_term}"
    elif loss.disable_ppo_ratio:
        kind = "policy gradient without a ratio"
    elif loss.use_cispo:
        kind = f"CISPO, weights clipped to {bounds}"
    else:
        kind = f"ratio of {'sequences' if loss.sequence_level_importance_ratios else 'tokens'} clipped to {bounds}"
    average = "tokens" if loss.token_level_loss else "sequences"
    where = " in the reward" if loss.use_kl_in_reward else ""
    penalty = loss.reference_policy_kl_penalty
    kl = f"KL penalty {penalty:g} ({loss.reference_policy_kl_type}){where}" if penalty else "no KL penalty"
    entropy = f"entropy bonus {loss.entropy_coeff:g}" if loss.entropy_coeff else "no entropy bonus"
    return f"{kind}, averaged over {average}; {kl}, {entropy}"


def _rewards(name: str, section: Mapping[str, Any]) -> str:
    """Return an environment, with the names of its components where it has some."""
    kind, rest = environment_class(name, section)
    parts = rest.get("components")
    listed = f" ({', '.join(map(str, parts))})" if isinstance(parts, Mapping) else ""
    return f"{name}{listed}" if kind == name else f"{name}: {kind}{listed}"
