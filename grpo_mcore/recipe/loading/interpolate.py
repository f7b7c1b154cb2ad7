"""Interpolation by OmegaConf: `${a.b}`, `${.b}` and `${..b}` (relative to the section, or the one around it), and
`${mul:a,b}` with the functions of FUNCTIONS. Their arguments are numbers, full keys or other interpolations."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_parser import parse

from grpo_mcore.recipe.errors import Problem, in_yaml
from grpo_mcore.recipe.loading.yaml_tree import Node

Complete = Callable[[dict[str, Any]], dict[str, Any]]
Nearest = Callable[[str], str | None]


def _difference(first: float, second: float) -> float:
    return first - second


def _quotient(first: float, second: float) -> float:
    """Return first / second, whole if both are whole and divide."""
    if second == 0:
        raise ValueError("division by 0")
    quotient = first / second
    whole = isinstance(first, int) and isinstance(second, int) and quotient.is_integer()
    return int(quotient) if whole else quotient


def _whole_quotient(first: float, second: float) -> float:
    if second == 0:
        raise ValueError("division by 0")
    return first // second


FUNCTIONS: dict[str, tuple[Callable[..., float], int | None]] = {
    "add": (lambda *numbers: sum(numbers), None),
    "sub": (_difference, 2),
    "mul": (lambda *numbers: math.prod(numbers), None),
    "div": (_quotient, 2),
    "floordiv": (_whole_quotient, 2),
    "max": (max, None),
    "min": (min, None),
}
"""Functions of an interpolation by name, with their number of arguments (None: any, at least 1)."""


LONGEST = 100_000
"""Maximum characters of a value with its interpolations."""

_REFERENCE = re.compile(r"\$\{ *(\.*)([\w.\-]+) *\}")
"""An interpolation of another key: dots of a relative one, and the key."""

_BUILT = re.compile(r"[\w.\-\]{]\$\{|\}[\w.\-\[]")
"""Where an interpolation may be a part of a key, which is not known before its value."""


def _register(name: str, function: Callable[..., float], arity: int | None) -> None:
    def resolver(*arguments: Any, _root_: Any) -> Any:
        if arity is not None and len(arguments) != arity:
            raise ValueError(f"{name} takes {arity} arguments, got {len(arguments)}")
        return function(*(_number(argument, _root_) for argument in arguments))

    OmegaConf.register_resolver(name, resolver, replace=True)


def _number(argument: Any, root: Any) -> int | float:
    value = OmegaConf.select(root, argument) if isinstance(argument, str) else argument
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = f"{argument} is {in_yaml(value)}" if isinstance(argument, str) else f"got {in_yaml(value)}"
        raise ValueError(f"expected a number, but {shown}")
    return value


for _name, (_function, _arity) in FUNCTIONS.items():
    _register(_name, _function, _arity)


def resolve_tree(tree: Node, complete: Complete, nearest: Nearest, problems: list[Problem]) -> Node:
    """Return the tree with every interpolation replaced by its value; one without a value becomes null and is added to
    `problems`. `complete` returns plain values with those of keys that the recipe does not set; they may hold
    interpolations too. `nearest` returns the known key that an unknown one most likely means."""
    tree = _without_bad_syntax(tree, problems)
    tree = _without_bombs(tree, tree, {}, problems)
    return _resolved(tree, _parsed(_Values(_needed(complete(tree.plain())))), nearest, problems)


class _Values:
    """Plain values, which are the same key of a cache if they read the same: 1, 1.0, true and "1" do not."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values, self.text = values, repr(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Values) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@lru_cache(maxsize=64)  # recipes inherit the same few, and OmegaConf parses each again
def _parsed(values: _Values) -> Any:
    """Return the values as OmegaConf has them, to be read only: interpolations are replaced wherever they are read."""
    return OmegaConf.create(values.values)


