"""The schema as data: every key with its type, default and docstring."""

import ast
import inspect
import re
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from grpo_mcore.recipe.errors import joined, nearest
from grpo_mcore.recipe.schema.master import RecipeSections
from grpo_mcore.recipe.schema.section import FIXED, Section


def section_of(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section that a field holds, if any, and whether it holds a list of them."""
    if get_origin(annotation) is list:
        return section_of(get_args(annotation)[0])[0], True
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    return None, False


@cache
def known_keys() -> dict[str, FieldInfo]:
    """Return every key of the schema, sections included. `*` stands for a list position: "data.train.*.data_path"."""
    return dict(_walk(RecipeSections, ""))


def _walk(section: type[Section], path: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        key = joined(path, name)
        yield key, field
        inner, is_list = section_of(field.annotation)
        if inner is not None:
            yield from _walk(inner, key + ".*" if is_list else key)


def field_at(key: str) -> FieldInfo | None:
    """Return the field of a full key, in which list positions are numbers."""
    return known_keys().get(".".join("*" if part.isdecimal() else part for part in key.split(".")))


@cache
def plain_defaults(section: type[Section] = RecipeSections) -> dict[str, Any]:
    """Return the default of every key that has one, as nested dicts, the same ones each time."""
    defaults = {}
    for name, field in section.model_fields.items():
        inner, is_list = section_of(field.annotation)
        if inner is not None and not is_list:
            defaults[name] = plain_defaults(inner)
        elif not field.is_required():
            defaults[name] = field.get_default(call_default_factory=True)
    return defaults


def fixed_on_resume(key: str) -> bool:
    """Return whether a run keeps the value of this key when it resumes. A critic's keys are as those of the policy."""
    field = field_at(re.sub(r"^value\.", "policy.", key))
    return field is not None and FIXED in field.metadata


def nullable(key: str) -> bool:
    """Return whether the key may be null."""
    field = field_at(key)
    origin = get_origin(field.annotation) if field is not None else None
    return field is not None and origin in (Union, types.UnionType) and type(None) in get_args(field.annotation)


def choices(key: str) -> tuple[Any, ...]:
    """Return the allowed values of a key, or of an entry of its list; () if any value of its type is allowed."""
    of_list, _, last = key.rpartition(".")
    field = field_at(of_list if last.isdecimal() else key)
    return _literal(field.annotation) if field is not None else ()


def _literal(annotation: Any) -> tuple[Any, ...]:
    """Return the values of the first Literal inside an annotation, () if there is none."""
    inner = get_args(annotation)
    return inner if get_origin(annotation) is Literal else next(filter(None, map(_literal, inner)), ())


def nearest_key(key: str) -> str | None:
    """Return the known key that an unknown key most likely means, or None.

    That is a key of the same section with the same words or initials (`learning_rate`: `lr`), else the only key of the
    same name elsewhere, else a similar name in the same section, else the same or a similar name elsewhere. A section
    that is written by its last part alone (`optimizer`) is found."""
    section, _, name = key.rpartition(".")
    section = _section_meant(section)
    generic = ".".join("*" if part.isdecimal() else part for part in section.split("."))
    if generic in known_keys() and section_of(known_keys()[generic].annotation)[1]:
        generic += ".*"  # one entry of a list may be written without its position
    siblings = [path.rpartition(".")[2] for path in known_keys() if path.rpartition(".")[0] == generic]
    elsewhere: dict[str, list[str]] = {}
    for path in known_keys():
        elsewhere.setdefault(path.rpartition(".")[2], []).append(path.replace(".*", ""))
    if near := nearest(name, [sibling for sibling in siblings if _same_words(name, sibling)], cutoff=0.0):
        return joined(section, near)
    if len(elsewhere.get(name, ())) == 1:
        return elsewhere[name][0]
    if near := nearest(name, siblings):
        return joined(section, near)
    alike = [known for known in elsewhere if _same_words(name, known, least=2)]
    near = name if name in elsewhere else nearest(name, alike, cutoff=0.0) or nearest(name, elsewhere, cutoff=0.75)
    return elsewhere[near][0] if near else None


def _section_meant(section: str) -> str:
    """Return the known section that ends with the parts of `section`, if that is only one; else `section`."""
    if section in known_keys() or not section:
        return section
    ends = [
        path for path in known_keys() if path.endswith(f".{section}") and section_of(known_keys()[path].annotation)[0]
    ]
    return ends[0] if len(ends) == 1 else section


def _same_words(name: str, known: str, least: int = 1) -> bool:
    """Return whether all words of one name, of which it has at least `least`, are in the other, or one name is the
    initials of the other."""
    words, others = name.split("_"), known.split("_")
    initials = ("".join(word[:1] for word in words), "".join(word[:1] for word in others))
    return (
        (set(words) <= set(others) and len(words) >= least)
        or (set(others) <= set(words) and len(others) >= least)
        or (len(words) > 1 and initials[0] == known)
        or (len(others) > 1 and initials[1] == name)
    )


@cache
def docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each field of a section, its inherited ones included, on one line."""
    base = section.__base__
    texts = dict(docstrings(base)) if base is not None and issubclass(base, Section) else {}
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                texts[field.target.id] = " ".join(after.value.value.split())
    return texts
