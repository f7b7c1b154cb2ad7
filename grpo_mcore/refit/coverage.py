"""Proof, before a byte moves, that the policy ranks together hold every element of every planned tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from grpo_mcore.families.spec import Box
from grpo_mcore.refit.plan import RefitError, RefitPlan


def check_coverage(plan: RefitPlan, held: Mapping[str, Iterable[tuple[str, Box]]]) -> None:
    """`held`: rank name -> (tensor, box) of each piece that the rank writes.

    Equal boxes on several ranks are replicas and allowed. Raises RefitError that names tensor and rank for a
    tensor that is not in the plan, a box outside its tensor, boxes that overlap in part, and elements that
    nobody holds.
    """
    boxes: dict[str, dict[Box, str]] = {}
    for rank, pieces in held.items():
        for name, box in pieces:
            if name not in plan.slots:
                raise RefitError(f"policy rank {rank} holds {name!r}, which the refit plan does not have")
            shape = plan.slots[name][1].shape
            inside = len(box) == len(shape) and all(
                0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
            )
            if not inside:
                raise RefitError(f"policy rank {rank} holds {box} of {name!r}, outside its shape {shape}")
            boxes.setdefault(name, {}).setdefault(box, rank)
    for name, (_, slot) in plan.slots.items():
        _check_tensor(name, slot.shape, boxes.get(name, {}))


def _check_tensor(name: str, shape: Sequence[int], boxes: Mapping[Box, str]) -> None:
    held = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    if held == math.prod(shape) and len(boxes) == 1:
        return
    for (box, rank), (other, other_rank) in combinations(boxes.items(), 2):
        if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(box, other, strict=True)):
            raise RefitError(
                f"policy ranks {rank} and {other_rank} hold overlapping parts of {name!r}: {box} and {other}"
            )
    if held != math.prod(shape):
        raise RefitError(
            f"the policy ranks together hold {held:,} of the {math.prod(shape):,} elements of {name!r} "
            f"(boxes: {sorted(boxes) or 'none'})"
        )
