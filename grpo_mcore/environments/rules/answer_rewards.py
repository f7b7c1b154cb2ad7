r"""NeMo RL's rewards for answers in tags, `<think>...</think><answer>...</answer>`, that its recipes with images name.

Each is a function of the response and the ground truth, with the options that a recipe may give it. Nothing here
imports torch: they run in verifier processes.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from grpo_mcore.environments.math.statement import closing_brace
from grpo_mcore.environments.math.verifiers import HF_MATH_VERIFY, make_verifier

LEAST_AREA = 1e-3


def format(response: str, truth: str, *, think_tag: str = "think", answer_tag: str = "answer") -> float:
    """Return 0.25 for reasoning in its tags plus 0.75 for an answer in its tags."""
    parts = ((0.25, think_tag), (0.75, answer_tag))
    return sum(points for points, tag in parts if _tagged(response, tag) is not None)


def exact_alnum(response: str, truth: str, *, answer_tag: str = "answer") -> float:
    """Return 1 if the answer in its tags has the letters and digits of the truth, in either case."""
    answer = _tagged(response, answer_tag)
    return float(answer is not None and _letters(answer) == _letters(truth))


def math_expr(response: str, truth: str, *, tag: str = "answer") -> float:
    """Return 1 if the answer in its tags is the expression that the truth is."""
    answer = _tagged(response, tag)
    return 0.0 if answer is None else _same_expression(answer, truth)


def bbox_giou(response: str, truth: str, *, giou_penalty_thres: float = 10.0, answer_tag: str = "answer") -> float:
    """Return how far the box [x1, y1, x2, y2] in its tags agrees with the true one: the share of their union that they
    have in common (IoU); below the threshold less the empty share of the smallest box around both (GIoU). 0 for what is
    no box: four finite numbers with x1 <= x2 and y1 <= y2."""
    answer = _tagged(response, answer_tag)
    box, true = _box(answer or ""), _box(truth)
    if box is None or true is None:
        return 0.0
    common = _area((*map(max, box[:2], true[:2]), *map(min, box[2:], true[2:])))
    union = max(LEAST_AREA, _area(box) + _area(true) - common)
    share = common / union
    if share >= giou_penalty_thres:
        return share
    around = max(LEAST_AREA, _area((*map(min, box[:2], true[:2]), *map(max, box[2:], true[2:]))))
    return share - (around - union) / around


def geo3k(response: str, truth: str, *, format_score: float = 0.1) -> float:
    r"""Return 1 - `format_score` for the right answer in the last \boxed{}, plus `format_score` for a box behind
    closed reasoning."""
    answer = _last_box(response)
    right = 0.0 if answer is None else _same_expression(answer, truth)
    formed = re.search(r"</think>.*\\boxed\{.*\}", response, re.DOTALL) is not None
    return (1 - format_score) * right + format_score * formed


REWARDS: dict[str, Callable[..., float]] = {
    function.__name__: function for function in (format, exact_alnum, math_expr, bbox_giou, geo3k)
}


def _tagged(response: str, tag: str) -> str | None:
    match = re.search(rf"<{tag}>([\s\S]*)</{tag}>", response)
    return None if match is None else match[1]


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).lower()


@cache
def _verifier() -> Any:
    return make_verifier(HF_MATH_VERIFY)


def _same_expression(answer: str, truth: str) -> float:
    answer = answer.strip()
    boxed = answer if answer.startswith("\\boxed{") else f"\\boxed{{{answer}}}"
    return float(_verifier()(boxed, truth)[0])


def _box(text: str) -> tuple[float, ...] | None:
    try:
        sides = tuple(map(float, text.replace("[", "").replace("]", "").split(",")))
    except ValueError:
        return None
    upright = len(sides) == 4 and all(map(math.isfinite, sides)) and sides[0] <= sides[2] and sides[1] <= sides[3]
    return sides if upright else None


def _area(box: tuple[float, ...]) -> float:
    """Return the area of a box; 0 if its sides are in the wrong order."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _last_box(response: str) -> str | None:
    _, mark, after = response.rpartition("\\boxed{")
    end = closing_brace(after, 0) if mark else None
    return None if end is None else after[:end].strip()
