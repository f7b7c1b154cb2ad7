"""Rewards by rules: named components, each a number that is computed from a response and its prompt's fields.

The components run in verifier processes, without torch, because a regular expression can take for ever and a user's
function can do anything.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.http_retries import RetryPolicy
from grpo_mcore.environments.math.verifiers import (
    HF_MATH_VERIFY,
    ground_truths,
    make_verifier,
    verifier_module,
    verifier_modules,
)
from grpo_mcore.environments.registry import import_by_path
from grpo_mcore.environments.rules.answer_rewards import REWARDS
from grpo_mcore.environments.rules.async_rewards import AsyncReward, gathered
from grpo_mcore.environments.rules.reward_functions import Sample, failed_rule, reward_arguments, reward_call
from grpo_mcore.environments.user_code import imported_when_called

_ATTEMPT_S = 60.0
_ASYNC_KEYS = {"concurrency", "timeout_s", "retries", "backoff_s", "requests_per_second", "cache"}

Rule = Callable[[Sample], float | None]

# The beginning of a mark in a pattern: "<think>", "</(?:think|reasoning)>", "<|channel|>", but not "reasonable".
_MARK = re.compile(
    r"(?:<(?:\\?\|)?/?|\[/?|◁/?)(?:\((?:\?:)?)?(?:START_|END_|begin_of_|end_of_|seed:)?"
    r"(?:think|thought|reason|answer>|channel|scratchpad)",
    re.IGNORECASE,
)


class _Component(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weight: float = Field(1.0, allow_inf_nan=False)
    """Weight of this component in the reward."""

    def modules(self) -> tuple[str, ...]:
        """Return the modules that are imported before the rule runs."""
        return ()

    def check_row(self, info: Mapping[str, Any]) -> None:
        """Raise EnvironmentConfigError if the rule cannot score an answer to a prompt with these fields."""


class _TextComponent(_Component):
    """A component that checks a text. It gives 0 if there is none because the reasoning is not closed."""

    of: Literal["answer", "response"] | None = None
    """The text that is checked: the answer, or the whole response with its reasoning. null: the answer."""

    def text(self, sample: Sample) -> str | None:
        return sample.response if self.of == "response" else sample.answer


class RegexComponent(_TextComponent):
    """1 if the text matches, else 0."""

    type: Literal["regex"]
    pattern: str
    """Python regular expression."""
    match: Literal["full", "search"] = "full"
    """Whether the whole text has to match, or some part of it."""
    of: Literal["answer", "response"] | None = None
    """The text that is checked. null: the answer; or the whole response, if the pattern names a mark that an answer
    does not have (around the reasoning, `<answer>`, or of a channel)."""

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
    """1 if the length of the text is from `min` to `max`, both included, else 0."""

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
    """1 if the text contains all of `all`, at least one of `any` and none of `none`, else 0."""

    type: Literal["contains"]
    all: list[str] = Field(default_factory=list)
    """Strings that must all be in the text."""
    any: list[str] = Field(default_factory=list)
    """Strings of which at least one must be in the text. Empty: no condition."""
    none: list[str] = Field(default_factory=list)
    """Strings that must not be in the text."""
    ignore_case: bool = False
    """Whether case is ignored."""

    @model_validator(mode="after")
    def _asks_something(self) -> ContainsComponent:
        if not (self.all or self.any or self.none):
            raise ValueError("give strings in all, any or none")
        return self

    def rule(self) -> Rule:
        fold: Callable[[str], str] = str.casefold if self.ignore_case else str
        all_, any_, none = ([fold(text) for text in strings] for strings in (self.all, self.any, self.none))

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

    def modules(self) -> tuple[str, ...]:
        return verifier_modules(self.verifier)

    def rule(self) -> Rule:
        verify = make_verifier(self.verifier)

        def verified(sample: Sample) -> float:
            info = sample.info
            if info.get("ground_truth") is None:
                raise ValueError(f"the prompt has no 'ground_truth', only {sorted(info)}")
            return verify(sample.answer or "", ground_truths(info, "rules"))[0]

        return verified


class AnswerComponent(_Component):
    """One of NeMo RL's rewards for an answer in tags: `format` (reasoning and answer in their tags), `exact_alnum` (the
    letters and digits of the truth), `math_expr` (the same expression), `bbox_giou` (a box, by generalised IoU),
    `geo3k` (an expression in a box behind the reasoning)."""

    type: Literal["format", "exact_alnum", "math_expr", "bbox_giou", "geo3k"]
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward, such as giou_penalty_thres."""

    @model_validator(mode="after")
    def _takes_options(self) -> AnswerComponent:
        known = [name for name in inspect.signature(REWARDS[self.type]).parameters if name not in ("response", "truth")]
        if unknown := sorted(set(self.kwargs) - set(known)):
            raise ValueError(f"{self.type} has no option {unknown[0]}, only {', '.join(known)}")
        return self

    def modules(self) -> tuple[str, ...]:
        return verifier_modules(HF_MATH_VERIFY) if self.type in ("math_expr", "geo3k") else ()

    def check_row(self, info: Mapping[str, Any]) -> None:
        if self.type != "format" and info.get("ground_truth") is None:
            raise EnvironmentConfigError(f"the reward {self.type} needs 'ground_truth', and a row has {sorted(info)}")

    def rule(self) -> Rule:
        reward = REWARDS[self.type]

        def rewarded(sample: Sample) -> float:
            truths = [""] if self.type == "format" else ground_truths(sample.info, "rules")
            return max(reward(sample.response, truth, **self.kwargs) for truth in truths)

        return rewarded


