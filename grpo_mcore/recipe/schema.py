"""The schema as data: every key with its field, for look-ups by full key and for messages."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from grpo_mcore.recipe.errors import nearest
from grpo_mcore.recipe.master import MasterConfig
from grpo_mcore.recipe.section import Section
from grpo_mcore.recipe.yaml_tree import joined


@cache
def known_keys() -> dict[str, FieldInfo]:
    """Every key of the schema, sections included; `*` stands for a position: "data.train.*.data_path"."""
    return dict(_walk(MasterConfig, ""))


def _walk(section: type[Section], path: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        key = joined(path, name)
        yield key, field
        inner, is_list = _section_of(field.annotation)
        if inner is not None:
            yield from _walk(inner, key + ".*" if is_list else key)


def _section_of(annotation: Any) -> tuple[type[Section] | None, bool]:
    if get_origin(annotation) is list:
        return _section_of(get_args(annotation)[0])[0], True
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    return None, False


def field_at(key: str) -> FieldInfo | None:
    """The field of a full key, where positions in lists are numbers."""
    return known_keys().get(".".join("*" if part.isdecimal() else part for part in key.split(".")))


def default_of(key: str) -> Any:
    """The plain default of a key. Raises KeyError where the schema has no such key or it has no default."""
    field = field_at(key)
    if field is None or field.is_required():
        raise KeyError(key)
    value = field.get_default(call_default_factory=True)
    return value.model_dump() if isinstance(value, Section) else value


def nullable(key: str) -> bool:
    """May the key be null."""
    field = field_at(key)
    origin = get_origin(field.annotation) if field is not None else None
    return field is not None and origin in (Union, types.UnionType) and type(None) in get_args(field.annotation)


def choices(key: str) -> tuple[Any, ...]:
    """The values of a key that has a fixed set of them, otherwise ()."""
    field = field_at(key)
    parts = [field.annotation, *get_args(field.annotation)] if field is not None else []
    return next((get_args(part) for part in parts if get_origin(part) is Literal), ())


def suggestion(key: str) -> str | None:
    """The known key that an unknown one most likely means: the only one of this name elsewhere, else one of a
    like name in the same section, else one of the same or a like name elsewhere."""
    section, _, name = key.rpartition(".")
    generic = ".".join("*" if part.isdecimal() else part for part in section.split("."))
    siblings = [path.rpartition(".")[2] for path in known_keys() if path.rpartition(".")[0] == generic]
    elsewhere: dict[str, list[str]] = {}
    for path in known_keys():
        elsewhere.setdefault(path.rpartition(".")[2], []).append(path.replace(".*", ""))
    if len(elsewhere.get(name, ())) == 1:
        return elsewhere[name][0]
    if found := nearest(name, siblings):
        return joined(section, found)
    found = name if name in elsewhere else nearest(name, elsewhere)
    return elsewhere[found][0] if found else None
