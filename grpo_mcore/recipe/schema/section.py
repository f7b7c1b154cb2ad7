"""The base class of all sections, and the number types that they share."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationError,
    WrapValidator,
)

from grpo_mcore.base.imports import module_of_file
from grpo_mcore.recipe.errors import nearest_hint

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what every generator of random numbers takes
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
FilledText = Annotated[str, Field(min_length=1)]  # "" comes from a variable that is not set

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


def is_path(text: Any) -> bool:
    """Return whether a value is an import path "package.module:name"."""
    return isinstance(text, str) and _PATH.fullmatch(text) is not None


def check_import_path(value: str) -> str:
    """Return the value. Raises ValueError for one that is no import path."""
    if not is_path(value):
        hint = f"; {module_of_file(value)}" if "/" in value else ""
        raise ValueError(f"expected an import path such as package.module:name{hint}")
    return value


ImportPath = Annotated[str, AfterValidator(check_import_path)]
"""The import path "package.module:name" of a user's function or class: docs/extending.md."""


class Section(BaseModel):
    """A mapping of known keys to typed values. Attributes are the keys. For scripts that treat the configuration as a
    dict, `cfg["key"]`, `cfg["key"] = value`, `cfg.get("key", default)` and `"key" in cfg` work too."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, defer_build=True, protected_namespaces=()
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


class CustomCode(Section):
    """A function or class of a user: `{path, options}`."""

    path: ImportPath
    """Import path of the function or class: docs/extending.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of every call."""


@dataclass(frozen=True)
class NameOrCode:
    """The type of a value that is one of `names` (any text if there are none), or a user's `{path, options}`, for which
    an import path stands as well."""

    names: tuple[str, ...] = ()

    def check(self, value: Any) -> str | CustomCode:
        """Return the value. Raises ValueError for one that is neither."""
        if isinstance(value, CustomCode) or value in self.names:
            return value
        if is_path(value):
            return CustomCode(path=value)
        if isinstance(value, dict):
            try:
                return CustomCode(**value)
            except ValidationError as error:
                raise ValueError(f"expected {{path: package.module:name, options: {{...}}}}: {_first(error)}") from None
        if isinstance(value, str) and not self.names:
            return value
        known = f"one of {', '.join(self.names)}" if self.names else "a name"
        hint = nearest_hint(value, self.names) if isinstance(value, str) else ""
        raise ValueError(f"expected {known}, or custom code as {{path: package.module:name}}{hint}")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler(Annotated[Any, PlainValidator(self.check)])


def _first(error: ValidationError) -> str:
    """Return the first mistake of a section, in one line."""
    mistake = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in mistake['loc'])}: {mistake['msg']}"
