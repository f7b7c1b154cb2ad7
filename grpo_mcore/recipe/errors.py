"""Errors of a recipe: a `Problem` for each thing that is wrong, and one `RecipeError` that reports all of them; and how
keys and values are called there."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT = "default"
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Problem:
    """Something wrong with the value at one place of a recipe. `source` says where the value was written:
    "recipes/x.yaml:12", "command line" or "default"."""

    source: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.key, self.message) if part)


class RecipeError(ValueError):
    """A recipe that cannot be used. `str()` has a line for each problem; `problems` holds them one by one."""

    def __init__(self, problems: Iterable[Problem], recipe: str = "the recipe") -> None:
        self.problems = tuple(dict.fromkeys(problems))
        self.recipe = recipe
        super().__init__(str(self))

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        return "\n".join([f"{count} in {self.recipe}", *(f"  {problem}" for problem in self.problems)])

    # Exceptions are pickled by their message unless they say otherwise.
    def __reduce__(self) -> tuple[Any, ...]:
        return RecipeError, (self.problems, self.recipe)


def in_yaml(value: Any, limit: int = 60) -> str:
    """Return a value as a recipe would write it, cut to `limit` characters, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {in_yaml(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(in_yaml(item) for item in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def joined(path: str, name: str) -> str:
    """Return the dotted key of `name` under `path`."""
    return f"{path}.{name}" if path else name


def leaf_values(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of all values in nested dicts and lists of dicts. A list of scalars is one value; parts of a
    path may have dots."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaf_values(item, (*path, str(name)))
    else:
        yield path, value


def leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values by their full keys."""
    return {".".join(path): value for path, value in leaf_values(values)}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word most like `word`, or None if none is similar enough. `cutoff` is the least similarity, from
    0 (any word) to 1 (equal). Of words that are equally like it, one with the same letters (dpao: dapo) comes first."""
    matches = difflib.get_close_matches(word, list(known), n=3, cutoff=cutoff)
    return next((match for match in matches if sorted(match) == sorted(word)), matches[0] if matches else None)


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """Return "; nearest: WORD" to end a message with, or "" if no known word is similar."""
    near = nearest(word, known)
    return f"; nearest: {near}" if near else ""
