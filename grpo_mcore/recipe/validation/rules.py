"""Rules between keys whose form is the same, by the tables of rules.yaml."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import (
    environment_class,
    gives_negative_rewards,
    reward_names,
    trains_on_rewards,
    uses_images,
)
from grpo_mcore.recipe.errors import in_yaml, nearest_hint
from grpo_mcore.recipe.schema.master import GYM, VERIFIERS, RecipeSections, algorithm_of, value_at


@cache
def tables() -> dict[str, Any]:
    """Return the tables of rules.yaml by name."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def check_rules(config: RecipeSections) -> Iterator[Finding]:
    """Yield what is wrong by the tables `rules`, `at_most` and `same`, but for rules of the loss by itself."""
    yield from check_rows((row for row in tables()["rules"] if not _is_of_loss(row)), config)
    for keys in tables()["at_most"]:
        value, limit = (value_at(config, key) for key in keys)
        if value is not None and limit is not None and value > limit:
            yield Finding(tuple(keys), f"{value} is above {keys[1]} = {limit}")
    for keys in tables()["same"]:
        value, other = (value_at(config, key) for key in keys)
        if (value or 0) != (other or 0):
            yield Finding(tuple(keys), f"{value} contradicts {keys[1]} = {other}; set only that")


def check_rules_of_loss(loss: Any) -> Iterator[Finding]:
    """Yield what is wrong with the section `loss_fn` by itself, by the table `rules`."""
    yield from check_rows(filter(_is_of_loss, tables()["rules"]), {"loss_fn": loss})


def check_rows(rows: Iterable[dict[str, Any]], config: Any) -> Iterator[Finding]:
    """Yield what is wrong by rows of the form that rules.yaml describes."""
    for row in rows:
        states = {key: state for key, state in row.items() if key not in ("if", "say")}
        if all(_is_in(_value(config, key), state, config) for key, state in {**states, **row.get("if", {})}.items()):
            values = [value_at(config, key) for key in states]
            shown = [value if isinstance(value, str) else in_yaml(value) for value in values]
            yield Finding(tuple(states), row["say"].format(*shown, config=config))


def engine_argument_findings(
    names: Iterable[str], section: str, set_by: Mapping[str, str], decided: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield which arguments of vLLM's EngineArgs, written in `section`, are not passed on, and why."""
    passed = " ".join(tables()["passed"].values()).split()
    for name in names:
        if (setter := set_by.get(name)) is not None:
            yield Finding((f"{section}.{name}",), f"is set by {setter}; set it there")
        elif (reason := decided.get(name)) is not None:
            yield Finding((f"{section}.{name}",), f"cannot be chosen: {reason}; remove it")
        elif name not in passed:
            message = "no argument of vLLM that is known to leave weights, sampling and placement as they are"
            yield Finding((f"{section}.{name}",), message + nearest_hint(name, passed))


def _is_of_loss(row: dict[str, Any]) -> bool:
    return all(key.startswith("loss_fn.") or key in ("if", "say") for key in row)


DERIVED: dict[str, Callable[[RecipeSections], Any]] = {
    "algorithm": algorithm_of,
    "agents": lambda config: any(environment_class(*of_env)[0] in (GYM, VERIFIERS) for of_env in config.env.items()),
    "images": uses_images,
    "named_rewards": lambda config: None if (names := reward_names(config)) is None else len(names),
    "negative_rewards": gives_negative_rewards,
    "rewards": trains_on_rewards,
}
"""Facts of a recipe that a rule may name under `if`, besides keys."""


def _value(config: Any, key: str) -> Any:
    return DERIVED[key](config) if key in DERIVED else value_at(config, key)


def _is_in(value: Any, state: Any, config: Any) -> bool:
    """Return whether a key with this value is in a state of rules.yaml."""
    if isinstance(state, dict):
        ((kind, other),) = state.items()
        if kind == "not":
            return not _is_in(value, other, config)
        limit = value_at(config, other) if isinstance(other, str) else other
        return None not in (value, limit) and (value > limit if kind == "above" else value < limit)
    if isinstance(state, bool):
        is_off = value in (None, {}, [], "") or (isinstance(value, int) and value == 0)
        return is_off is not state
    return value in state if isinstance(state, list) else value == state
