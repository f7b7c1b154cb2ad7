"""Compares the recipe of a resumed run with the one in its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mcore.recipe.errors import in_yaml, joined
from grpo_mcore.recipe.schema.keys import field_at, fixed_on_resume, section_of
from grpo_mcore.recipe.schema.master import RecipeSections

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
    out: nobody changed them.
    """
    before, after = dict(_leaves(saved)), dict(_leaves(config.model_dump(mode="json")))
    changed = []
    for key in after | before:
        old, new = before.get(key, _MISSING), after.get(key, _MISSING)
        if old == new or (_MISSING in (old, new) and not _free(key)):
            continue
        changed.append(Change(key, _text(old), _text(new), fixed_on_resume(key)))
    return changed


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full key and value of every value that is not a mapping or a list of mappings."""
    for name, item in value.items():
        key = joined(path, str(name))
        if isinstance(item, list) and item and all(isinstance(entry, dict) for entry in item):
            item = {str(position): entry for position, entry in enumerate(item)}
        if isinstance(item, dict) and item:
            yield from _leaves(item, key)
        else:
            yield key, item


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
