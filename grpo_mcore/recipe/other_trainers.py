"""Reads configurations of TRL, verl and OpenRLHF by the tables of other_trainers.yaml, as far as these map.

A configuration is a YAML file, or a shell script with its words: `key=value` (verl) or `--key value` (OpenRLHF, TRL).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.recipe.errors import joined

NAMES = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}
LISTED = 3
"""Keys of a section that a message names."""


@cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Return by trainer: key -> its row, of which `to` is a list of our keys."""
    text = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    rows = {trainer: {key: _row(row) for key, row in table.items()} for trainer, table in text.items()}
    return rows


def _row(row: Any) -> dict[str, Any]:
    row = {"to": row} if isinstance(row, str) else dict(row)
    targets = row.get("to", [])
    return row | {"to": [targets] if isinstance(targets, str) else targets}


def meaning_here(key: str, value: Any = None) -> str | None:
    """Return what a key of another trainer, or a section of one, is here; None for a key that no table has. `value`: of
    the key, which may be a section."""
    leaves = dict(flat(value, key)) if isinstance(value, Mapping) else {key: value}
    lines = []
    for trainer, table in tables().items():
        for name in [leaf for leaf in leaves if leaf in table][:LISTED]:
            row = table[name]
            meaning = " and ".join(row["to"]) or row["note"]
            lines.append(
                f"{NAMES[trainer]}'s {name} is {meaning}" if row["to"] else f"{NAMES[trainer]}'s {name}: {meaning}"
            )
    return "; ".join(lines) or None


def flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full key and value of everything in nested mappings that is not one."""
    for name, item in tree.items():
        if isinstance(item, Mapping):
            yield from flat(item, joined(path, str(name)))
        else:
            yield joined(path, str(name)), item


def read_elsewhere(file: Path) -> tuple[str, dict[str, Any]] | None:
    """Return (trainer, its values by full key) of a configuration of another trainer; None for any other file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix in (".yaml", ".yml"):
        tree = yaml.safe_load(text)
        values = dict(flat(tree)) if isinstance(tree, Mapping) else {}
    else:
        values = _words(text)
    if any(key.startswith("actor_rollout_ref.") for key in values):
        return "verl", values
    known = {trainer: sum(key in tables()[trainer] for key in values) for trainer in ("trl", "openrlhf")}
    trainer = max(known, key=known.__getitem__)
    return (trainer, values) if known[trainer] > 1 else None


def _words(script: str) -> dict[str, Any]:
    """Return the `key=value` and `--key value` words of a shell script."""
    words = shlex.split(re.sub(r"\\\n", " ", script), comments=True)
    values: dict[str, Any] = {}
    for number, word in enumerate(words):
        name, sign, value = word.lstrip("+-").partition("=")
        if re.fullmatch(r"[a-z]\w*(\.\w+)*", name) is None:
            continue
        if sign and (word.startswith("--") or "." in name):
            values[name] = yaml.safe_load(value)
        elif word.startswith("--"):
            following = words[number + 1] if number + 1 < len(words) else "--"
            values[name] = True if following.startswith("--") else yaml.safe_load(following)
    return values


def translated(trainer: str, values: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, str]], dict[str, str]]:
    """Return (our key -> (value, their key), their key -> why it is not used) of a configuration."""
    ours, rest = dict[str, tuple[Any, str]](), dict[str, str]()
    for key, value in values.items():
        row = tables()[trainer].get(key)
        if row is None:
            rest[key] = "no key here"
        elif not row["to"]:
            rest[key] = row["note"]
        elif "while" in row and not values.get(row["while"]):
            rest[key] = f"{row['while']} is not true"
        elif value is None or "$" in str(value):
            rest[key] = f"has no value here; it is {' and '.join(row['to'])}"
        elif "values" in row and value not in row["values"]:
            rest[key] = (
                row.get("note") or f"{value} is not known here; {row['to'][0]} has {list(row['values'].values())}"
            )
        else:
            meant = row.get("values", row.get("replace", {})).get(value, value)
            factor = values.get(row["times"], 1) if "times" in row else 1
            for target in row["to"]:
                if target not in ours or len(row["to"]) == 1:  # epsilon sets both bounds, epsilon_high one of them
                    ours[target] = (meant * factor if factor != 1 else meant, key)
    if trainer == "verl" and values.get("actor_rollout_ref.actor.use_kl_loss") is False:
        ours.setdefault("loss_fn.reference_policy_kl_penalty", (0.0, "actor_rollout_ref.actor.use_kl_loss"))
    lengths = ("data.max_input_seq_length", "policy.generation.max_new_tokens")
    if all(key in ours for key in lengths):
        total = sum(int(ours[key][0]) for key in lengths)
        ours["policy.max_total_sequence_length"] = (total, "prompt and response together")
    return ours, rest


def as_recipe(trainer: str, values: Mapping[str, Any]) -> str:
    """Return a configuration of another trainer as the text of a recipe, each key with its origin, and at the end the
    keys that are not used, each with the reason."""
    ours, rest = translated(trainer, values)
    lines = [f"# Made of a configuration of {NAMES[trainer]}: {len(ours)} keys; {len(rest)} are not used (at the end)."]
    lines += ["# Still needed: env (rewards), and what `grpo-mcore train FILE --check` names."]
    open_sections: list[str] = []
    for key in sorted(ours):
        *sections, name = key.split(".")
        same = 0
        while same < min(len(sections), len(open_sections)) and sections[same] == open_sections[same]:
            same += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(same, len(sections))]
        open_sections = sections
        value, origin = ours[key]
        written = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
        lines.append(f"{'  ' * len(sections)}{name}: {written}  # {origin}")
    lines += [f"# not used: {key}: {reason}" for key, reason in sorted(rest.items())]
    return "\n".join(lines) + "\n"
