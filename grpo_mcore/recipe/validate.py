"""From a resolved tree to a `MasterConfig`, with every problem tied to the place where its value was
written."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from grpo_mcore.recipe import checks, data_layouts, foreign_keys, gym_keys, schema
from grpo_mcore.recipe.errors import DEFAULT, Problem, RecipeError, in_yaml, nearest
from grpo_mcore.recipe.master import MasterConfig
from grpo_mcore.recipe.yaml_tree import Node, joined

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


class Validated(NamedTuple):
    """A configuration and the tree it came from, in the nested data layout and without foreign keys."""

    config: MasterConfig
    tree: Node


def validated(tree: Node, recipe: str = "", earlier: list[Problem] | None = None) -> Validated:
    """The configuration of a tree. Raises RecipeError with all problems, `earlier` ones included."""
    problems = list(earlier or ())
    if not tree.is_mapping:
        message = f"expected a mapping of keys, got {in_yaml(tree.plain())}"
        raise RecipeError([*problems, Problem(tree.source, "", message)], recipe or "the configuration")
    tree = gym_keys.normalise(tree, problems)
    tree = data_layouts.normalise(tree, problems)
    tree = foreign_keys.remove(tree, problems)
    config, faulty = _typed(tree, recipe, problems)
    if config is not None:
        for finding in checks.findings(config):
            if not any(_overlap(key, bad) for key in finding.keys for bad in faulty):
                problems.append(_placed(finding.keys, finding.message, tree, recipe))
    if problems or config is None:
        raise RecipeError(sorted(problems, key=_place), recipe or "the configuration")
    return Validated(config, tree)


def source_of(tree: Node, key: str) -> str:
    """Where the value of a key was written, or "default"."""
    node = tree.find(key)
    return node.source if node is not None else DEFAULT


def _place(problem: Problem) -> tuple[str, int]:
    """By file and line, the command line first."""
    file, _, line = problem.source.rpartition(":")
    return (file, int(line)) if line.isdecimal() else ("", 0)


def _typed(tree: Node, recipe: str, problems: list[Problem]) -> tuple[MasterConfig | None, set[str]]:
    """The configuration, None where there is none even without the faulty values, and the faulty keys. So
    that the checks between keys can run too, faulty values are left out and their defaults stand in."""
    faulty: set[str] = {problem.key for problem in problems}
    config, errors = _attempt(tree)
    if config is not None:
        return config, faulty
    tree = tree.copy()
    for error in errors:
        key = ".".join(str(part) for part in error["loc"])
        problem = _problem(error, key, tree, recipe)
        problems.append(problem)
        faulty |= {key, problem.key, *([near] if (near := schema.suggestion(key)) else [])}
    for error in errors:
        _drop(tree, [str(part) for part in error["loc"]])
    return _attempt(tree)[0], faulty


def _attempt(tree: Node) -> tuple[MasterConfig | None, list[Any]]:
    try:
        # Not MasterConfig.model_validate, which is this module's face for scripts.
        return BaseModel.model_validate.__func__(MasterConfig, tree.plain()), []  # type: ignore[attr-defined]
    except ValidationError as error:
        return None, list(error.errors(include_url=False))


def _drop(tree: Node, parts: list[str]) -> None:
    parent = tree.find(".".join(parts[:-1]))
    if parent is not None and parent.is_mapping:
        parent.value.pop(parts[-1], None)


def _problem(error: Any, key: str, tree: Node, recipe: str) -> Problem:
    node = tree.find(key)
    written = node.key if node else key
    return Problem(node.source or recipe if node else recipe, written, _message(error, key, written))


def _message(error: Any, key: str, written: str) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        near = schema.suggestion(key)
        if near and near.rpartition(".")[0] == key.rpartition(".")[0]:  # a sibling: named as its section is written
            near = joined(written.rpartition(".")[0], near.rpartition(".")[2])
        return "unknown key" + (f"; nearest known key: {near}" if near else "")
    if kind == "missing":
        return "this key is required"
    null = " or null" if schema.nullable(key) else ""
    if kind == "literal_error":
        choices = [in_yaml(choice) for choice in schema.choices(key)]
        near = nearest(in_yaml(value), choices) if isinstance(value, str) else None
        hint = f"; nearest: {near}" if near else ""
        expected = choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
        return f"expected {expected}{null}, got {in_yaml(value)}{hint}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}{null}, got {in_yaml(value)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}, got {in_yaml(value)}"
    if kind == "string_pattern_mismatch" and key == "checkpointing.metric_name":
        return f'expected "val:" or "train:" and a metric, such as "val:accuracy", got {in_yaml(value)}'
    said = context["error"] if kind == "value_error" else error["msg"]  # by a validator of ours: without prefix
    return f"{said}, got {in_yaml(value)}"


def _placed(keys: tuple[str, ...], message: str, tree: Node, recipe: str) -> Problem:
    for key in keys:
        node = tree.find(key)
        if node is not None:
            return Problem(node.source or recipe, node.key, message)
    return Problem(recipe, keys[0], message)


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")
