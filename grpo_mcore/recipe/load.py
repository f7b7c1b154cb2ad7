"""Recipes from files: the chain of `defaults:`, overrides, interpolation, validation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpo_mcore
from grpo_mcore.recipe.derived import missing_value
from grpo_mcore.recipe.errors import Problem, RecipeError, in_yaml, nearest
from grpo_mcore.recipe.interpolate import resolve_tree
from grpo_mcore.recipe.master import MasterConfig
from grpo_mcore.recipe.merge import apply_overrides, merge
from grpo_mcore.recipe.validate import source_of, validated
from grpo_mcore.recipe.yaml_tree import Node, joined, parse_file

_SUFFIXES = ("", ".yaml", ".yml")
# Base recipes of NeMo RL whose algorithm is not here.
_NOT_YET = {"dpo": "DPO", "rm": "training a reward model"}
# Values that name a file: where it does not exist from the working directory but does beside the recipe that
# names it, that one is meant.
_FILE_KEYS = {
    "data_path",
    "train_data_path",
    "val_data_path",
    "prompt_file",
    "system_prompt_file",
    "chat_template",
}


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read, resolved and checked.

    `provenance` says for every key of `config` where its value was written: "recipes/x.yaml:12", "command
    line" or "default". `files` are those it was read from, the recipe first."""

    config: MasterConfig
    provenance: dict[str, str]
    path: Path
    files: tuple[Path, ...]
    overrides: tuple[str, ...]


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file (a path, or the name of one in recipes/), with the overrides of a command
    line. Raises RecipeError with every problem that there is."""
    file = find_recipe(str(path))
    name = shown(file)
    files: list[Path] = []
    problems: list[Problem] = []
    tree = apply_overrides(_load(file, files, ()), overrides, problems)
    tree = resolve_tree(tree, missing_value, problems)
    config, tree = validated(tree, name, problems)
    provenance = {key: source_of(tree, key) for key in leaves(config.model_dump())}
    return Recipe(config, provenance, file, tuple(reversed(files)), tuple(overrides))


def recipe_folders() -> list[Path]:
    """Where recipes are found by name: of the working directory, of the checkout, of the installed
    package."""
    package = Path(grpo_mcore.__file__).parent
    return [Path("recipes"), package.parent / "recipes", package / "_recipes"]


def find_recipe(name: str) -> Path:
    """The file of a recipe given by path or by name. Raises RecipeError."""
    return _find(name, [Path(), *recipe_folders()], ("", ""), name)


def shown(path: Path) -> str:
    """A path as messages show it: from the working directory where it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def leaves(value: Any, path: str = "") -> list[str]:
    """The full keys of all values in nested dicts and lists of dicts; a list of scalars is one value."""
    if isinstance(value, dict) and value:
        return [key for name, item in value.items() for key in leaves(item, joined(path, str(name)))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [key for position, item in enumerate(value) for key in leaves(item, joined(path, str(position)))]
    return [path]


def _load(file: Path, files: list[Path], chain: tuple[Path, ...]) -> Node:
    """The tree of a file, laid over those that its `defaults:` names."""
    name = shown(file)
    tree = parse_file(file, name)
    if tree.value is None:
        tree = Node({}, tree.source, "")
    if not tree.is_mapping:
        raise RecipeError([Problem(name, "", f"expected a mapping of keys, got {in_yaml(tree.plain())}")], name)
    _find_files_beside(tree, file.parent)
    defaults = tree.value.pop("defaults", None)
    base: Node | None = None
    own_turn_passed = False
    for entry in _entries(defaults, name):
        if entry.value == "_self_":
            layer, own_turn_passed = tree, True
        else:
            parent = _find(
                entry.value,
                [file.parent, *recipe_folders()],
                (entry.source, "defaults"),
                name,
                other_than=file,
            )
            if parent in (*chain, file):
                circle = " -> ".join(shown(step) for step in (*chain, file, parent))
                problem = Problem(entry.source, "defaults", f"the recipes inherit in a circle: {circle}")
                raise RecipeError([problem], name)
            layer = _load(parent, files, (*chain, file))
        base = layer if base is None else merge(base, layer)
    if file not in files:
        files.append(file)
    if base is None:
        return tree
    return base if own_turn_passed else merge(base, tree)


def _entries(defaults: Node | None, name: str) -> list[Node]:
    if defaults is None or defaults.value is None:
        return []
    entries = defaults.value if defaults.is_list else [defaults]
    wrong = [entry for entry in entries if not isinstance(entry.value, str)]
    if wrong:
        raise RecipeError(
            [
                Problem(entry.source, "defaults", f"expected the name of a recipe, got {in_yaml(entry.plain())}")
                for entry in wrong
            ],
            name,
        )
    return list(entries)


def _find(
    name: str, folders: Sequence[Path], place: tuple[str, str], recipe: str, other_than: Path | None = None
) -> Path:
    for folder in folders:
        for suffix in _SUFFIXES:
            file = folder / Path(name + suffix).expanduser()
            if file.is_file() and file.resolve() != other_than:
                return file.resolve()
    if (algorithm := _NOT_YET.get(Path(name).stem)) is not None:
        raise RecipeError([Problem(*place, f"no recipe {in_yaml(name)}: {algorithm} is not supported yet")], recipe)
    known = sorted({file.stem for folder in folders[1:] if folder.is_dir() for file in folder.glob("*.yaml")})
    near = nearest(Path(name).stem, known)
    places = list(dict.fromkeys(shown(folder.resolve()) for folder in folders if folder.is_dir()))
    message = f"no recipe {in_yaml(name)} in {', '.join(places)}" + (f"; nearest: {near}" if near else "")
    raise RecipeError([Problem(*place, message)], recipe)


def _find_files_beside(node: Node, folder: Path) -> None:
    for name, child in node.children():
        if name in _FILE_KEYS and isinstance(child.value, str) and "\n" not in child.value and "{" not in child.value:
            beside = folder / child.value
            if not os.path.exists(child.value) and os.path.exists(beside):
                child.value = shown(beside)
        else:
            _find_files_beside(child, folder)
