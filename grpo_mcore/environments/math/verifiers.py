"""Verifiers of one response, by name or import path: `fn(response, ground_truth) -> bool | float | (bool | float,
answer)`.

Imports stay light here: neither torch nor sympy.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_mcore.base.text import as_written, shorten
from grpo_mcore.environments.registry import import_by_path
from grpo_mcore.environments.user_code import imported_when_called

Verifier = Callable[[str, str], Any]

HF_MATH_VERIFY = "hf_math_verify"

_BY_NAME = {
    HF_MATH_VERIFY: "grpo_mcore.environments.math.hf_math_verify:hf_math_verify",
    "dapo_math_verify": "grpo_mcore.environments.math.dapo:dapo_math_verify",
    "english_multichoice": "grpo_mcore.environments.math.multiple_choice:english_choice",
    "multilingual_multichoice": "grpo_mcore.environments.math.multiple_choice:multilingual_choice",
}
MULTIPLE_CHOICE = ("english_multichoice", "multilingual_multichoice")


def make_verifier(name: str) -> Callable[[str, str | Sequence[str]], tuple[float, str | None]]:
    """Return (response, ground truth) -> (reward, answer) for the verifier of this name or import path. Of several
    ground truths the one with the highest reward counts; the letters of a multiple choice are one ground truth."""
    verifier: Verifier = import_by_path(_BY_NAME.get(name, name), what="verifier")

    def verify_one(response: str, ground_truth: str) -> tuple[float, str | None]:
        outcome = verifier(response, ground_truth)
        reward, answer = outcome if isinstance(outcome, tuple) else (outcome, None)
        return float(reward), None if answer is None else str(answer)

    def verify(response: str, ground_truth: str | Sequence[str]) -> tuple[float, str | None]:
        alternatives = [ground_truth] if isinstance(ground_truth, str) else ground_truth
        if name in MULTIPLE_CHOICE:
            return verify_one(response, ", ".join(alternatives))
        return max((verify_one(response, text) for text in alternatives), key=lambda outcome: outcome[0])

    return verify


def is_built_in(name: str) -> bool:
    return name in _BY_NAME


def verifier_module(name: str) -> str:
    """Return the module of the verifier of this name or import path."""
    path = _BY_NAME.get(name, name)
    return path.partition(":")[0] if ":" in path else path.rpartition(".")[0]


def verifier_modules(name: str) -> tuple[str, ...]:
    """Return the modules that are imported before the verifier runs: its own, and those that a custom one imports when
    it is called."""
    late = () if is_built_in(name) else imported_when_called(import_by_path(name, what="verifier"))
    return (verifier_module(name), *late)


def reason_for(reward: float, answer: str | None, ground_truth: str) -> str:
    """Return in words why a response got its reward. Wrong is 0, or less where a verifier punishes it."""
    if reward == 1.0:
        return "correct"
    if reward > 0.0:
        return f"partly correct: {reward:g}"
    if answer is None:
        return "no answer found"
    return f"wrong: {shorten(answer)} != {shorten(ground_truth)}"


def ground_truths(metadata: Mapping[str, Any], environment: str) -> list[str]:
    """Return a prompt's ground truths: several where it has a list, of which an answer must be one. Of a GSM8K solution
    the part behind "####" is the ground truth, of Skywork-OR1's, JSON of a list, its element. Raises ValueError where a
    prompt has none, or one that no answer can match."""
    ground_truth = _out_of_a_list(metadata.get("ground_truth"))
    if ground_truth is None:
        raise ValueError(
            f"the {environment} environment needs 'ground_truth' in extra_env_info, got {sorted(metadata)}; "
            f"check the dataset's output_key and its processor"
        )
    if hasattr(ground_truth, "tolist"):  # numpy's, as tables have it
        ground_truth = ground_truth.tolist()
    values = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    for value in values:
        if isinstance(value, Mapping | list | tuple | set | bytes | bytearray) or _is_missing(value):
            raise ValueError(
                f"the ground truth {shorten(repr(ground_truth))} is {_kind(value)}, which no answer can match; "
                "name the field that holds the answer in the dataset's output_key, such as reward_model.ground_truth"
            )
    if not values:
        raise ValueError("the ground truth is an empty list, which no answer can match")
    return [as_written(value).rpartition("####")[2].strip() for value in values]


def _out_of_a_list(value: Any) -> Any:
    """Return the text in JSON of a list with one text, and everything else as it is: whether an answer must be one of
    several or all of them, JSON does not say."""
    if not isinstance(value, str) or not value.startswith('["'):
        return value
    try:
        inside = json.loads(value)
    except ValueError:
        return value
    return inside[0] if len(inside) == 1 and isinstance(inside[0], str) else value


def _is_missing(value: Any) -> bool:
    """Return whether a ground truth is empty; an empty cell of a table may be a float that is no number."""
    return value is None or value != value or not str(value).rpartition("####")[2].strip()


def _kind(value: Any) -> str:
    return "blank" if _is_missing(value) else f"a {type(value).__name__}"
