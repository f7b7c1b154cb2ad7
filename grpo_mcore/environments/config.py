"""The base of every environment's section of the recipe, `env.<name>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from grpo_mcore.environments.answers import Thoughts
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.recipe import nearest


class EnvConfig(BaseModel):
    """A section with known keys and typed values."""

    model_config = ConfigDict(extra="forbid")

    section: ClassVar[str]
    """The section's place in a recipe, such as `env.math`."""

    solved_at: float | None = None
    """Reward from which on a sample counts as solved, for `accuracy` and `pass@k`. null: 1, if all rewards are 0 or 1;
    graded rewards have no accuracy then."""

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> Self:
        """Return the validated section. Raises EnvironmentConfigError that names the wrong key and, for an unknown one,
        the nearest known key."""
        for key in section:
            if key not in cls.model_fields:
                near = nearest(key, cls.model_fields)
                hint = f"did you mean {near!r}? " if near else ""
                known = ", ".join(cls.model_fields)
                raise EnvironmentConfigError(f"{cls.section}.{key}: unknown key; {hint}known: {known}")
        try:
            return cls(**section)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            said = first["msg"]
            if first["type"] == "union_tag_not_found":
                said = f"the key {first['ctx']['discriminator']} is missing"
            raise EnvironmentConfigError(f"{cls.section}.{key}: {said}, got {first['input']!r}") from error


class AnswerConfig(EnvConfig):
    """The section of an environment that scores the answer of a response, without its thought."""

    thoughts: Thoughts = "auto"
    """Marks around the thought, behind which the answer stands. `auto`: `<think>` and its like, and Harmony's
    channels, wherever the response or the end of its prompt has them; then `<answer>` where there is one. `none`: the
    whole response is the answer. Or two marks of your own: [OPENING, CLOSING]."""

    @field_validator("thoughts")
    @classmethod
    def _marks_have_text(cls, thoughts: Thoughts) -> Thoughts:
        if isinstance(thoughts, tuple) and not all(mark.strip() for mark in thoughts):
            raise ValueError("both marks need text")
        return thoughts
