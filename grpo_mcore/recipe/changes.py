"""Compares the recipe of a resumed run with the one in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mcore.recipe.errors import in_yaml, leaves
from grpo_mcore.recipe.schema.keys import field_at, fixed_on_resume, section_of
from grpo_mcore.recipe.schema.master import ALGORITHMS, RecipeSections, derived_value

_MISSING = object()


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the checkpoint's. `fixed`: the run must keep the checkpoint's value."""

    key: str
    saved: str
    new: str
    fixed: bool


def changes(saved: Mapping[str, Any], config: RecipeSections) -> list[Change]:
    """Return the values of `config` that differ from those of a checkpoint's recipe, in the order of the schema.

    `saved` is the resolved recipe as `model_dump` returned it. Keys that only one version of the schema has are left
    out, and those that follow from others (`follows`): nobody changed them.
    """
    before, after = leaves(saved), leaves(config.model_dump(mode="json"))
    changed = []
    for key in after | before:
        old, new = before.get(key, _MISSING), after.get(key, _MISSING)
        if (
            old == new
            or (not old and not new and isinstance(old, list | dict))
            or (_MISSING in (old, new) and not _free(key))
        ):
            continue
        if not fixed_on_resume(key) and follows(key, before) and follows(key, after):
            continue
        changed.append(Change(key, _text(old), _text(new), fixed_on_resume(key)))
    return changed


def follows(key: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key has the value that a recipe which leaves it out gives it; of a critic's keys, that of the
    policy's does, too. `values`: of all full keys."""
    value, policy = values.get(key), f"policy.{key.removeprefix('value.')}"
    if key.startswith("value."):
        of_critic = {f"policy.{name[6:]}": setting for name, setting in values.items() if name.startswith("value.")}
        return value is not None and value == values.get(policy) or follows(policy, {**values, **of_critic})
    algorithm = next((name for name in ALGORITHMS if f"{name}.max_num_steps" in values), "")
    return value is not None and value == derived_value(key, values.get, algorithm)


def _free(key: str) -> bool:
    """Return whether the key may be in one recipe and not in another: it is inside a mapping without a schema, or in a
    list."""
    parts = key.split(".")
    above = [field_at(".".join(parts[:count])) for count in range(1, len(parts))]
    return any(field is not None and section_of(field.annotation) == (None, False) for field in above) or any(
        part.isdecimal() for part in parts
    )


def _text(value: Any) -> str:
    return "not set" if value is _MISSING else in_yaml(value, 40)