class FunctionComponent(_Component):
    """The value of a user's function. The keys from `concurrency` on are for `async` functions: their calls for all
    samples wait together in one process."""

    type: Literal["function"]
    path: str
    """Import path of the function. It gets what its parameters name, see `reward_functions.reward_call`."""
    trl_messages: bool = False
    """Whether a function with TRL's signature gets prompts and completions as messages instead of strings."""
    concurrency: int = Field(64, ge=1)
    """Maximum concurrent calls."""
    timeout_s: float | None = Field(None, gt=0)
    """Limit of one attempt in seconds, not counting the wait for its turn. null: 60."""
    retries: int = Field(3, ge=0)
    """Maximum repetitions of a call that raises or times out. HTTP statuses other than 408, 425, 429 and 5xx are final,
    and so are mistakes such as a TypeError."""
    backoff_s: float = Field(0.5, ge=0)
    """Seconds before the first repetition, twice as many before each further one, and no fewer than a Retry-After."""
    requests_per_second: float | None = Field(None, gt=0)
    """Maximum attempts started in a second. null: no limit."""
    cache: bool = False
    """Whether a call gets the result of an earlier one with the same arguments."""

    @property
    def is_async(self) -> bool:
        function = self._function()
        return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004

    def modules(self) -> tuple[str, ...]:
        return (verifier_module(self.path), *imported_when_called(self._function()))

    def _function(self) -> Callable[..., Any]:
        function = import_by_path(self.path, what="reward function")
        if not callable(function):
            raise EnvironmentConfigError(f"the reward function {self.path!r} is {type(function).__name__}, no function")
        if isinstance(function, type):
            raise EnvironmentConfigError(
                f"the reward function {self.path!r} is a class, no function; name an instance with __call__"
            )
        return function

    def check(self) -> None:
        """Raise EnvironmentConfigError if the function does not load, or has keys that it cannot have."""
        if not self.is_async and (set_keys := sorted(self.model_fields_set & _ASYNC_KEYS)):
            raise EnvironmentConfigError(
                f"the key {set_keys[0]} is for async functions, and {self.path!r} is none: write `async def`, and "
                "`await asyncio.to_thread(...)` around a call that waits"
            )

    def rule(self) -> Rule:
        return reward_call(self._function(), as_messages=self.trl_messages)

    def async_reward(self, name: str) -> AsyncReward:
        """Return the function with its limits, for the event loop."""
        return AsyncReward(
            name,
            self._function(),
            as_messages=self.trl_messages,
            concurrency=self.concurrency,
            timeout_s=_ATTEMPT_S if self.timeout_s is None else self.timeout_s,
            retries=RetryPolicy(self.retries, self.backoff_s),
            requests_per_second=self.requests_per_second,
            cache=self.cache,
        )

    def row_problem(self, info: Mapping[str, Any]) -> str | None:
        """Return why the function can score no answer to this prompt, if its `row_problem(info)` says so; else None."""
        problem = getattr(self._function(), "row_problem", None)
        return None if problem is None else problem(info)

    def check_row(self, info: Mapping[str, Any]) -> None:
        try:
            reward_arguments(self._function(), as_messages=self.trl_messages)[0](Sample("", info))
        except TypeError as error:
            raise EnvironmentConfigError(f"the reward function {self.path!r} does not fit the data: {error}") from error


Component = Annotated[
    RegexComponent | LengthComponent | ContainsComponent | VerifierComponent | AnswerComponent | FunctionComponent,
    Field(discriminator="type"),
]


def make_rules(components: Mapping[str, Mapping[str, Any]]) -> Callable[[Sample], dict[str, Any]]:
    """Return a function of a sample that returns {"values": by component, "notes"}, without components that do not
    apply; or {"failed": name, "error", "where", "traceback"} of the first component that raises or returns no finite
    number. `components`: as a recipe has them."""
    rules = {name: part.rule() for name, part in _read(components).items()}

    def apply(sample: Sample) -> dict[str, Any]:
        values = {}
        for name, rule in rules.items():
            try:
                value = rule(sample)
            except MemoryError:
                raise
            except Exception as error:
                return failed_rule(name, error)
            if value is None:
                continue
            if not math.isfinite(value):
                return {"failed": name, "error": f"its value is {value}"}
            values[name] = value
        return {"values": values, "notes": sample.notes}

    return apply


def make_async_rules(components: Mapping[str, Mapping[str, Any]]) -> Callable[[Sample], Awaitable[dict[str, Any]]]:
    """Do the same as `make_rules` for components that are asynchronous functions."""
    parts = _read(components)
    for module in {module for part in parts.values() for module in part.modules()}:
        with contextlib.suppress(ImportError):  # that the function may never reach
            importlib.import_module(module)
    return gathered([part.async_reward(name) for name, part in parts.items() if part.type == "function"])


def _read(components: Mapping[str, Mapping[str, Any]]) -> dict[str, Component]:
    return TypeAdapter(dict[str, Component]).validate_python(components)
