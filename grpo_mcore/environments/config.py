"""The base of every environment's section of the recipe, `env.<name>`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from grpo_mcore.environments.answers import Thoughts
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.recipe import nearest


class EnvConfig(BaseModel):
    """A section of a recipe with known keys and typed values."""

    model_config = ConfigDict(extra="forbid")

    section: ClassVar[str]
    """Dotted name of the section in a recipe, such as `env.math`."""

    solved_at: float | None = None
    """Lowest reward of a sample that counts as solved, for `accuracy` and `pass@k`. null: 1 if all rewards are 0 or 1;
    graded rewards then have no accuracy."""

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
            problem = first["msg"]
            if first["type"] == "union_tag_not_found":
                problem = f"the key {first['ctx']['discriminator']} is missing"
            raise EnvironmentConfigError(f"{cls.section}.{key}: {problem}, got {first['input']!r}") from error


class AnswerConfig(EnvConfig):
    """The section of an environment that scores the answer of a response, without its reasoning."""

    thoughts: Thoughts = "auto"
    """Marks around the reasoning; the answer follows it. `auto`: `<think>` and its like, and Harmony's channels, in the
    response or at the end of its prompt; then the content of `<answer>` if there is one. `none`: the whole response is
    the answer. Or two marks of your own: [OPENING, CLOSING]."""

    stop_strings: list[Annotated[str, Field(min_length=1)]] | None = None
    """Strings that end a generation for this environment, besides policy.generation.stop_strings. A processor may set
    others for a row."""

    @field_validator("thoughts")
    @classmethod
    def _marks_have_text(cls, thoughts: Thoughts) -> Thoughts:
        if isinstance(thoughts, tuple) and not all(mark.strip() for mark in thoughts):
            raise ValueError("opening and closing mark must both be non-empty")
        return thoughts
