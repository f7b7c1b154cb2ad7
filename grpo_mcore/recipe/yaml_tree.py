"""YAML as a tree in which every value knows where it was written. Scalars follow YAML 1.2: `1e-6` is a number and
`no` is text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.recipe.errors import COMMAND_LINE, Problem, RecipeError, in_yaml, joined

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
OVERRIDE_KEY = "_override_"
MOST_VALUES = 100_000
"""Maximum number of values of a file. Ten lines of aliases to aliases can stand for billions."""


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}


FLOAT = re.compile(r"^(?:[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN))$")
for _name, _pattern in {
    "null": re.compile(r"^(?:~|null|Null|NULL|)$"),
    "bool": re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+)$"),
    "float": FLOAT,
    "merge": re.compile(r"^<<$"),
}.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, None)


@dataclass
class Node:
    """A value of a recipe: a scalar, a mapping of nodes or a list of nodes.

    `source` says where the value was written ("recipes/x.yaml:12"), and `key` is its full key there. `replaces`: this
    mapping replaces the inherited one instead of being merged into it.
    """

    value: Any
    source: str
    key: str
    replaces: bool = False

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list)

    def children(self) -> Iterator[tuple[str, Node]]:
        """Yield (name or position, node) for each item of a mapping or a list."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from ((str(position), item) for position, item in enumerate(self.value))

    def find(self, path: str) -> Node | None:
        """Return the node at a dotted path, or None."""
        return self.at(path.split(".") if path else ())

    def at(self, parts: Iterable[str]) -> Node | None:
        """Return the node at a path whose parts may contain dots, or None."""
        node = self
        for part in parts:
            value = node.value
            if isinstance(value, dict) and part in value:
                node = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                node = value[int(part)]
            else:
                return None
        return node

    def plain(self) -> Any:
        """Return the value as plain dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {name: node.plain() for name, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def problem(self, message: str) -> Problem:
        """Return a problem with this value, or a note on what became of it, at its place."""
        return Problem(self.source, self.key, message)

    def having(self, value: Any) -> Node:
        """Return a node with another value at the same place."""
        return Node(value, self.source, self.key, self.replaces)

    def copy(self) -> Node:
        """Return the same tree in new nodes."""
        value = self.value
        if isinstance(value, dict):
            value = {name: node.copy() for name, node in value.items()}
        elif isinstance(value, list):
            value = [node.copy() for node in value]
        return self.having(value)

    @staticmethod
    def of(value: Any, source: str, key: str = "") -> Node:
        """Return the tree of a plain value, all from one source."""
        if isinstance(value, dict):
            value = {str(name): Node.of(item, source, joined(key, str(name))) for name, item in value.items()}
        elif isinstance(value, list | tuple):
            value = [Node.of(item, source, joined(key, str(position))) for position, item in enumerate(value)]
        return Node(value, source, key)


def parse_file(path: Path, name: str) -> Node:
    """Return the tree of a YAML file. Sources and errors call the file `name`. Raises RecipeError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError([Problem(name, "", f"not UTF-8 text: {error}")], name) from None
    except OSError as error:
        raise RecipeError([Problem(name, "", f"cannot be read: {error.strerror}")], name) from None
    return _parse(text, "", lambda line: f"{name}:{line}", name)


def parse_text(text: str, key: str, source: str) -> Node:
    """Return the tree of YAML text that is the value of `key`, all of it from `source`. Raises RecipeError."""
    return _parse(text, key, lambda _line: source, source)


def _parse(text: str, key: str, source_of: Callable[[int], str], name: str) -> Node:
    conversion = _Conversion(source_of, name)
    try:
        root = yaml.compose(text, Loader=_Loader)
        node = Node(None, source_of(1), key)
        if root is not None:
            node = conversion.convert(root, root.start_mark.line + 1, key)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        source = source_of(mark.line + 1) if mark else name
        raise RecipeError([Problem(source, key, f"not valid YAML: {reason}")], name) from None
    except yaml.YAMLError as error:
        raise RecipeError([Problem(name, key, f"not valid YAML: {error}")], name) from None
    except RecursionError:
        raise RecipeError([Problem(name, key, "mappings or lists are nested too deeply")], name) from None
    if conversion.problems:
        raise RecipeError(conversion.problems, name)
    return node


