"""Environments by name or by import path ("package.module:Class" or "package.module.Class").

Verifier processes import this module, so it imports neither pydantic, the recipe nor torch: these would take most of
the time that such a process needs to start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo_mcore.base import imports
from grpo_mcore.environments.errors import EnvironmentConfigError

if TYPE_CHECKING:
    from grpo_mcore.environments.interfaces import EnvironmentBase

_ENVIRONMENTS: dict[str, str] = {
    "code": "grpo_mcore.environments.code.environment:CodeEnvironment",
    "math": "grpo_mcore.environments.math.math_environment:MathEnvironment",
    "nemo_gym": "grpo_mcore.environments.gym.nemo_gym:NemoGymEnvironment",
    "reward_model": "grpo_mcore.environments.reward_model.reward_model:RewardModelEnvironment",
    "rules": "grpo_mcore.environments.rules.rule_environment:RuleEnvironment",
    "verifiers": "grpo_mcore.environments.verifiers.environment:VerifiersEnvironment",
    **dict.fromkeys(
        ("vlm", "clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny"),
        "grpo_mcore.environments.rules.rule_environment:RuleEnvironment",
    ),
    "sliding_puzzle": "examples.sliding_puzzle.environment:SlidingPuzzleEnvironment",
}


def register_env(env_name: str, import_path: str) -> None:
    """Make `import_path` known as `env_name` in this process, for `data.*.env_name` and the key under `env`."""
    known = _ENVIRONMENTS.get(env_name, import_path)
    if known != import_path:
        raise EnvironmentConfigError(f"environment name {env_name!r} is taken by {known}; take another")
    _ENVIRONMENTS[env_name] = import_path


def create_env_class(env_name: str) -> tuple[type[EnvironmentBase], dict[str, float]]:
    """Return the class behind a name or an import path, and what one instance needs: {"cpus": ..., "gpus": ...}."""
    path = _ENVIRONMENTS.get(env_name)
    if path is None:
        if not {".", ":"} & set(env_name):
            from grpo_mcore.recipe import nearest

            near = nearest(env_name, _ENVIRONMENTS)
            hint = f"did you mean {near!r}? " if near else ""
            raise EnvironmentConfigError(
                f"unknown environment {env_name!r}: {hint}known are {sorted(_ENVIRONMENTS)}, "
                f"or an import path such as 'package.module:Class'"
            )
        path = env_name
    cls = import_by_path(path, what="environment")
    if hasattr(cls, "__ray_metadata__"):  # NeMo RL's classes are Ray actors: @ray.remote
        cls = cls.__ray_metadata__.modified_class.__ray_actor_class__
    from grpo_mcore.environments.interfaces import EnvironmentBase

    if not (isinstance(cls, type) and issubclass(cls, EnvironmentBase)):
        kind = f"the class {cls.__name__}" if isinstance(cls, type) else type(cls).__name__
        raise EnvironmentConfigError(
            f"the environment {path!r} is {kind}, which does not derive from EnvironmentInterface of "
            "grpo_mcore.environments.interfaces; a reward function is a component of env.rules: {type: function, path}"
        )
    return cls, dict(cls.needs)


def create_env(env_name: str, env_config: Mapping[str, Any] | None = None) -> EnvironmentBase:
    """Build an environment in this process. `env_config` is the recipe's section `env.<env_name>`."""
    cls, _ = create_env_class(env_name)
    return cls(env_config)


def import_by_path(path: str, what: str) -> Any:
    """Return the object at an import path; `what` names it in the EnvironmentConfigError."""
    return imports.import_by_path(path, what, EnvironmentConfigError)