def _needed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with interpolations, and those that may be named in one: OmegaConf would take most of the time
    of loading a recipe over the others. Only words of keys are compared, so that a few too many are kept."""
    texts = " ".join(_interpolated(values))
    if _BUILT.search(texts):
        return values
    keys = [key.split(".") for key in re.findall(r"""[^\s${}:,\[\]'"]+""", texts)]
    return _named(values, {word for key in keys for word in key}, {key[-1] for key in keys})


def _named(values: dict[str, Any], words: Collection[str], ends: Collection[str]) -> dict[str, Any]:
    """Return the values with interpolations or named by one of the words, and whole sections named by one of the
    ends."""
    kept = {}
    for key, value in values.items():
        if isinstance(value, dict) and str(key) not in ends:
            if below := _named(value, words, ends):
                kept[key] = below
        elif str(key) in words or any(_interpolated(value)):
            kept[key] = value
    return kept


def _interpolated(value: Any) -> Iterator[str]:
    """Yield the texts with interpolations in a value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _interpolated(item)
    elif isinstance(value, str) and "${" in value:
        yield value


def variables_of(tree: Node, sections: Collection[str], texts: Iterable[str]) -> list[str]:
    """Return the keys beside the `sections` that hold a single value for interpolations in the recipe's `texts`."""
    words = {word for text in texts for word in re.findall(r"\$\{(\w+)\}", text)}
    return [
        name
        for name, node in tree.value.items()
        if name in words and name not in sections and not isinstance(node.value, dict | list)
    ]


def _without_bad_syntax(node: Node, problems: list[Problem]) -> Node:
    value = node.value
    if isinstance(value, dict):
        value = {name: _without_bad_syntax(child, problems) for name, child in value.items()}
    elif isinstance(value, list):
        value = [_without_bad_syntax(child, problems) for child in value]
    elif isinstance(value, str) and "${" in value and (why := _bad_syntax(value)) is not None:
        problems.append(_problem(node, f"not an interpolation such as ${{policy.model_name}}: {why}"))
        value = None
    return node.having(value)


@lru_cache(maxsize=1024)  # recipes inherit the same few
def _bad_syntax(text: str) -> str | None:
    try:
        parse(text)
    except OmegaConfBaseException as error:
        return _reason(error)
    return None


def _without_bombs(node: Node, root: Node, sizes: dict[str, int], problems: list[Problem]) -> Node:
    """Return the node without texts that would be longer than LONGEST once their interpolations are replaced: a few
    lines of keys that name each other twice can fill any memory."""
    value = node.value
    if isinstance(value, dict):
        value = {name: _without_bombs(child, root, sizes, problems) for name, child in value.items()}
    elif isinstance(value, list):
        value = [_without_bombs(child, root, sizes, problems) for child in value]
    elif _size(node, root, sizes) > LONGEST:
        told = node.having(f"{value[:60]}...")
        problems.append(_problem(told, f"longer than {LONGEST:,} characters with its interpolations"))
        value = None
    return node.having(value)


def _size(node: Node, root: Node, sizes: dict[str, int]) -> int:
    """Return the number of characters of a value once its interpolations are replaced. `sizes`: those known, by key."""
    value = node.value
    if not (isinstance(value, str) and "${" in value):
        return len(value) if isinstance(value, str) else 1
    if node.key not in sizes:
        sizes[node.key] = 1  # in a circle, which is a problem by itself
        size = len(value)
        for dots, name in _REFERENCE.findall(value):
            parts = node.key.split(".")[: -len(dots)] if dots else []
            named = root.find(".".join([*parts, name]))
            size += 0 if named is None else _size(named, root, sizes)
            if size > LONGEST:
                break
        sizes[node.key] = size
    return sizes[node.key]


def _resolved(node: Node, config: Any, nearest: Nearest, problems: list[Problem]) -> Node:
    """Return the node without interpolations. `config` is its section in the whole configuration."""
    value: Any = node.value
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        resolved = {name: _item(child, config, name, nearest, problems) for name, child in items}
        value = resolved if isinstance(value, dict) else list(resolved.values())
    return node.having(value)


def _item(node: Node, section: Any, name: str | int, nearest: Nearest, problems: list[Problem]) -> Node:
    if isinstance(node.value, dict | list):
        return _resolved(node, section[name], nearest, problems) if any(_interpolated(node.plain())) else node
    if not (isinstance(node.value, str) and "${" in node.value):
        return node
    try:
        value = section[name]
        if isinstance(value, Container):
            return Node.of(OmegaConf.to_container(value, resolve=True), node.source, node.key)
    except OmegaConfBaseException as error:
        problems.append(_problem(node, _without_value(error, nearest)))
        value = None
    return node.having(value)


def _without_value(error: OmegaConfBaseException, nearest: Nearest) -> str:
    """Return why an interpolation has no value."""
    reason = _reason(error)
    if match := re.search(r"Interpolation key '(.+)' not found", reason):
        key = match[1]
        if key in os.environ:
            return f"{key} is no key of the recipe; for the environment variable write ${{oc.env:{key}}}"
        near = nearest(key)
        return f"{key} has no value" + (f"; nearest known key: {near}" if near and near != key else "")
    if match := re.search(r"Unsupported interpolation type (.+)", reason):
        return f"there is no function {in_yaml(match[1])}; known: {', '.join(FUNCTIONS)}, oc.env"
    if "Recursive interpolation" in reason:
        return "the keys refer to each other in a circle"
    return reason


def _reason(error: OmegaConfBaseException) -> str:
    """Return the first line of an error, without OmegaConf's own words before ours."""
    line = str(error).splitlines()[0]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", line)


def _problem(node: Node, message: str) -> Problem:
    return node.problem(f"{in_yaml(node.value)}: {message}")
