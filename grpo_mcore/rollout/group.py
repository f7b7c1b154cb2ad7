"""The G generations of one prompt, as the driver holds them."""

from dataclasses import dataclass, replace
from typing import Self

from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.trajectory import Score, TrajectoryRef


@dataclass(frozen=True)
class Group:
    """A prompt with its finished samples and their scores, in order of the generation index. `ended_at`: when each of
    them was scored, by the cluster's clock; empty where that is not known, as after a resume."""

    prompt: DatumSpec
    samples: tuple[TrajectoryRef, ...]
    scores: tuple[Score, ...]
    ended_at: tuple[float, ...] = ()

    @property
    def uid(self) -> str:
        return self.prompt["uid"]

    @property
    def weight_version(self) -> int:
        """The oldest weight version that generated any of its tokens."""
        return min(sample.weight_version for sample in self.samples)

    @property
    def nbytes(self) -> int:
        """Bytes of its trajectories in the object store."""
        return sum(sample.nbytes for sample in self.samples)

    @property
    def scored(self) -> int:
        """Number of samples that have a reward."""
        return sum(score.reward is not None for score in self.scores)

    def without_first(self) -> Self:
        """Return the group without its first sample, which remax decodes greedily as a baseline for the others."""
        return replace(self, samples=self.samples[1:], scores=self.scores[1:], ended_at=self.ended_at[1:])

    @property
    def failure(self) -> str | None:
        """Why there is nothing to train on: not one sample has a reward. None where one has."""
        if self.scored:
            return None
        return self.scores[0].reason
