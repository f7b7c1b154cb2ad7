"""The base class of all sections, and the number types that they share."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]

# For sections whose default is "off": `async_grpo: null` means the same as leaving the section out.
OffWhenNull = BeforeValidator(lambda value: {} if value is None else value)


T = TypeVar("T")
Derived = Annotated[T, WrapValidator(lambda value, validate: None if value is None else validate(value))]
"""A value that a recipe may leave null: MasterConfig then derives it from others, so code reads it as set."""
NULL: Any = None
"""The default of a Derived value."""

FIXED = "fixed when a run resumes"
Fixed = Annotated[T, FIXED]
"""A value that a run keeps when it resumes from a checkpoint. All other values may change, and take effect."""


class Section(BaseModel):
    """A mapping of known keys to typed values. Attributes are the keys. For scripts that treat the configuration as a
    dict, `cfg["key"]`, `cfg["key"] = value`, `cfg.get("key", default)` and `"key" in cfg` work too."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
        protected_namespaces=(),
    )

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in type(self).model_fields:
            raise KeyError(key)
        setattr(self, key, value)

    def keys(self) -> list[str]:
        """Return the names of the keys, so that `**section` and `dict(section)` work."""
        return list(type(self).model_fields)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if the section has no such key."""
        return self[key] if key in self else default
