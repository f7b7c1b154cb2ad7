"""Interpolation: `${a.b}`, `${mul:a,b}` and `${div:a,b}` inside values. Arguments are numbers, keys or other
interpolations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from grpo_mcore.recipe.errors import Problem, in_yaml
from grpo_mcore.recipe.loading.yaml_tree import Node, parse_text

_KEY = re.compile(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*")
Lookup = Callable[[str], Any]
Missing = Callable[[str, bool], Any]


class InterpolationError(ValueError):
    """An interpolation without a value. The message says why."""


def resolve_text(text: str, lookup: Lookup) -> Any:
    """Return the value of a text. A text that is a single interpolation gets that value with its type, any other text
    stays text. `lookup` returns the plain value of a key. Raises InterpolationError."""
    pieces: list[Any] = []
    position = 0
    while (start := text.find("${", position)) >= 0:
        stop = _closing(text, start)
        if start > position:
            pieces.append(text[position:start])
        pieces.append(_value(text[start + 2 : stop].strip(), lookup))
        position = stop + 1
    if position < len(text) or not pieces:
        pieces.append(text[position:])
    if len(pieces) == 1:
        return pieces[0]
    return "".join(piece if isinstance(piece, str) else in_yaml(piece, limit=10_000) for piece in pieces)


def resolve_tree(tree: Node, missing: Missing, problems: list[Problem]) -> Node:
    """Return the tree with every interpolation replaced by its value. `missing(key, null)` returns the value, or an
    interpolation, for a key that the tree does not set (null: that it sets to null), or raises InterpolationError."""
    return _Resolver(tree, missing, problems).resolved(tree, ())


class _Resolver:
    def __init__(self, tree: Node, missing: Missing, problems: list[Problem]) -> None:
        self.tree, self.missing, self.problems = tree, missing, problems

    def resolved(self, node: Node, open_keys: tuple[str, ...]) -> Node:
        """Return the node without interpolations. Those without a value are added to `problems` and become null."""
        if isinstance(node.value, dict):
            value: Any = {name: self.resolved(child, open_keys) for name, child in node.value.items()}
        elif isinstance(node.value, list):
            value = [self.resolved(child, open_keys) for child in node.value]
        elif isinstance(node.value, str) and "${" in node.value:
            try:
                value = self.text(node.value, open_keys)
            except InterpolationError as error:
                self.problems.append(Problem(node.source, node.key, f"{in_yaml(node.value)}: {error}"))
                value = None
            if isinstance(value, dict | list):
                return Node.of(value, node.source, node.key)
        else:
            return node
        return Node(value, node.source, node.key, node.replaces)

    def text(self, text: str, open_keys: tuple[str, ...]) -> Any:
        return resolve_text(text, lambda key: self.lookup(key, open_keys))

    def lookup(self, key: str, open_keys: tuple[str, ...]) -> Any:
        if key in open_keys:
            chain = " -> ".join([*open_keys[open_keys.index(key) :], key])
            raise InterpolationError(f"the keys refer to each other in a circle: {chain}")
        node = self.tree.find(key)
        value = self._plain(node, (*open_keys, key)) if node is not None else None
        if value is None:
            value = self.missing(key, node is not None)
            if isinstance(value, str) and "${" in value:
                value = self.text(value, (*open_keys, key))
        return value

    def _plain(self, node: Node, open_keys: tuple[str, ...]) -> Any:
        if isinstance(node.value, dict):
            return {name: self._plain(child, open_keys) for name, child in node.value.items()}
        if isinstance(node.value, list):
            return [self._plain(child, open_keys) for child in node.value]
        if isinstance(node.value, str) and "${" in node.value:
            return self.text(node.value, open_keys)
        return node.value


def _closing(text: str, start: int) -> int:
    depth = 0
    for position in range(start, len(text)):
        if text.startswith("${", position):
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    raise InterpolationError("a ${ is not closed")


def _value(body: str, lookup: Lookup) -> Any:
    function, colon, arguments = body.partition(":")
    if not colon:
        if not _KEY.fullmatch(body):
            raise InterpolationError(f"expected a full key such as ${{policy.model_name}}, got {in_yaml(body)}")
        return lookup(body)
    if function not in ("mul", "div"):
        raise InterpolationError(f"there is no function {in_yaml(function)}; known: mul, div")
    numbers = [_number(argument, lookup) for argument in _split(arguments)]
    if function == "mul":
        return math.prod(numbers)
    if len(numbers) != 2:
        raise InterpolationError(f"div takes 2 arguments, got {len(numbers)}")
    if numbers[1] == 0:
        raise InterpolationError("division by 0")
    quotient = numbers[0] / numbers[1]
    whole = all(isinstance(number, int) for number in numbers) and quotient.is_integer()
    return int(quotient) if whole else quotient


def _split(arguments: str) -> list[str]:
    """Return the arguments, split at the commas outside of inner interpolations."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _number(argument: str, lookup: Lookup) -> int | float:
    value: Any
    if "${" in argument:
        value = resolve_text(argument, lookup)
    elif _KEY.fullmatch(argument):
        value = lookup(argument)
    else:
        value = parse_text(argument, "", "").plain()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InterpolationError(f"expected a number, but {argument} is {in_yaml(value)}")
    return value
