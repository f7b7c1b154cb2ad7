"""The base class of all sections, and the number types that they share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, WrapValidator

from grpo_mcore.recipe.errors import nearest_hint

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]

# For sections whose default is "off": `async_grpo: null` means the same as leaving the section out.
OffWhenNull = BeforeValidator(lambda value: {} if value is None else value)


VariableText = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""The value of an environment variable, for which a recipe may write a whole number."""

T = TypeVar("T")
Derived = Annotated[T, WrapValidator(lambda value, validate: None if value is None else validate(value))]
"""A value that a recipe may leave null: MasterConfig then derives it from others, so code reads it as set."""
NULL: Any = None
"""The default of a Derived value."""

FIXED = "fixed when a run resumes"
Fixed = Annotated[T, FIXED]
"""A value that a run keeps when it resumes from a checkpoint. All other values may change, and take effect."""


_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class NameOrPath:
    """The type of a text that is one of `names`, or the import path "package.module:name" of a user's object."""

    names: tuple[str, ...] = ()

    def check(self, value: str) -> str:
        """Return the value. Raises ValueError for one that is neither."""
        if value not in self.names and not _PATH.fullmatch(value):
            known = f"one of {', '.join(self.names)}, or " if self.names else ""
            hint = nearest_hint(value, self.names)
            raise ValueError(f"expected {known}an import path such as package.module:name{hint}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler(Annotated[source, AfterValidator(self.check)])


ImportPath = Annotated[str, NameOrPath()]
"""The import path "package.module:name" of a user's function or class: docs/extending.md."""


def is_path(name: str) -> bool:
    """Return whether a NameOrPath is an import path."""
    return ":" in name


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
