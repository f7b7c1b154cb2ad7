"""A reward of your own: one Python function, named in a recipe by its import path.

The function takes the text of an answer and the fields of its prompt's row, and returns a number. It may ask for more
by the names of its parameters, or have TRL's signature: docs/environments.md. recipe.yaml beside this file names it
as a component of the built-in environment `rules`, which runs it in a process of its own: an answer on which it
crashes or hangs is left out of the step and counted, never scored 0.

What it is not: a reward that needs a model, a server or several turns. For these see the environment `reward_model` and
examples/custom_environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGITS = 3  # the demo's answers have a fixed width: 82 is written 082


def share_of_digits(response: str, info: Mapping[str, Any]) -> float:
    """Return the share of an answer's digits that are right: "081" scores 2/3 where the sum is 82.

    `info` has the fields of the row; `ground_truth` is its expected answer.
    """
    truth = f"{int(info['ground_truth']):0{DIGITS}d}"
    return sum(said == right for said, right in zip(response.strip(), truth, strict=False)) / DIGITS
