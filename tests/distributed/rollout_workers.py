"""The environment of test_rollouts_ray.py, apart from its engines: what it imports, each of its processes imports."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from grpo_mcore.rollout.trajectory import Outcome, Trajectory

FATAL, HANGING, BROKEN, SHORT = 100, 101, 102, 103
"""Prompts: sample 1 kills its environment, samples hang, samples raise; from SHORT on, all have one turn."""


class Game:
    """Sample i of prompt n has 1 + (i + n) % 3 turns, but for the prompts above; the state counts them."""

    def advance(self, metadata: Sequence[dict[str, Any]], *trajectories: Trajectory) -> list[Outcome]:
        return [self._decide(sample, entry) for sample, entry in zip(trajectories, metadata, strict=True)]

    def _decide(self, sample: Trajectory, metadata: dict[str, Any]) -> Outcome:
        number, index = metadata["number"], sample.generation_index
        if number == FATAL and index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == HANGING:
            time.sleep(3600)
        if number == BROKEN:
            raise RuntimeError("the world ended")
        turn = metadata.get("turn", 0) + 1
        over = number >= FATAL or turn == 1 + (index + number) % 3
        return Outcome(1.0, None, "", 0.0, terminated=over, observation="on", metadata=metadata | {"turn": turn})
