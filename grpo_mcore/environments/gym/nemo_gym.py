"""NeMo Gym: its agents generate whole samples, asking the policy's endpoint for each turn, and its verifier scores
them.

The Gym runs by itself, in a Python of its own; this module only speaks its HTTP interface. A rollout that fails has no
reward but a reason, and is never scored 0: the agent does not answer, the result is malformed, or its tokens are not
the policy's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from grpo_mcore.environments.agents.environment import AgentEnvironment, PolicyEndpoint
from grpo_mcore.environments.agents.samples import AgentSample
from grpo_mcore.environments.agents.stages import AgentConfig
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.gym.gym_client import GymClient, GymError
from grpo_mcore.environments.gym.gym_penalties import THOUGHT_MARKS, TOOL_CALL_MARKS, RewardPenalties
from grpo_mcore.environments.gym.gym_result import FormRules, read_result
from grpo_mcore.environments.http_retries import LONGEST_WAIT_S
from grpo_mcore.rollout.trajectory import AgentRequest, Sampling

# Keys of a Gym's own configuration, which NeMo RL passes on to the Gym that it starts.
_GYM_KEYS = ("config_paths", "is_trajectory_collection", "head_server", "default_host")


class NemoGymConfig(AgentConfig):
    """The recipe's section `env.nemo_gym`. Set-up is finding the agent, for which the head server may have to come up
    first; play is the agent's request, which the Gym's verifier ends; score is reading the result."""

    section: ClassVar[str] = "env.nemo_gym"

    head_server_url: str | None = None
    """URL of the Gym's head server, such as http://10.0.0.5:11000. It knows the agents' URLs."""
    agents: dict[str, str] = Field(default_factory=dict)
    """Name -> URL of agents, instead of those that the head server has."""
    agent_name: str | None = None
    """Agent of tasks that have no agent_ref."""
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


class NemoGymEnvironment(AgentEnvironment):
    """Lets the Gym's agents generate whole samples."""

    config_class = NemoGymConfig
    config: NemoGymConfig
    ends_run = GymError

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = self.read_config(config or {})
        self._client = GymClient(
            self.config.head_server_url, self.config.agents, start_timeout_s=self.config.start_timeout_s
        )
        self._form = FormRules(
            self.config.invalid_tool_call_patterns, self.config.thinking_tags, self.config.reward_penalties
        )
        super().__init__(config)

    async def open(self) -> None:
        await self._client.open()

    async def close(self) -> None:
        await self._client.close()

    @classmethod
    def completed(cls, config: Mapping[str, Any], tokenizer: Any) -> Mapping[str, Any]:
        read = cls.config_class.read(config)
        penalties = read.reward_penalties.with_thought_tokens(tokenizer, read.thinking_tags)
        return {**config, "reward_penalties": penalties.model_dump()}

    @classmethod
    def sample_timeout_s(cls, config: Mapping[str, Any]) -> float:
        """Return the maximum seconds for one sample, all attempts together."""
        read = cls.read_config(config)
        repeated_s = read.rollout_timeout_s + read.score_timeout_s + LONGEST_WAIT_S
        return read.sample_timeout_s + (read.max_row_attempts - 1) * repeated_s

    async def attempt(
        self, request: AgentRequest, sampling: Sampling, endpoint: PolicyEndpoint, start: float
    ) -> tuple[AgentSample, Sequence[Any], Callable[[], Any]]:
        row = self.row(request, sampling)
        agent, within = row["agent_ref"]["name"], self.config.within
        async with self.room:
            url = await self._client.agent_url(agent)
            result = await within("play", self._client.run(agent, url, row), f"the agent {agent}")
        sample = read_result(result, time.perf_counter() - start, self._form)
        known = self._client.weight_versions(endpoint, sample.fingerprints())
        versions = await within("score", known, f"reading the result of the agent {agent}")
        return sample, versions, lambda: result | _indices(request, row)

    def row(self, request: AgentRequest, sampling: Sampling) -> dict[str, Any]:
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


def _is_http_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a malformed port, or brackets without an IPv6 address
        return False


def _indices(request: AgentRequest, row: Mapping[str, Any]) -> dict[str, Any]:
    index = row.get("_ng_task_index", request.task_index)
    return {"_ng_task_index": index, "_ng_rollout_index": request.generation_index, "agent_ref": row["agent_ref"]}
