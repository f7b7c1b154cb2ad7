"""Which finished groups train next, so that none ever gets older than the age limit. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

GroupOrder = Literal["in_order", "oldest_first", "freshest_first"]


def choose(
    in_flight: Mapping[str, int],
    finished: Collection[str],
    count: int,
    *,
    version: int,
    max_age: int,
    order: GroupOrder,
    may_drop: bool = False,
) -> tuple[str, ...]:
    """`count` of the groups in flight for the step that `version` trains, in the order of dispatch; empty where it has
    to wait for more of them.

    `in_flight`: uid -> version that generates it, in the order of dispatch. in_order takes the first ones, whichever
    finished first. The others take finished ones, the oldest or the freshest first, and wait only for those that would
    get too old otherwise: with `count` groups a step, at most `count` * (k + 1) groups may be due within the next k
    steps. This holds before the call (at most `count` * (max_age + 1) groups are in flight) and after it.
    `may_drop`: what gets too old is dropped, and nobody waits for it.
    """
    uids = list(in_flight)
    if order == "in_order":
        first = tuple(uids[:count])
        return first if all(uid in finished for uid in first) else ()
    ready = [uid for uid in uids if uid in finished]
    ready.sort(key=lambda uid: in_flight[uid] if order == "oldest_first" else -in_flight[uid])  # stable
    chosen: list[str] = []
    for later in range(0 if may_drop else max_age + 1):
        due = {uid for uid in uids if in_flight[uid] + max_age <= version + later}
        missing = len(due) - later * count - len(due.intersection(chosen))
        candidates = [uid for uid in ready if uid in due and uid not in chosen]
        if missing > len(candidates):
            return ()
        chosen += candidates[: max(0, missing)]
    chosen += [uid for uid in ready if uid not in chosen][: count - len(chosen)]
    return tuple(uid for uid in uids if uid in chosen) if len(chosen) == count else ()
