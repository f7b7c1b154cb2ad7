"""Custom code in a recipe is `{path, options}`. The spellings of before still load, each with a note."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mcore.recipe.errors import Problem, joined
from grpo_mcore.recipe.loading.yaml_tree import Node
from grpo_mcore.recipe.schema.section import is_path

# Sections in which `name`, or `environment`, was an import path.
_NAMED = (("grpo.adv_estimator", "name"), ("data.sampler", "name"))


def custom_code(tree: Node, problems: list[Problem], notes: list[Problem]) -> Node:
    """Return the tree with `path` where a name was an import path, and `logger.custom` where it was `logger.own`.
    Idempotent."""
    tree = tree.copy()
    logger = tree.find("logger")
    if logger is not None and logger.is_mapping and "own" in logger.value:
        _move(logger, "own", "custom", problems, notes)
    env = tree.find("env")
    places = [(tree.find(section), name) for section, name in _NAMED]
    for _, section in env.children() if env is not None else ():
        if section.is_mapping and "path" not in section.value:  # which then belongs to the class
            places.append((section, "environment"))
    for place, name in places:
        if place is not None and place.is_mapping and name in place.value and _is_code(place.value[name]):
            _move(place, name, "path", problems, notes)
    for node in _values(tree):
        if is_path(node.value):
            notes.append(node.problem(f"used as {{path: {node.value}}}"))
    return tree


def _is_code(node: Node) -> bool:
    """Return whether a name is an import path, "package.module:name" or "package.module.name"."""
    return isinstance(node.value, str) and (is_path(node.value) or all(map(str.isidentifier, _parts(node.value))))


def _parts(name: str) -> list[str]:
    """Return the parts of a dotted name, and one that is no identifier for a name without dots."""
    parts = name.split(".")
    return parts if len(parts) > 1 else [""]


def _move(section: Node, name: str, to: str, problems: list[Problem], notes: list[Problem]) -> None:
    """Give the key `to` the value of `name`, which keeps its place and its name in messages."""
    node, there = section.value.pop(name), section.value.get(to)
    if there is not None and there.value and there.plain() != node.plain():
        problems.append(node.problem(f"contradicts {there.key} ({there.source}); remove one of them"))
        return
    section.value[to] = node
    if node.value:
        notes.append(node.problem(f"used as {joined(section.key, to)}"))


def _values(tree: Node) -> Iterator[Node]:
    """Yield the values that are a name or custom code."""
    if (kind := tree.find("loss_fn.reference_policy_kl_type")) is not None:
        yield kind
    data = tree.find("data")
    for part in ("train", "validation", "default"):
        node = data.value.get(part) if data is not None and data.is_mapping else None
        for entry in node.value if node is not None and node.is_list else [node]:
            if entry is not None and entry.is_mapping and "processor" in entry.value:
                yield entry.value["processor"]
