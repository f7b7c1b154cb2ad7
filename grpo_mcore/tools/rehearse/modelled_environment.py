"""A modelled environment: it takes a drawn time for each turn, and its reward depends on the prompt."""

import math
from collections.abc import Sequence
from typing import Any

from grpo_mcore.cluster.virtual_cluster import sleep
from grpo_mcore.rollout.trajectory import Outcome, Trajectory
from grpo_mcore.tools.rehearse.prompts import FRAME
from grpo_mcore.tools.rehearse.world import World


class ModelledEnvironment:
    """Stands for any environment that takes turns. Its answer to a turn depends on the turn alone."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def advance(self, metadata: Sequence[dict[str, Any]], *trajectories: Trajectory) -> list[Outcome]:
        section = self.world.config.rehearse
        outcomes, seconds = [], 0.0
        for trajectory in trajectories:
            turn = sum(item.loss_mask for item in trajectory.turns)
            if self.world.recorded is not None:
                outcomes.append(self._recorded(trajectory, turn))
                seconds = max(seconds, outcomes[-1].seconds)
                continue
            draw = self.world.draw("reward", trajectory.uid, trajectory.generation_index, turn)
            took = section.reward_seconds * math.exp(draw.gauss(0.0, section.reward_spread))
            outcomes.append(self._outcome(trajectory, draw.random(), draw.random(), draw.random(), took))
            seconds = max(seconds, took)  # it scores all samples of a call at the same time
        await sleep(seconds * self.world.factor("environment"))
        return outcomes

    def _recorded(self, trajectory: Trajectory, turn: int) -> Outcome:
        """Return what the recorded sample got, at its end or after this turn."""
        sample = self.world.recorded_sample(trajectory.uid, trajectory.generation_index)
        if turn <= len(sample.observed) and not trajectory.truncated:
            message = "x" * max(1, sample.observed[turn - 1] - FRAME)
            return Outcome(0.0, None, "", sample.seconds, terminated=False, observation=message)
        if sample.reward is None:
            return Outcome(None, None, "its scoring failed in the recorded run", sample.seconds)
        return Outcome(sample.reward, None, "", sample.seconds)

    def _outcome(self, trajectory: Trajectory, failed: float, solved: float, goes_on: float, seconds: float) -> Outcome:
        section = self.world.config.rehearse
        if failed < section.reward_failures:
            return Outcome(None, None, "the modelled environment failed", seconds)
        if goes_on < 1 - 1 / section.turns:
            return Outcome(0.0, None, "", seconds, terminated=False, observation="x" * section.turn_tokens)
        reward = float(solved < self.world.solve_rate(trajectory.uid) and not trajectory.truncated)
        return Outcome(reward, None, "", seconds)
