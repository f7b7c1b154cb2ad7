"""Writes a resolved recipe as YAML, with the source of every value as a comment."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from grpo_mcore.recipe.errors import DEFAULT, joined
from grpo_mcore.recipe.loading.load import Recipe, shown
from grpo_mcore.recipe.schema.master import null_means, runs_grpo
from grpo_mcore.recipe.yaml_tree import FLOAT

_WIDEST = 72


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 would read as a number, and keeps each value on one line."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)


def resolved_yaml(recipe: Recipe, *, sources: bool = True, without: frozenset[str] = frozenset()) -> str:
    """Return YAML that loads to the same configuration. With `sources`, a comment after each value says where it was
    written. It leaves out `without`, and the sections of algorithms that the recipe does not run."""
    unused = {*without} | (set() if runs_grpo(recipe.config) else {"loss_fn"})
    lines = list(_lines(recipe.config.model_dump(exclude=unused), "", 0, recipe.provenance))
    column = max((len(text) for text, source in lines if source and len(text) <= _WIDEST), default=0) + 2
    head = f"# {shown(recipe.path)}" + "".join(f" {override}" for override in recipe.overrides)
    body = (f"{text.ljust(column - 1)} # {source}" if source and sources else text for text, source in lines)
    return "\n".join([" ".join(head.splitlines()), *body]) + "\n"


def _lines(value: dict[str, Any], path: str, depth: int, provenance: dict[str, str]) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    for name, item in value.items():
        key = joined(path, str(name))
        if isinstance(item, dict) and item:
            yield f"{indent}{_scalar(name)}:", ""
            yield from _lines(item, key, depth + 1, provenance)
        elif isinstance(item, list) and item and all(isinstance(entry, dict) and entry for entry in item):
            yield f"{indent}{_scalar(name)}:", ""
            for position, entry in enumerate(item):
                inner = list(_lines(entry, joined(key, str(position)), depth + 2, provenance))
                (first, source), rest = inner[0], inner[1:]
                yield f"{indent}  - {first.lstrip()}", source
                yield from rest
        else:
            yield f"{indent}{_scalar(name)}: {_scalar(item)}", _origin(key, provenance)


def _origin(key: str, provenance: dict[str, str]) -> str:
    source = provenance.get(key, DEFAULT)
    meaning = null_means(key)
    return f"{DEFAULT} = {meaning}" if source == DEFAULT and isinstance(meaning, str) else source


def _scalar(value: Any) -> str:
    """Return a scalar or a list of scalars on one line that YAML 1.1 and YAML 1.2 read alike."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True).rstrip()
    return text.removesuffix("\n...").rstrip()


SECRET_NAMES = re.compile("token$|secret|password|passwd|api_?key$|access_?key|credential|webhook", re.IGNORECASE)
SECRET_IN_URL = re.compile(r"(?<=://)[^\s/@]+(?=@)|(?<=[?&])((?:token|key|secret|password|sig|signature)=)[^\s&]+")
HIDDEN = "(hidden)"


def without_secrets(values: Any, name: str = "") -> Any:
    """Return a recipe's plain values in a form to show to others: texts under names such as TOKEN, PASSWORD or webhook
    are hidden, and so are user names, passwords and keys in addresses. Names of environment variables stay."""
    if isinstance(values, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [without_secrets(value, name) for value in values]
    if not isinstance(values, str):
        return values
    if SECRET_NAMES.search(name) and values:
        return HIDDEN
    return SECRET_IN_URL.sub(lambda match: f"{match[1] or ''}{HIDDEN}", values)
