"""Reads a recipe: the chain of `defaults:`, then overrides, interpolation and validation."""

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import grpo_mcore
from grpo_mcore.base.files import newer_format
from grpo_mcore.recipe.errors import COMMAND_LINE, DEFAULT, Problem, RecipeError, in_yaml, leaf_values, nearest_hint
from grpo_mcore.recipe.loading.merge import apply_overrides, merge
from grpo_mcore.recipe.nemo_rl.dtensor_policy import READ_AS, aliases
from grpo_mcore.recipe.schema.keys import nearest_key, plain_defaults
from grpo_mcore.recipe.schema.master import NULL_MEANS, fast_precision, null_means
from grpo_mcore.recipe.validation.validate import MasterConfig, validated
from grpo_mcore.recipe.yaml_tree import Node, parse_file, parse_text

logger = logging.getLogger(__name__)
_SUFFIXES = ("", ".yaml", ".yml")
PRESET = "defaults="
# Base recipes of NeMo RL whose algorithm is not supported.
_SHELL_VARIABLE = re.compile(r"\$([A-Z_][A-Z0-9_]*)/")
# Keys that name a file. A file that does not exist relative to the working directory is taken from the folder of the
# recipe that names it.
_FILE_KEYS = {"data_path", "train_data_path", "val_data_path", "prompt_file", "system_prompt_file", "chat_template"}


@dataclass(frozen=True)
class Recipe:
    """A recipe, resolved and checked.

    `provenance` says for every key of `config` where its value was written: "recipes/x.yaml:12", "command line" or
    "default". `files` are the files that were read, the recipe itself first. `imported` says what became of keys of
    NeMo RL that it sets.
    """

    config: MasterConfig
    provenance: dict[str, str]
    path: Path
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    imported: tuple[Problem, ...] = ()


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a YAML file (a path, or a name in recipes/) with overrides as on a command line. The
    override `defaults=NAME` merges another file, such as a preset, into the recipe, below all other overrides. Raises
    RecipeError with all problems."""
    file = find_recipe(str(path))
    name = shown(file)
    files: list[Path] = []
    problems: list[Problem] = []
    notes: list[Problem] = []
    tree = _load(file, files, ())
    for preset in presets_of(overrides):
        preset_file = _find(preset, [Path(), *recipe_folders()], (COMMAND_LINE, "defaults"), name)
        tree = merge(tree, _load(preset_file, files, (file,)))
    tree = apply_overrides(tree, [word for word in overrides if not word.startswith(PRESET)], problems)
    texts = [*(source.read_text(encoding="utf-8") for source in files), *overrides]
    # Here, because OmegaConf takes a quarter of the time of importing this package.
    from grpo_mcore.recipe.loading.interpolate import resolve_tree, variables_of

    variables = variables_of(tree, MasterConfig.model_fields, texts)
    tree = resolve_tree(tree, _with_defaults, nearest_key, problems)
    for variable in variables:
        notes.append(Problem(tree.value[variable].source, variable, "a variable of the recipe's interpolations"))
        del tree.value[variable]
    _expand_home(tree, problems)
    config, tree = validated(MasterConfig, tree, name, problems, notes)
    for note in (note for note in notes if note.message.startswith((READ_AS, "used as cluster.env_vars"))):
        _say_once(str(note))
    provenance = {
        ".".join(parts): node.source if (node := tree.at(parts)) is not None else DEFAULT
        for parts, _ in leaf_values(config.model_dump())
    }
    return Recipe(config, provenance, file, tuple(reversed(files)), tuple(overrides), tuple(notes))


@cache
def _say_once(line: str) -> None:
    """Log a line about a recipe, once in a process: commands load a recipe several times."""
    logger.warning(line)


def _without_format(tree: Node, recipe: str) -> Node:
    """Return the tree without `format`, the version of the recipe's format. Raises RecipeError for a newer version."""
    node = tree.value.pop("format", None) if tree.is_mapping else None
    if node is not None and (reason := newer_format("recipe", node.value)) is not None:
        raise RecipeError([node.problem(reason)], recipe)
    return tree


def presets_of(overrides: Sequence[str]) -> list[str]:
    """Return the names that `defaults=NAME` and `defaults=[NAME, NAME]` give on a command line."""
    presets = []
    for word in overrides:
        if word.startswith(PRESET):
            value = parse_text(word.removeprefix(PRESET), "defaults", COMMAND_LINE)
            presets += [entry.value for entry in _entries(value, word)]
    return presets


def recipe_folders() -> list[Path]:
    """Return the folders in which recipes are found by name: in the working directory, the checkout, the installed
    package."""
    package = Path(grpo_mcore.__file__).parent
    return [Path("recipes"), package.parent / "recipes", package / "_recipes"]


def find_recipe(name: str) -> Path:
    """Return the file of a recipe given by path or by name. Raises RecipeError."""
    return _find(name, [Path(), *recipe_folders()], ("", ""), name)


def recipe_name(path: str) -> str:
    """Return a recipe's name: that of its file, without the suffix."""
    return re.sub(r"\.ya?ml$", "", Path(path).name)


