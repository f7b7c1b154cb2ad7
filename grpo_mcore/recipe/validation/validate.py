"""Turns a resolved tree into a typed configuration. Every problem names the place where its value was written."""

import math
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from grpo_mcore.recipe.errors import Problem, RecipeError, in_yaml, joined, leaf_values, nearest_hint
from grpo_mcore.recipe.nemo_rl.critic_layout import ppo_layout, rm_layout, value_layout
from grpo_mcore.recipe.nemo_rl.data_layouts import nested_layout
from grpo_mcore.recipe.nemo_rl.distillation_layout import distillation_layout
from grpo_mcore.recipe.nemo_rl.eval_layout import eval_layout
from grpo_mcore.recipe.nemo_rl.nemo_rl_keys import apply_gym_switches, without_nemo_rl_keys
from grpo_mcore.recipe.other_trainers import meaning_here
from grpo_mcore.recipe.schema.grpo import ClippedPGLossConfig
from grpo_mcore.recipe.schema.keys import choices, nearest_key, nullable
from grpo_mcore.recipe.schema.master import RecipeSections
from grpo_mcore.recipe.schema.section import Section
from grpo_mcore.recipe.validation import batch_sizes, data, distillation, layout, objective, rules, run
from grpo_mcore.recipe.yaml_tree import Node

ConfigT = TypeVar("ConfigT", bound=RecipeSections)
SectionT = TypeVar("SectionT", bound=Section)

