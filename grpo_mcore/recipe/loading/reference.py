"""Writes the reference of all keys as Markdown, from the types, defaults and docstrings of the schema."""

import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from grpo_mcore.recipe.errors import in_yaml, joined
from grpo_mcore.recipe.schema.keys import docstrings, known_keys, nearest_key, section_of
from grpo_mcore.recipe.schema.master import RecipeSections
from grpo_mcore.recipe.schema.section import FIXED, NameOrCode, Section, check_import_path

_NAMES = {int: "integer", float: "number", bool: "boolean", str: "text", Any: "any", type(None): "null"}
_SIGNS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
_HEAD = """\
# Recipe keys

<!-- Written by `grpo-mcore config --reference`. Edit the docstrings in grpo_mcore/recipe/schema/. -->

Every key of a recipe, by section. `grpo-mcore config RECIPE` prints a recipe with all values and the place where each
was written. Keys of NeMo RL that do not exist here are accepted where they change nothing; otherwise the error says
what to use instead.

A run that resumes may change every value but those marked as fixed; `train --resume` prints what changed.

| you want to choose | sections |
|---|---|
"""
_BY_TOPIC = {
    "model and optimizer": "policy policy.tokenizer policy.megatron_cfg.optimizer policy.megatron_cfg.scheduler",
    "adapters instead of the whole model": "policy.megatron_cfg.peft",
    "data": "data data.train.* data.sampler",
    "the algorithm": "grpo grpo.adv_estimator grpo.reward_shaping loss_fn on_policy_distillation sft dpo rm",
    "how the policy is laid out, and its memory": "policy.megatron_cfg policy.sequence_packing cluster",
    "how engines generate": "policy.generation policy.generation.vllm_cfg policy.generation.colocated.resources",
    "generation ahead of training": "grpo.async_grpo",
    "what is saved and what is logged": "checkpointing logger",
    "machines and jobs": "cluster launch",
    "an evaluation, a rehearsal": "eval rehearse",
}
"""Sections by the topic that a user looks for."""


def reference() -> str:
    """Return the reference: a table of keys for each section."""
    topics = "".join(f"| {topic} | {', '.join(map(_link, keys.split()))} |\n" for topic, keys in _BY_TOPIC.items())
    return _HEAD + topics + "".join(f"\n{text}" for text in _sections(RecipeSections, "", "", {}))


def _link(key: str) -> str:
    return f"[`{key.removesuffix('.*')}`](#{re.sub('[.*]', '', key)})"


def explain(key: str) -> str:
    """Return what a key means: its type, default, meaning, where it has an effect, and whether a resumed run may change
    it; for a section, its purpose and its keys. The last parts of a key suffice if only one key ends with them, such as
    `optimizer.lr`.

    Raises KeyError with a message for an unknown key, which names the nearest known one, and for an ambiguous key.
    """
    path = _full_key(key)
    above, _, name = path.rpartition(".")
    field, section = known_keys()[path], _section_at(above)
    inner, is_list = section_of(field.annotation)
    meaning = docstrings(section).get(name, "")
    if inner is not None:
        suffix = " (a list; each entry has these keys)" if is_list else ""
        keys = docstrings(inner)
        width = max(map(len, keys))
        rows = [f"  {inside:<{width}}  {_first_sentence(text)}" for inside, text in keys.items()]
        return "\n".join([path + suffix, *_wrapped(_purpose(inner) or meaning), "", *rows]) + "\n"
    facts = [("type", _type(field.annotation, field.metadata)), ("default", _default(field))]
    facts += [("effect", effect) for effect in _EFFECT.findall(meaning)]
    if "enabled" in section.model_fields and name != "enabled":
        facts.append(("effect", f"only with {joined(above, 'enabled')}: true"))
    facts.append(("on --resume", "must stay as it was" if FIXED in field.metadata else "may change, and takes effect"))
    rows = [f"  {fact:<12} {value.replace('`', '')}" for fact, value in facts]
    return "\n".join([path, *_wrapped(meaning), "", *rows]) + "\n"


_EFFECT = re.compile(r"((?:No effect|Only (?:with|for)|Needs)[^.]*)")


def _full_key(key: str) -> str:
    """Return the known key that is `key`, or the only one that ends with it, with `*` for positions in lists."""
    end = "." + ".".join(part for part in key.split(".") if not part.isdecimal() and part != "*")
    ends = {f".{path}".replace(".*", ""): path for path in known_keys()}
    keys = [ends[end]] if end in ends else [path for plain, path in ends.items() if plain.endswith(end)]
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise KeyError(f"{key}: which one? {', '.join(keys)}")
    if end.startswith(".env."):
        raise KeyError(f"{key}: an environment's keys are those of its class; docs/environments.md has them")
    near = nearest_key(key)
    raise KeyError(f"{key}: unknown key" + (f"; nearest known key: {near}" if near else ""))


def _section_at(path: str) -> type[Section]:
    section = section_of(known_keys()[path.removesuffix(".*")].annotation)[0] if path else RecipeSections
    assert section is not None
    return section


def _purpose(section: type[Section]) -> str:
    """Return the docstring of a section on one line, without its own name."""
    return re.sub(r"^`[^`]*`[.:]? ?", "", " ".join((inspect.getdoc(section) or "").split()))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<!\bDr)\. ", text)[0].rstrip(".")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  ")


def _sections(section: type[Section], path: str, meaning: str, written: dict[type[Section], str]) -> Iterator[str]:
    """Yield the text of a section, then those of the sections in it. `meaning` is the text for a section without a
    docstring. `written` holds the key at which each section was printed already."""
    if section in written:
        yield f"## `{path}`\n\nSame keys as `{written[section]}`.\n"
        return
    written[section] = path
    inner: list[tuple[type[Section], str, str]] = []
    rows = []
    for name, field in section.model_fields.items():
        nested, is_list = section_of(field.annotation)
        key = joined(path, name)
        if nested is None:
            kind = _type(field.annotation, field.metadata)
            fixed = " Fixed when a run resumes." if FIXED in field.metadata else ""
            rows.append((f"`{name}`", kind, _default(field), docstrings(section)[name] + fixed))
        else:
            inner.append((nested, key + ".*" if is_list else key, docstrings(section).get(name, "")))
    purpose = _purpose(section) or meaning
    if path and rows:
        yield f"## `{path}`\n\n{purpose[:1].upper()}{purpose[1:]}\n\n{_table(rows)}"
    elif rows:
        yield f"## Top level\n\n{_table(rows)}"
    for nested, key, meaning in inner:
        yield from _sections(nested, key, meaning, written)


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
    return "\n".join(lines) + "\n"


def _type(annotation: Any, metadata: Any = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], arguments[1].metadata if isinstance(arguments[1], FieldInfo) else arguments[1:])
    if names := next((item for item in metadata if isinstance(item, NameOrCode)), None):
        return ", ".join([*(f"`{name}`" for name in names.names or ["text"]), "`{path, options}`"])
    if annotation is str and any(getattr(item, "func", None) is check_import_path for item in metadata):
        return "import path"
    if origin is Literal:
        return ", ".join(f"`{choice if isinstance(choice, str) else in_yaml(choice)}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section"
    limits = [f"{sign} {getattr(item, name):.10g}" for item in metadata for name, sign in _SIGNS if hasattr(item, name)]
    return f"{_NAMES[annotation]} {', '.join(limits)}".rstrip()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    plain = isinstance(value, str) and value.isprintable()
    return f"`{value if plain else in_yaml(value)}`"
