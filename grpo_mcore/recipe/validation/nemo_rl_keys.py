"""Keys of NeMo RL that do not exist here, from the tables of nemo_rl_keys.yaml. A key whose value changes nothing is
dropped; otherwise the recipe is refused with what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.recipe.errors import Problem, in_yaml
from grpo_mcore.recipe.loading.yaml_tree import Node
from grpo_mcore.recipe.validation.engines import GYM


@cache
def key_tables() -> dict[str, dict[str, Any]]:
    """Return the tables of nemo_rl_keys.yaml: `dropped`, `refused`, `refused_unless`."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def without_nemo_rl_keys(tree: Node, problems: list[Problem]) -> Node:
    """Return the tree without the keys of the tables. Those that would change something are added to `problems`."""
    tree = tree.copy()
    for table, keys in key_tables().items():
        for path, entry in keys.items():
            for section, name in _places(tree, path.split(".")):
                node = section.value.pop(name)
                if (instead := _instead(table, entry, node.plain())) is not None:
                    culprit = _switched_on(node)
                    problems.append(Problem(culprit.source, culprit.key, f"a key of NeMo RL; {instead}"))
    return tree


def _instead(table: str, entry: Any, value: Any) -> str | None:
    """Return what to use instead of a key with this value, or None if the key can be dropped."""
    if table == "dropped":
        return None
    if table == "refused":
        return None if is_off(value) else entry
    dropped = value is None or any(value == known and type(value) is type(known) for known in entry["values"])
    return None if dropped else entry["instead"]


def is_off(value: Any) -> bool:
    """Return whether a value switches nothing on: null, false, 0, 1 (a parallel size), empty, or `enabled: false`."""
    if isinstance(value, dict):
        if "enabled" in value:
            return is_off(value["enabled"])
        return all(is_off(item) for name, item in value.items() if not name.startswith("_"))
    return value in (None, False, 0, 1, "", []) and value is not True


def _places(node: Node, parts: list[str]) -> Iterator[tuple[Node, str]]:
    """Yield each mapping that has the key at the end of a path, and the key's name."""
    head, *rest = parts
    if head == "*":
        for _, child in node.children() if node.is_list else ():
            yield from _places(child, rest)
    elif node.is_mapping and head in node.value:
        if not rest:
            yield node, head
        else:
            yield from _places(node.value[head], rest)


def _switched_on(node: Node) -> Node:
    """Return the first value under a key that switches something on."""
    if node.is_mapping and "enabled" in node.value:
        return node.value["enabled"]
    for _, child in node.children():
        if not is_off(child.plain()):
            return _switched_on(child)
    return node


def apply_gym_switches(tree: Node, problems: list[Problem]) -> Node:
    """Return the tree without the switches that NeMo RL has in `env`, after doing what they say. Idempotent.

    should_use_nemo_gym: true makes NeMo Gym the environment of datasets that name none; false removes its section.
    """
    env = tree.find("env")
    if env is None or not env.is_mapping:
        return tree
    sections = dict(env.value)
    use = sections.pop("should_use_nemo_gym", None)
    sections.pop("should_log_nemo_gym_responses", None)
    mask = sections.pop("should_mask_flagged_samples", None)
    if mask is not None and mask.value is False:
        message = "samples that NeMo Gym flags (mask_sample) are always left out"
        problems.append(Problem(mask.source, mask.key, message))
    tree = Node({**tree.value, "env": Node(sections, env.source, env.key, env.replaces)}, tree.source, tree.key)
    if use is None:
        return tree
    if not isinstance(use.value, bool):
        problems.append(Problem(use.source, use.key, f"expected true or false, got {in_yaml(use.plain())}"))
    elif not use.value:
        sections.pop(GYM, None)
    elif GYM not in sections:
        problems.append(Problem(use.source, use.key, f"there is no section env.{GYM}; give its head_server_url"))
    elif (data := tree.find("data")) is not None and data.is_mapping and "env_name" not in data.value:
        default = data.value.get("default")
        kept = default.value if default is not None and default.is_mapping else {}
        name = Node(GYM, use.source, "data.default.env_name")
        default = Node({**kept, "env_name": name}, data.source, "data.default")
        data = Node({**data.value, "default": default}, data.source, data.key, data.replaces)
        tree = Node({**tree.value, "data": data}, tree.source, tree.key)
    return tree