class _Conversion:
    """Converts nodes of the YAML library, which aliases share, to a tree of our own."""

    def __init__(self, source_of: Callable[[int], str], name: str) -> None:
        self.problems: list[Problem] = []
        self._source_of = source_of
        self._name = name
        self._around: list[yaml.Node] = []  # the mappings and lists around the present node
        self._left = MOST_VALUES

    def convert(self, node: yaml.Node, line: int, key: str) -> Node:
        source = self._source_of(line)
        self._left -= 1
        if self._left < 0:
            raise RecipeError(
                [Problem(source, key, f"more than {MOST_VALUES:,} values, aliases (*name) counted where they stand")],
                self._name,
            )
        if isinstance(node, yaml.ScalarNode):
            try:
                return Node(_scalar(node), source, key)
            except ValueError as error:
                self.problems.append(Problem(source, key, str(error)))
                return Node(None, source, key)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self.problems.append(Problem(source, key, f"a value of kind {node.tag} cannot stand in a recipe"))
        if any(node is outer for outer in self._around):
            message = "the alias (*name) refers to the mapping or list that contains it"
            raise RecipeError([Problem(source, key, message)], self._name)
        self._around.append(node)
        if isinstance(node, yaml.MappingNode):
            converted = self._mapping(node, source, key)
        else:
            converted = self._list(node, source, key)
        self._around.pop()
        return converted

    def _list(self, node: yaml.Node, source: str, key: str) -> Node:
        items = [
            self.convert(item, item.start_mark.line + 1, joined(key, str(position)))
            for position, item in enumerate(node.value)
        ]
        return Node(items, source, key)

    def _mapping(self, node: yaml.MappingNode, source: str, key: str) -> Node:
        values: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        replaces = False
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merged = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for item in merged:
                    for name, child in self.convert(item, line, key).children():
                        inherited.setdefault(name, child)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(self._source_of(line), key, "a key must be a single word"))
                continue
            name = str(key_node.value)
            if node.flow_style and _lacks_space(key_node, value_node):
                name, _, rest = name.partition(":")
                if self._name == COMMAND_LINE:  # as Hydra reads it
                    values[name] = parse_text(rest, joined(key, name), COMMAND_LINE)
                    continue
                message = f"{name}:{rest} is one word in YAML; write {name}: {rest}, with a space"
                self.problems.append(Problem(self._source_of(line), joined(key, name), message))
                continue
            child = self.convert(value_node, line, joined(key, name))
            if name == OVERRIDE_KEY:
                if not isinstance(child.value, bool):
                    message = f"expected true or false, got {in_yaml(child.plain())}"
                    self.problems.append(child.problem(message))
                replaces = child.value is True
            elif name in values:
                message = f"the key is given twice; the first time at {values[name].source}"
                self.problems.append(child.problem(message))
            else:
                values[name] = child
        return Node({**inherited, **values}, source, key, replaces)


def _lacks_space(key: yaml.ScalarNode, value: yaml.Node) -> bool:
    """Return whether {name:value} was written, in which YAML sees a key without a value."""
    nothing = isinstance(value, yaml.ScalarNode) and value.value == "" and value.style is None
    return nothing and key.style is None and re.match(r"\w[\w.-]*:[^/]", key.value) is not None


def _scalar(node: yaml.Node) -> Any:
    text = str(node.value)
    kind = node.tag.removeprefix(_TAG)
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text.replace("_", ""), 16 if text.startswith("0x") else 10)
    if kind == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.replace("_", ""), flags=re.IGNORECASE))
    raise ValueError(f"a value of kind {node.tag} cannot stand in a recipe")
