"""Interpolation by OmegaConf: `${a.b}`, `${.b}` and `${..b}` (relative to the section, or the one around it), and
`${mul:a,b}` with the functions of FUNCTIONS. Their arguments are numbers, full keys or other interpolations."""

import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_parser import parse

from grpo_mcore.recipe.errors import Problem, in_yaml
from grpo_mcore.recipe.yaml_tree import Node

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
    if "${" not in str(tree.plain()):
        return tree
    tree = _without_bad_syntax(tree, problems)
    return _resolved(tree, OmegaConf.create(complete(tree.plain())), nearest, problems)


def variables_of(tree: Node, sections: Collection[str], texts: Iterable[str]) -> list[str]:
    """Return the keys beside the `sections` that hold a single value for interpolations in the recipe's `texts`."""
    words = {word for text in texts for word in re.findall(r"\$\{(\w+)\}", text)}
    return [
        name
        for name, node in tree.value.items()
        if name in words and name not in sections and not isinstance(node.value, dict | list)
    ]


def _without_bad_syntax(node: Node, problems: list[Problem]) -> Node:
    """Return the node with null for texts that OmegaConf cannot parse: it would refuse the whole recipe."""
    value = node.value
    if isinstance(value, dict):
        value = {name: _without_bad_syntax(child, problems) for name, child in value.items()}
    elif isinstance(value, list):
        value = [_without_bad_syntax(child, problems) for child in value]
    elif _is_interpolated(node):
        try:
            parse(value)
        except OmegaConfBaseException as error:
            message = f"not an interpolation such as ${{policy.model_name}}: {_reason(error)}"
            problems.append(_problem(node, message))
            value = None
    return node.having(value)


def _resolved(node: Node, section: Any, nearest: Nearest, problems: list[Problem]) -> Node:
    """Return a mapping or list without interpolations. `section`: the same mapping or list as OmegaConf has it."""
    if isinstance(node.value, dict):
        return node.having({name: _item(item, section, name, nearest, problems) for name, item in node.value.items()})
    return node.having([_item(item, section, index, nearest, problems) for index, item in enumerate(node.value)])


def _item(node: Node, section: Any, name: str | int, nearest: Nearest, problems: list[Problem]) -> Node:
    if isinstance(node.value, dict | list):
        return _resolved(node, section[name], nearest, problems)
    if not _is_interpolated(node):
        return node
    try:
        value = section[name]
        if isinstance(value, Container):
            value = OmegaConf.to_container(value, resolve=True)
        return Node.of(value, node.source, node.key)
    except OmegaConfBaseException as error:
        problems.append(_problem(node, _without_value(error, nearest)))
        return node.having(None)


def _is_interpolated(node: Node) -> bool:
    return isinstance(node.value, str) and "${" in node.value


def _without_value(error: OmegaConfBaseException, nearest: Nearest) -> str:
    """Return why an interpolation has no value."""
    reason = _reason(error)
    if match := re.search(r"Interpolation key '(.+)' not found", reason):
        key = match[1]
        if key in os.environ:
            return f"{key} is not a key of the recipe; for the environment variable write ${{oc.env:{key}}}"
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
