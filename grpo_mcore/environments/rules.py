"""Rewards by rules: named components, each a number that is computed from a response and its prompt's fields.

The components run in verifier processes, without torch, because a regular expression can take for ever and a user's
function can do anything.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from grpo_mcore.environments.config import EnvironmentConfigError
from grpo_mcore.environments.registry import import_by_path
from grpo_mcore.environments.reward_functions import Sample, reward_arguments, reward_call, where_raised
from grpo_mcore.environments.verifiers import ground_truths, make_verifier, verifier_module

Rule = Callable[[Sample], float | None]

_MARK = re.compile(r"think|thought|reason|answer>|channel|scratchpad", re.IGNORECASE)


class _Component(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weight: float = Field(1.0, allow_inf_nan=False)
    """Weight of this component in the reward."""

    def module(self) -> str | None:
        """Return the module that the rule imports, if it imports one."""
        return None

    def check_row(self, info: Mapping[str, Any]) -> None:
        """Raise EnvironmentConfigError where the rule cannot score an answer to a prompt with these fields."""


class _TextComponent(_Component):
    """A component that looks at a text, and gives 0 where there is none because a thought is not closed."""

    of: Literal["answer", "response"] | None = None
    """The text that is looked at: the answer, or the whole response with its thought. null: the answer."""

    def text(self, sample: Sample) -> str | None:
        return sample.response if self.of == "response" else sample.answer


class RegexComponent(_TextComponent):
    """1 where the text matches, else 0."""

    type: Literal["regex"]
    pattern: str
    """Python regular expression."""
    match: Literal["full", "search"] = "full"
    """Whether the whole text has to match, or some part of it."""
    of: Literal["answer", "response"] | None = None
    """The text that is looked at. null: the answer; the whole response where the pattern names a mark that an answer
    does not have: of a thought, of `<answer>`, or of a channel."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from error
        return pattern

    def rule(self) -> Rule:
        expression = re.compile(self.pattern)
        match = expression.fullmatch if self.match == "full" else expression.search
        seen = self if self.of or not _MARK.search(self.pattern) else self.model_copy(update={"of": "response"})

        def matches(sample: Sample) -> float:
            text = seen.text(sample)
            return float(text is not None and match(text) is not None)

        return matches


class LengthComponent(_TextComponent):
    """1 where the text is from `min` to `max` long, both included, else 0."""

    type: Literal["length"]
    unit: Literal["characters", "words", "lines"] = "characters"
    """Unit of min and max. Words are separated by white space."""
    min: int = Field(0, ge=0)
    """Minimum length."""
    max: int | None = Field(None, ge=0)
    """Maximum length. null: none."""

    @model_validator(mode="after")
    def _in_order(self) -> LengthComponent:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self

    def rule(self) -> Rule:
        count: Callable[[str], int] = {
            "characters": len,
            "words": lambda text: len(text.split()),
            "lines": lambda text: len(text.splitlines()),
        }[self.unit]
        most = math.inf if self.max is None else self.max

        def fits(sample: Sample) -> float:
            text = self.text(sample)
            return float(text is not None and self.min <= count(text) <= most)

        return fits


class ContainsComponent(_TextComponent):
    """1 where the text contains all of `all`, at least one of `any` and none of `none`, else 0."""

    type: Literal["contains"]
    all: list[str] = Field(default_factory=list)
    """Texts that must all be there."""
    any: list[str] = Field(default_factory=list)
    """Texts of which at least one must be there. Empty: no condition."""
    none: list[str] = Field(default_factory=list)
    """Texts that must not be there."""
    ignore_case: bool = False
    """Whether case is ignored."""

    @model_validator(mode="after")
    def _asks_something(self) -> ContainsComponent:
        if not (self.all or self.any or self.none):
            raise ValueError("give texts in all, any or none")
        return self

    def rule(self) -> Rule:
        fold: Callable[[str], str] = str.casefold if self.ignore_case else str
        all_, any_, none = ([fold(text) for text in texts] for texts in (self.all, self.any, self.none))

        def contains(sample: Sample) -> float:
            seen = self.text(sample)
            if seen is None:
                return 0.0
            content = fold(seen)
            allowed = all(text in content for text in all_) and not any(text in content for text in none)
            return float(allowed and (not any_ or any(text in content for text in any_)))

        return contains


class VerifierComponent(_Component):
    """The reward of a verifier for the answer and the prompt's `ground_truth`."""

    type: Literal["verifier"]
    verifier: str
    """hf_math_verify, dapo_math_verify, english_multichoice, multilingual_multichoice, or an import path."""

    def module(self) -> str:
        return verifier_module(self.verifier)

    def rule(self) -> Rule:
        verify = make_verifier(self.verifier)

        def verified(sample: Sample) -> float:
            info = sample.info
            if info.get("ground_truth") is None:
                raise ValueError(f"the prompt has no 'ground_truth', only {sorted(info)}")
            return verify(sample.answer or "", ground_truths(info, "rules"))[0]

        return verified


class FunctionComponent(_Component):
    """The value of a user's function."""

    type: Literal["function"]
    path: str
    """Import path of the function. It gets what its parameters name: `reward_functions.reward_call`."""
    trl_messages: bool = False
    """Whether a function with TRL's signature gets prompts and completions as messages, instead of texts."""

    def module(self) -> str:
        return verifier_module(self.path)

    def rule(self) -> Rule:
        function = import_by_path(self.path, what="reward function")
        if not callable(function):
            raise EnvironmentConfigError(f"the reward function {self.path!r} is {type(function).__name__}, no function")
        return reward_call(function, as_messages=self.trl_messages)

    def check_row(self, info: Mapping[str, Any]) -> None:
        function = import_by_path(self.path, what="reward function")
        try:
            reward_arguments(function, as_messages=self.trl_messages)[0](Sample("", info))
        except TypeError as error:
            raise EnvironmentConfigError(f"the reward function {self.path!r} does not fit the data: {error}") from error


Component = Annotated[
    RegexComponent | LengthComponent | ContainsComponent | VerifierComponent | FunctionComponent,
    Field(discriminator="type"),
]


def make_rules(components: Mapping[str, Mapping[str, Any]]) -> Callable[[Sample], dict[str, Any]]:
    """Return sample -> {"values": by name, "notes"}, for components as a recipe has them, without those that do not
    apply. The result is {"failed": name, "why", "where", "traceback"} for the first component that raises or returns no
    finite number."""
    parts = TypeAdapter(dict[str, Component]).validate_python(components)
    rules = {name: part.rule() for name, part in parts.items()}

    def apply(sample: Sample) -> dict[str, Any]:
        values = {}
        for name, rule in rules.items():
            try:
                value = rule(sample)
            except MemoryError:
                raise
            except Exception as error:
                why, where = f"{type(error).__name__}: {error}", where_raised(error)
                return {"failed": name, "why": why, "where": where, "traceback": traceback.format_exc()}
            if value is None:
                continue
            if not math.isfinite(value):
                return {"failed": name, "why": f"its value is {value}"}
            values[name] = value
        return {"values": values, "notes": sample.notes}

    return apply
