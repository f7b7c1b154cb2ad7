"""Inheritance (one tree merged into another) and overrides (`a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`)."""

import json
import re
from collections.abc import Sequence

from grpo_mcore.recipe.errors import COMMAND_LINE, Problem, RecipeError, in_yaml, joined
from grpo_mcore.recipe.nemo_rl.data_layouts import same_layout
from grpo_mcore.recipe.nemo_rl.dtensor_policy import later_wins
from grpo_mcore.recipe.nemo_rl.nemo_rl_keys import renamed_keys
from grpo_mcore.recipe.yaml_tree import Node, parse_text

_OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~|)(?P<path>[^\s=+~][^\s=]*?)(?:=(?P<value>.*))?$", re.DOTALL)


def merge(base: Node, top: Node, path: str = "") -> Node:
    """Return `base` with `top` merged into it: mappings are merged key by key, everything else is replaced. A mapping
    with `_override_: true` is replaced too."""
    if not (base.is_mapping and top.is_mapping) or top.replaces:
        return top
    if path == "data":
        base, top = same_layout(base, top)
    if not path:
        base = later_wins(base, top, renamed_keys())
    value = dict(base.value)
    for name, node in top.value.items():
        value[name] = merge(value[name], node, joined(path, name)) if name in value else node
    return Node(value, top.source, top.key, base.replaces)


def is_override(word: str) -> bool:
    """Return whether a word of the command line is an override rather than a file."""
    match = _OVERRIDE.match(word)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        return False
    return re.fullmatch(r"[A-Za-z_][\w.\-]*", match["path"]) is not None


def override(key: str, text: str) -> str:
    """Return the override that sets a key to a text. The text is quoted if YAML would read something else."""
    try:
        same = parse_text(text, key, COMMAND_LINE).plain() == text and "${" not in text
    except RecipeError:
        same = False
    return f"{key}={text if same else json.dumps(text, ensure_ascii=False)}"


def apply_overrides(tree: Node, overrides: Sequence[str], problems: list[Problem]) -> Node:
    """Return the tree with each override applied in turn. Wrong ones are added to `problems` and left out."""
    for text in overrides:
        try:
            tree = _apply(tree, text)
        except RecipeError as error:
            problems.extend(error.problems)
    return tree


def _apply(tree: Node, text: str) -> Node:
    match = _OVERRIDE.match(text)
    if match is None or not is_override(text):
        raise _error(text, "an override is written a.b=value, +a.b=value, ++a.b=value or ~a.b")
    sign, path, value_text = match["sign"], match["path"], match["value"]
    present = tree.find(path)
    if sign == "~":
        return _without(tree, path, present, value_text)
    if sign == "+" and present is not None:
        raise _error(
            path,
            f"+ adds a key, but {present.source} sets this one already, to {in_yaml(present.plain())}; "
            f"write {path}=... or ++{path}=...",
        )
    value = parse_text(value_text, path, COMMAND_LINE)
    if value_text.count("#") != str(value.plain()).count("#"):
        message = f"{value_text!r} holds a comment, which YAML leaves out; to keep it, quote the text: '\"...\"'"
        raise _error(path, message)
    if value.is_mapping and not value.value:
        value = Node({}, value.source, value.key, True)  # key={} empties a mapping; {a: 1} is merged into it
    return _with(tree, path, value)


def _with(tree: Node, path: str, value: Node) -> Node:
    """Return the tree with `value` at `path`. List positions are numbers: data.train.0.data_path."""
    parts = path.split(".")
    node: Node | None = tree
    for depth, part in enumerate(parts):
        if node is not None and node.is_list:
            head, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
            if not part.isdecimal() or int(part) >= len(node.value):
                raise _error(
                    path,
                    f"{head} is a list of {len(node.value)}, set at {node.source}: "
                    f"name an entry by its position, such as {head}.0.{parts[-1]}",
                )
            items = list(node.value)
            item, below = items[int(part)], rest.partition(".")[2]
            items[int(part)] = _with(item, below, value) if below else value
            return _with(tree, head, node.having(items))
        node = dict(node.children()).get(part) if node is not None else None
    for depth in range(len(parts) - 1, -1, -1):
        value = Node({parts[depth]: value}, COMMAND_LINE, ".".join(parts[:depth]))
    return merge(tree, value)


def _without(tree: Node, path: str, present: Node | None, value_text: str | None) -> Node:
    if present is None:
        raise _error(path, "~ removes a key, but no file sets this one")
    if value_text is not None and parse_text(value_text, path, COMMAND_LINE).plain() != present.plain():
        raise _error(path, f"~ removes it only if it is {value_text}, but it is {in_yaml(present.plain())}")
    tree = tree.copy()
    head, _, name = path.rpartition(".")
    parent = tree.find(head)
    assert parent is not None
    if parent.is_list:
        del parent.value[int(name)]
    else:
        del parent.value[name]
    return tree


def _error(key: str, message: str) -> RecipeError:
    return RecipeError([Problem(COMMAND_LINE, key, message)], "the command line")