CHECKS = (
    rules.check_rules,
    layout.check_pools,
    layout.check_layout,
    layout.check_engine_experts,
    layout.check_engine_arguments,
    batch_sizes.check_batches,
    objective.check_loss,
    objective.check_kl,
    objective.check_shaping_acts,
    objective.check_advantages,
    objective.check_critic,
    distillation.check_teachers,
    run.check_mirror,
    run.check_variables,
    run.check_webhook,
    run.check_early_stop,
    run.check_weight_decay,
    data.check_data,
    data.check_loaders,
)
"""Checks between keys. Each yields findings. A finding's place is that of the first of its keys that a file or the
command line sets."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "a text that is not empty",
    "list_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}
_FORMS = {
    "checkpointing.metric_name": '"val:" or "train:" and a metric, such as "val:accuracy"',
    "checkpointing.checkpoint_must_save_by": 'days, hours, minutes and seconds, such as "00:03:30:00"',
    "launch.time_limit": '"HH:MM:SS" or "D-HH:MM:SS", such as "04:00:00"',
    "launch.name": "lower-case letters, digits and -, with a letter first",
    "launch.slurm.account": "a name without spaces and #",
    "launch.slurm.partition": "a name without spaces and #",
}
"""Description of the form that a text must have, by key."""
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def validated(
    kind: type[ConfigT],
    tree: Node,
    recipe: str = "",
    earlier: list[Problem] | None = None,
    notes: list[Problem] | None = None,
) -> tuple[ConfigT, Node]:
    """Return the configuration of a tree, and the tree itself in the nested data layout, without keys of NeMo RL and
    former spellings. `notes` gets a line on each of those. Raises RecipeError with all problems, `earlier` ones
    included."""
    problems = list(earlier or ())
    if not tree.is_mapping:
        message = f"expected a mapping of keys, got {in_yaml(tree.plain())}"
        raise RecipeError([*problems, Problem(tree.source, "", message)], recipe or "the configuration")
    if (several := tree.find("teachers")) is not None and several.value:
        message = "distillation across tokenizers is not supported; name one teacher with the policy's: teacher"
        raise RecipeError([several.problem(message)], recipe or "the configuration")
    notes = [] if notes is None else notes
    tree = apply_gym_switches(tree, problems)
    tree = eval_layout(tree, problems)
    tree = nested_layout(tree, problems)
    tree = distillation_layout(tree, problems, notes)
    tree = rm_layout(ppo_layout(tree, problems, notes), problems, notes)
    tree = value_layout(without_nemo_rl_keys(tree, problems, notes), problems, notes)
    for path, value in leaf_values(tree.plain()):
        limit = {int: 2**63, float: 1e100}.get(type(value), math.inf)
        if path[0] != "env" and limit < math.inf and limit <= abs(value) < math.inf:  # one's own env may have any
            problems.append(_placed((".".join(path),), f"{in_yaml(value)} is too large a number", tree, recipe))
    config, faulty = _typed(kind, "", tree, recipe, problems)
    if config is not None:
        for finding in (finding for check in CHECKS for finding in check(config)):
            if not any(_overlap(key, bad) for key in finding.keys for bad in faulty):
                problems.append(_placed(finding.keys, finding.message, tree, recipe))
    if problems or config is None:
        reported = {
            problem.key for problem in earlier or () if problem.key
        }  # an interpolation without a value became null
        more = [problem for problem in problems[len(earlier or ()) :] if problem.key not in reported]
        problems = [*(earlier or ()), *more]
        raise RecipeError(sorted(problems, key=_place), recipe or "the configuration")
    return config, tree


class MasterConfig(RecipeSections):
    """A whole recipe as one typed object whose values go together. `model_validate(dict)` accepts both data layouts and
    makes every check of `load_recipe`; the constructor checks keys and types only."""

    @classmethod
    def model_validate(cls, obj: Any, **_options: Any) -> Self:
        """Return the configuration of a plain dict. Raises RecipeError with all problems."""
        return obj if isinstance(obj, cls) else validated(cls, Node.of(obj, ""))[0]


def checked_loss(values: ClippedPGLossConfig | Mapping[str, Any]) -> ClippedPGLossConfig:
    """Return the section `loss_fn` of values given in Python. Raises RecipeError with the problems that a recipe with
    this section would have."""
    plain = values.model_dump() if isinstance(values, ClippedPGLossConfig) else dict(values)
    tree, problems = Node.of({"loss_fn": plain}, ""), list[Problem]()
    loss, _ = _typed(ClippedPGLossConfig, "loss_fn", tree, "", problems)
    if loss is not None and not problems:
        problems += [Problem("", finding.keys[0], finding.message) for finding in objective.loss_findings(loss)]
    if problems or loss is None:
        raise RecipeError(problems, "the loss")
    return loss


def _place(problem: Problem) -> tuple[str, int]:
    """Sort key: by file and line, the command line first."""
    file, _, line = problem.source.rpartition(":")
    return (file, int(line)) if line.isdecimal() else ("", 0)


def _typed(
    kind: type[SectionT], key_prefix: str, tree: Node, recipe: str, problems: list[Problem]
) -> tuple[SectionT | None, set[str]]:
    """Return the section `kind` at the key `key_prefix` of a tree, and the keys with faulty values.

    Faulty values are added to `problems` and replaced by their defaults, so that the checks between keys can still run.
    The section is None if it does not even exist without them."""
    faulty: set[str] = {problem.key for problem in problems}
    section, errors = _attempt(kind, key_prefix, tree)
    if section is not None:
        return section, faulty
    tree = tree.copy()
    paths = [
        [*(key_prefix.split(".") if key_prefix else []), *(str(part) for part in error["loc"])] for error in errors
    ]
    for error, path in zip(errors, paths, strict=True):
        key, problem = ".".join(path), _problem(error, path, tree, recipe)
        problems.append(problem)
        faulty |= {key, problem.key, *([near] if (near := nearest_key(key)) else [])}
    for path in paths:
        _drop(tree, path)
    return _attempt(kind, key_prefix, tree)[0], faulty


def _attempt(kind: type[SectionT], key: str, tree: Node) -> tuple[SectionT | None, list[Any]]:
    node = tree.find(key)
    assert node is not None
    try:
        return kind(**node.plain()), []
    except ValidationError as error:
        return None, list(error.errors(include_url=False))


def _drop(tree: Node, path: list[str]) -> None:
    parent = tree.at(path[:-1])
    if parent is not None and parent.is_mapping:
        parent.value.pop(path[-1], None)


def _problem(error: Any, path: list[str], tree: Node, recipe: str) -> Problem:
    node, key = tree.at(path), ".".join(path)
    written = node.key if node else key
    return Problem(node.source or recipe if node else recipe, written, _message(error, key, written))


def _message(error: Any, key: str, written: str) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        if key in ("preset", "presets"):
            return "unknown key; put presets on a recipe with --preset NAME, or with defaults: [RECIPE, presets/NAME]"
        near = nearest_key(key)
        if near == key:
            nested = key.replace(".", ": {") + ": VALUE" + "}" * key.count(".")
            return f"unknown key: in a file, sections are nested; write {nested}"
        if near and near.rpartition(".")[0] == key.rpartition(".")[0]:  # in this section: name it as it is written
            near = joined(written.rpartition(".")[0], near.rpartition(".")[2])
        if (elsewhere := meaning_here(key, value)) is not None:
            return f"unknown key; {elsewhere} (docs/from_elsewhere.md; `grpo-mcore config --imported FILE`)"
        return "unknown key" + (f"; nearest known key: {near}" if near else "")
    if kind == "missing":
        return "this key is required"
    null = " or null" if nullable(key) else ""
    if kind == "literal_error":
        known = [in_yaml(choice) for choice in choices(key)]
        hint = nearest_hint(in_yaml(value), known) if isinstance(value, str) else ""
        expected = known[0] if len(known) == 1 else f"one of {', '.join(known)}"
        return f"expected {expected}{null}, got {in_yaml(value)}{hint}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}{null}, got {in_yaml(value)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]:.10g}, got {in_yaml(value)}"
    if kind == "string_pattern_mismatch" and key in _FORMS:
        return f"expected {_FORMS[key]}, got {in_yaml(value)}"
    reason = context["error"] if kind == "value_error" else error["msg"]  # value_error: a validator of ours
    return f"{reason}, got {in_yaml(value)}"


def _placed(keys: tuple[str, ...], message: str, tree: Node, recipe: str) -> Problem:
    for key in keys:
        node = tree.find(key)
        if node is not None:
            return Problem(node.source or recipe, node.key, message)
    return Problem(recipe, keys[0], message)


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")
