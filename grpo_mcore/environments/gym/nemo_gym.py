"""NeMo Gym: its agents generate whole samples, asking the policy's endpoint for each turn, and its verifier scores
them.

The Gym runs by itself, in a Python of its own; this module only speaks its HTTP interface. A rollout that fails has no
reward but a reason, and is never scored 0: the agent does not answer, the result is malformed, or its tokens are not
the policy's.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from grpo_mcore.environments.config import EnvConfig
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.gym.gym_client import GymClient, GymError, PolicyEndpoint
from grpo_mcore.environments.gym.gym_penalties import THOUGHT_MARKS, TOOL_CALL_MARKS, RewardPenalties
from grpo_mcore.environments.gym.gym_result import FormRules, GymFailure, GymRollout, read_result
from grpo_mcore.environments.http_retries import RetryPolicy
from grpo_mcore.environments.interfaces import EnvironmentBase
from grpo_mcore.rollout.trajectory import Sampling, Score, Trajectory

# Keys of a Gym's own configuration, which NeMo RL passes on to the Gym that it starts.
_GYM_KEYS = ("config_paths", "is_trajectory_collection", "head_server", "default_host")
_BACKOFF_S = 0.5  # before the second attempt of a rollout


class NemoGymConfig(EnvConfig):
    """The recipe's section `env.nemo_gym`."""

    section: ClassVar[str] = "env.nemo_gym"

    head_server_url: str | None = None
    """URL of the Gym's head server, such as http://10.0.0.5:11000. It knows the agents' URLs."""
    agents: dict[str, str] = Field(default_factory=dict)
    """Name -> URL of agents, instead of those that the head server has."""
    agent_name: str | None = None
    """Agent of tasks that have no agent_ref."""
    start_timeout_s: float = Field(600.0, ge=0)
    """Seconds that the head server may take to come up."""
    rollout_timeout_s: float = Field(600.0, gt=0)
    """Seconds of one rollout, from the request to its result. A sample that takes longer has no reward."""
    max_row_attempts: int = Field(3, ge=1)
    """Maximum attempts of one rollout. Those that fail with 5xx, 408, 425, 429 (Retry-After is respected), a broken
    connection, or a failure that the Gym does not call final, are repeated."""
    num_samples_in_parallel: int | None = Field(None, ge=1)
    """Maximum concurrent rollouts. null: all."""
    invalid_tool_call_patterns: list[str] = list(TOOL_CALL_MARKS)
    """Strings that a message must not have, because they belong to a call of a tool. A message with one is flagged, for
    grpo.invalid_tool_call_advantage."""
    thinking_tags: list[str] = list(THOUGHT_MARKS)
    """Marks of reasoning that a message must not have. A message with one is flagged, for
    grpo.malformed_thinking_advantage."""
    reward_penalties: RewardPenalties = Field(default_factory=RewardPenalties)
    """Faults that make the reward of a rollout 0. NeMo RL's recipes have this section at the top."""
    responses_create_params: dict[str, Any] = Field(default_factory=dict)
    """Replaces these fields of every task's responses_create_params."""

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> NemoGymConfig:
        """Return the validated section. Raises EnvironmentConfigError that names the wrong key."""
        for key in section:
            if key == "effort_levels":
                raise EnvironmentConfigError(
                    "env.nemo_gym.effort_levels: rewards by length and effort level are not built in; write them as "
                    "grpo.reward_shaping.path"
                )
            if key in _GYM_KEYS or key not in cls.model_fields and isinstance(section[key], Mapping):
                raise EnvironmentConfigError(
                    f"env.nemo_gym.{key}: a key of the Gym's own configuration. The Gym is not started from here (it "
                    "needs a Python of its own): start it with `gym env start`, and set head_server_url"
                )
        config = super().read(section)
        if config.head_server_url is None and not config.agents:
            raise EnvironmentConfigError("env.nemo_gym: set head_server_url, or the URLs of agents")
        addresses = {"head_server_url": config.head_server_url} if config.head_server_url is not None else {}
        for key, url in (addresses | {f"agents.{name}": url for name, url in config.agents.items()}).items():
            if not _is_http_address(url):
                raise EnvironmentConfigError(
                    f"env.nemo_gym.{key}: {url!r} is no address of a server; give one such as http://10.0.0.5:11000, "
                    "an IPv6 address in brackets"
                )
        if fixed := {"temperature", "top_p"} & set(config.responses_create_params):
            raise EnvironmentConfigError(
                f"env.nemo_gym.responses_create_params.{min(fixed)}: set policy.generation.{min(fixed)}"
            )
        return config


@dataclass(frozen=True)
class GymRequest:
    """A rollout to request. `task`: as its file has it. `task_index`, `generation_index`: what identifies the rollout
    in the Gym. `max_tokens`: maximum tokens of all its branches together; None: no limit."""

    uid: str
    generation_index: int
    task: Mapping[str, Any]
    task_index: int
    seed: int
    max_tokens: int | None = None


@dataclass(frozen=True)
class GymOutcome:
    """The outcome of one rollout. `trajectory`: None if it failed; `score` says why. `result`: the agent's reply, if
    `keep_results` was set."""

    uid: str
    generation_index: int
    trajectory: Trajectory | None
    score: Score
    cut_turns: int = 0
    result: Any = None


