"""Names of layouts, such as TP2xPP2 or EP2xTP2-SP, for `grpo-mcore parity`."""

from __future__ import annotations

import re
from math import ceil

from grpo_mcore.families import ModelShape
from grpo_mcore.tools.parity.rank import LayoutCase

DEFAULT_LAYOUTS = ("TP1", "TP2", "PP2", "VPP2", "CP2", "EP2", "ETP2", "TP2xPP2", "TP2xCP2", "EP2xPP2", "EP2xTP2")
DIMENSIONS = ("TP", "PP", "VPP", "CP", "DP", "EP", "ETP")


class LayoutNameError(ValueError):
    """A name that does not denote a layout."""


def layout_named(name: str, shape: ModelShape) -> LayoutCase:
    """Return the smallest layout with these sizes. Upper and lower case are equal: tp2 is TP2.

    Sequence parallelism is added if experts under tensor parallelism need it, data parallelism if EP x ETP needs more
    ranks. Raises LayoutNameError.
    """
    name = name.upper().replace("X", "x")
    sizes = dict.fromkeys(DIMENSIONS, 0)
    for part in name.replace("-SP", "").split("x"):
        found = re.fullmatch(r"([A-Z]+)([1-9]\d*)", part)
        if found is None or found[1] not in sizes:
            raise LayoutNameError(f"--layouts: {name!r}: {part!r} is not one of {', '.join(DIMENSIONS)} with a number")
        sizes[found[1]] = int(found[2])
    tensor = sizes["TP"] or sizes["ETP"] or 1
    context, expert, expert_tensor = (sizes[dimension] or 1 for dimension in ("CP", "EP", "ETP"))
    return LayoutCase(
        name,
        tensor=tensor,
        pipeline=sizes["PP"] or (2 if sizes["VPP"] > 1 else 1),
        data=sizes["DP"] or ceil(expert * expert_tensor / (tensor * context)),
        sequence_parallel="-SP" in name or (shape.experts is not None and tensor > 1),
        context=context,
        virtual=sizes["VPP"] if sizes["VPP"] > 1 else None,
        expert=expert,
        expert_tensor=expert_tensor,
    )
