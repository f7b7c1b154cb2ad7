"""The stages of a sample that an environment's agent generates: set-up, play and score, each with its own deadline."""

import asyncio
from collections.abc import Awaitable
from typing import Literal, TypeVar

from pydantic import Field

from grpo_mcore.environments.agents.samples import AgentFailure
from grpo_mcore.environments.config import EnvConfig

T = TypeVar("T")
Stage = Literal["set-up", "play", "score"]
_KEYS: dict[Stage, str] = {"set-up": "start_timeout_s", "play": "rollout_timeout_s", "score": "score_timeout_s"}


class StageTimeout(AgentFailure):
    """A stage of a sample did not end in its time. The sample has no reward."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(f"{stage}: {reason}", kind=f"{stage}: timeout")


class AgentConfig(EnvConfig):
    """The section of an environment that runs agents. A sample that exceeds one of its deadlines has no reward."""

    start_timeout_s: float = Field(600.0, ge=0)
    """Seconds of a sample's set-up, before its agent is asked: what it needs is started or found."""
    rollout_timeout_s: float = Field(600.0, gt=0)
    """Seconds of one rollout, from the request to the agent's result."""
    score_timeout_s: float = Field(600.0, gt=0)
    """Seconds from the agent's result to the sample's score."""
    max_row_attempts: int = Field(3, ge=1)
    """Maximum attempts of one rollout. Only failures that another attempt may not have are repeated: a broken
    connection, a server or a sandbox that fails."""
    num_samples_in_parallel: int | None = Field(None, ge=1)
    """Maximum concurrent rollouts. null: all."""

    @property
    def sample_timeout_s(self) -> float:
        """The maximum seconds of one sample that is attempted once: its three stages."""
        return self.start_timeout_s + self.rollout_timeout_s + self.score_timeout_s

    async def within(self, stage: Stage, work: Awaitable[T], purpose: str) -> T:
        """Return the result of `work`, one stage of a sample. Raises StageTimeout, which names the stage, `purpose`
        and the key, if it exceeds the stage's deadline; a TimeoutError of `work` itself is passed on."""
        seconds = getattr(self, _KEYS[stage])
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await work
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise StageTimeout(
                stage, f"{purpose} takes longer than {self.section}.{_KEYS[stage]}, {seconds:g} s"
            ) from error