class NemoGymEnvironment(EnvironmentBase):
    """Lets the Gym's agents generate whole samples. Several threads may use one instance."""

    concurrent_calls = 4
    config_class = NemoGymConfig
    config: NemoGymConfig

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._client = GymClient(
            self.config.head_server_url,
            self.config.agents,
            start_timeout_s=self.config.start_timeout_s,
            timeout_s=self.config.rollout_timeout_s,
        )
        self._form = FormRules(
            self.config.invalid_tool_call_patterns, self.config.thinking_tags, self.config.reward_penalties
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nemo-gym", daemon=True)
        self._thread.start()
        self._call(self._client.open())
        self._room = asyncio.Semaphore(self.config.num_samples_in_parallel or 10**9)

    @classmethod
    def completed(cls, config: Mapping[str, Any], tokenizer: Any) -> Mapping[str, Any]:
        read = cls.config_class.read(config)
        penalties = read.reward_penalties.with_thought_tokens(tokenizer, read.thinking_tags)
        return {**config, "reward_penalties": penalties.model_dump()}

    @classmethod
    def play_timeout_s(cls, config: Mapping[str, Any]) -> float:
        """Return the maximum seconds for one sample, all attempts together."""
        read = cls.read_config(config)
        return read.start_timeout_s + read.max_row_attempts * (read.rollout_timeout_s + 60.0)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def play(
        self, requests: Sequence[GymRequest], sampling: Sampling, endpoint: PolicyEndpoint, keep_results: bool = False
    ) -> Iterator[GymOutcome]:
        """Yield each outcome when its rollout ends, in any order. `endpoint`: url and token of the policy's endpoint.

        Raises GymError if there is no Gym, or no such agent: then no other sample would do better.
        """
        done: queue.SimpleQueue[GymOutcome | Exception] = queue.SimpleQueue()

        async def run(request: GymRequest) -> None:
            try:
                done.put(await self._rollout(request, sampling, endpoint, keep_results))
            except Exception as error:  # raised below, in the thread of the caller
                done.put(error)

        rollouts = [asyncio.run_coroutine_threadsafe(run(request), self._loop) for request in requests]
        try:
            for _ in requests:
                outcome = done.get()
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            for rollout in rollouts:
                rollout.cancel()

    async def _rollout(
        self, request: GymRequest, sampling: Sampling, endpoint: PolicyEndpoint, keep: bool
    ) -> GymOutcome:
        start = time.perf_counter()
        row = self.row(request, sampling)
        agent = row["agent_ref"]["name"]

        async def attempt() -> tuple[Any, GymRollout, Trajectory]:
            async with self._room:
                result = await self._client.run(agent, row)
            rollout = read_result(result, time.perf_counter() - start, request.max_tokens, self._form)
            versions = await self._client.weight_versions(endpoint, rollout.fingerprints())
            return result, rollout, rollout.trajectory(request.uid, request.generation_index, versions)

        try:
            policy = RetryPolicy(self.config.max_row_attempts - 1, _BACKOFF_S)
            result, rollout, trajectory = await policy.run(attempt, _repetition_wait_s)
        except GymError:
            raise
        except Exception as error:  # a reply of an unforeseen form costs its own sample
            unforeseen = f"the Gym's result cannot be read: {type(error).__name__}: {error}"
            reason = str(error) if isinstance(error, GymFailure) else unforeseen
            score = Score(None, None, reason, time.perf_counter() - start, terminated=False)
            return GymOutcome(request.uid, request.generation_index, None, score)
        kept = result | _indices(request, row) if keep else None
        score = replace(rollout.score, solved_at=self.solved_at)
        return GymOutcome(request.uid, request.generation_index, trajectory, score, rollout.cut_calls, kept)

    def row(self, request: GymRequest, sampling: Sampling) -> dict[str, Any]:
        """Return the agent's request: the task with the policy's sampling parameters and the sample's seed. Raises
        GymError for a task without an agent."""
        row = dict(request.task)
        if not isinstance(row.get("agent_ref"), dict) or "name" not in row["agent_ref"]:
            if self.config.agent_name is None:
                raise GymError(f"{request.uid} has no agent_ref.name; set env.nemo_gym.agent_name")
            row["agent_ref"] = {"type": "responses_api_agents", "name": self.config.agent_name}
        params = dict(row["responses_create_params"]) | self.config.responses_create_params
        params["temperature"], params["top_p"] = sampling.temperature, sampling.top_p
        if params.get("max_output_tokens") is None:
            params["max_output_tokens"] = sampling.max_new_tokens
        metadata = dict(params.get("metadata") or {})
        extra = json.loads(metadata.get("extra_body") or "{}")
        metadata["extra_body"] = json.dumps({**extra, "seed": request.seed})
        params["metadata"] = metadata
        return {**row, "responses_create_params": params, **_indices(request, row)}

    def shutdown(self) -> None:
        self._call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)


def _is_http_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a malformed port, or brackets without an IPv6 address
        return False


def _repetition_wait_s(error: BaseException) -> float | None:
    return error.wait_s if isinstance(error, GymFailure) and error.again else None


def _indices(request: GymRequest, row: Mapping[str, Any]) -> dict[str, Any]:
    index = row.get("_ng_task_index", request.task_index)
    return {"_ng_task_index": index, "_ng_rollout_index": request.generation_index, "agent_ref": row["agent_ref"]}
