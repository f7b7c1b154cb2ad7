"""The places of a rollout's ground truth: the task's parameters, or a field of the verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mcore.data.gym.rollout import attribute_of
from grpo_mcore.data.interfaces import DataError

_PARAMS = "responses_create_params"
USUAL_PLACES = (
    f"{_PARAMS}.ground_truth",
    f"{_PARAMS}.metadata.ground_truth",
    f"{_PARAMS}.metadata.answer",
    f"{_PARAMS}.metadata.expected_answer",
    "ground_truth",
    "expected_answer",
    "verifier_metadata.ground_truth",
    "verifier_metadata.expected_answer",
    "reference_answer",
)
"""Places in the order in which they are searched. Fields that may hold the policy's answer (`answer`,
`extracted_answer`) are not among them."""


@dataclass(frozen=True)
class Place:
    """A field of a rollout, or of its `responses_create_params`; `inside` holds the keys from there on."""

    name: str
    in_params: bool
    field: str
    inside: tuple[str, ...]


def places(first: Sequence[str] = ()) -> tuple[Place, ...]:
    """Return the places to search: `first` (dotted paths from the user), then the usual ones. Raises DataError."""
    return tuple(_place(name) for name in dict.fromkeys((*first, *USUAL_PLACES)))


def _place(name: str) -> Place:
    keys = name.split(".")
    in_params = keys[0] == _PARAMS
    if in_params:
        del keys[0]
    if not keys or not all(keys):
        raise DataError(f"the ground truth's key {name!r} is not a path such as expected_answer or metadata.answer")
    if not in_params and keys[0] in ("response", "output", "reward"):
        raise DataError(f"the ground truth's key {name!r} is part of what the policy did, not of the task")
    return Place(name, in_params, keys[0], tuple(keys[1:]))


def finder(where: Sequence[Place]) -> Callable[[Any], tuple[Any, str] | None]:
    """Return a function rollout -> (ground truth, name of its place), or None where no place holds one. Null and blank
    text do not count as a ground truth; 0 and false do."""
    steps = [(place.in_params, attribute_of(place.field, place.in_params), place.inside, place.name) for place in where]

    def find(rollout: Any) -> tuple[Any, str] | None:
        params = rollout.responses_create_params
        for in_params, attribute, inside, name in steps:
            value = getattr(params if in_params else rollout, attribute)
            for key in inside:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None and value == value and not (isinstance(value, str) and not value.strip()):
                return value, name
        return None

    return find