def shown(path: Path) -> str:
    """Return a path for messages: relative if it is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe completed by defaults, so that an interpolation may name any key. A key that is
    null and derived from others gets the interpolation that null stands for."""
    complete = _filled(values, deepcopy(plain_defaults()))
    with suppress(KeyError, TypeError):  # of sections that are none: the checks say so
        if complete["policy"]["precision"] == "auto":
            on_cpu = complete["cluster"]["platform"] == "cpu"
            complete["policy"]["precision"] = fast_precision(complete, on_cpu=on_cpu)
    for key in NULL_MEANS:
        *sections, name = key.split(".")
        section: Any = complete
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get(name) is None:
            section[name] = null_means(key)
    for theirs, ours in aliases():  # such as ${policy.dtensor_cfg.tensor_parallel_size}, on a recipe with megatron_cfg
        *sections, name = theirs.split(".")
        section = complete
        for part in sections:
            inner = section.get(part)
            section[part] = section = {} if inner is None else inner
            if not isinstance(section, dict):
                break
        else:
            section.setdefault(name, f"${{{ours}}}")
    return complete


def _filled(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return nested dicts with the defaults of keys that they do not have."""
    filled = {**defaults, **values}
    for name, default in defaults.items():
        if isinstance(default, dict) and isinstance(values.get(name), dict):
            filled[name] = _filled(values[name], default)
    return filled


def _load(file: Path, files: list[Path], chain: tuple[Path, ...]) -> Node:
    """Return the tree of a file, merged into the recipes that its `defaults:` names."""
    name = shown(file)
    tree = parse_file(file, name)
    if tree.value is None:
        tree = Node({}, tree.source, "")
    if not tree.is_mapping:
        raise RecipeError([Problem(name, "", f"expected a mapping of keys, got {in_yaml(tree.plain())}")], name)
    tree = _without_format(tree, name)
    _find_files_beside(tree, file.parent)
    defaults = tree.value.pop("defaults", None)
    base: Node | None = None
    self_merged = False
    for entry in _entries(defaults, name):
        if entry.value == "_self_":
            layer, self_merged = tree, True
        else:
            parent = _find(
                entry.value, [file.parent, *recipe_folders()], (entry.source, "defaults"), name, other_than=file
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
    return base if self_merged else merge(base, tree)


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
    name: str, folders: Sequence[Path], written_at: tuple[str, str], recipe: str, other_than: Path | None = None
) -> Path:
    for folder in folders:
        for suffix in _SUFFIXES:
            file = folder / os.path.expanduser(name + suffix)
            if os.path.isfile(file) and file.resolve() != other_than:  # False for names that no file can have
                return file.resolve()
    written = name.replace("_", "-").removesuffix(".yaml")
    for folder in folders[1:]:
        for file in sorted(folder.glob("*.yaml")):
            if file.stem.replace("_", "-") == written and file.resolve() != other_than:
                return file.resolve()
    below = Path(name).parent  # such as presets
    known: list[str] = []
    for inside in dict.fromkeys((below, Path())):  # recipes/X, where X is meant
        known = known or sorted({file.stem for folder in folders[1:] for file in (folder / inside).glob("*.yaml")})
    places = list(dict.fromkeys(shown(folder.resolve()) for folder in folders if folder.is_dir()))
    message = f"no recipe {in_yaml(name)} in {', '.join(places)}" + nearest_hint(Path(name).stem, known)
    raise RecipeError([Problem(*written_at, message)], recipe)


def _expand_home(node: Node, problems: list[Problem]) -> None:
    """Replace ~/ at the start of texts by the home folder: shells do not expand it in key=~/folder. $SCRATCH/ at the
    start is a problem: only a shell would replace it, and it would become the name of a folder."""
    for _, child in node.children():
        if isinstance(child.value, str) and child.value.startswith("~/"):
            child.value = os.path.expanduser(child.value)
        elif isinstance(child.value, str) and (variable := _SHELL_VARIABLE.match(child.value)):
            message = f"{in_yaml(child.value)}: no shell reads a recipe; write ${{oc.env:{variable[1]}}}/..."
            problems.append(child.problem(message))
        else:
            _expand_home(child, problems)


def _is_there(path: str | Path) -> bool:
    """Return whether there is such a file or, where the path is a pattern, one that matches it."""
    return os.path.exists(path) or (has_magic(str(path)) and bool(glob(str(path), recursive=True)))


def _find_files_beside(node: Node, folder: Path) -> None:
    """Replace the path of a file that does not exist in the working directory by one in `folder`, or in a folder of
    recipes. Recipes of NeMo RL name prompts/x.txt there as examples/prompts/x.txt."""
    for name, child in node.children():
        if name in _FILE_KEYS and isinstance(child.value, str) and "\n" not in child.value and "{" not in child.value:
            places = [folder, *recipe_folders()]
            beside = [base / child.value.removeprefix("examples/") for base in places]
            if not _is_there(child.value) and (file := next(filter(_is_there, beside), None)):
                child.value = shown(file.resolve())
        else:
            _find_files_beside(child, folder)
