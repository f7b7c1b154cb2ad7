"""Import paths of 0.2 that recipes and scripts may still name, and where their code lives now."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "algorithms.run": "driver.run.run",
    "algorithms.setup": "driver.run.setup",
    "algorithms.lifecycle.grpo_run": "driver.run.run",
    "data.arithmetic": "tools.demo.arithmetic",
    "environments.instructions": "environments.rules.instructions",
    "environments.math_environment": "environments.math.math_environment",
    "environments.reward_functions": "environments.rules.reward_functions",
    "environments.nemo_gym": "environments.gym.nemo_gym",
    "objective.evaluation": "objective.metrics",
    "objective.kl_in_reward": "objective.kl",
    "objective.rewards": "objective.advantages",
    "processes": "base.processes",
    "recipe.master": "recipe.validation.validate",
    "recipe.schema.launch": "recipe.schema.cluster",
    "recipe.schema.loss": "recipe.schema.grpo",
    "recipe.schema.rehearsal": "recipe.schema.evaluation",
    "refit.sender": "refit.policy_side.sender",
}
"""Module of 0.2 -> module, both below grpo_mcore."""


class _Finder:
    """Gives a moved module under its former name, too. It is imported when something asks for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        _, _, name = fullname.partition("grpo_mcore.")
        is_package = any(former.startswith(f"{name}.") for former in MOVED)
        if name not in MOVED and not is_package:
            return None
        return ModuleSpec(fullname, self, is_package=is_package)  # type: ignore[arg-type]  # a Loader costs 28 ms of import

    def create_module(self, spec: ModuleSpec) -> None:
        """Let `import` make the module in its usual way."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition("grpo_mcore.")[2]
        if name in MOVED:
            sys.modules[module.__name__] = import_module(f"grpo_mcore.{MOVED[name]}")


def install() -> None:
    """Let `import` find the moved modules, after everything that exists under its name."""
    sys.meta_path.append(_Finder())
