"""The recipe's section of an environment of the package `verifiers`, and what it means in that package's own words."""

import importlib.util
import re
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_mcore.environments.agents.stages import AgentConfig
from grpo_mcore.environments.errors import EnvironmentConfigError


class VerifiersSettings(BaseModel):
    """`env.NAME.verifiers`."""

    model_config = ConfigDict(extra="forbid")

    environment: str = Field(min_length=1)
    """Id of a taskset: an installed package, or one of verifiers' own, such as textarena or harbor. Its package may
    bring the harness and the environment that go with it."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Options of the taskset."""
    harness: str | dict[str, Any] | None = None
    """The agent's program: id of a harness, or a mapping of its `id` and options. null: the taskset's, or bash."""
    runtime: str | dict[str, Any] = "subprocess"
    """Where the harness runs: subprocess (on this node, without isolation), docker, podman, apptainer, modal, prime or
    e2b, or a mapping of its `type` and options."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Other keys of verifiers' `env` section, such as `id: user-sim`, and of its seats: `user: {model: ...}`."""


class VerifiersConfig(AgentConfig):
    """A section `env.NAME` with the key `verifiers`. Set-up is the start of the runtime, of the task and of the
    harness; an agent that exceeds its deadline is scored on what it has done."""

    section: ClassVar[str] = "env.verifiers"

    verifiers: VerifiersSettings
    """The environment, its harness and their runtime."""
    finalize_timeout_s: float = Field(600.0, gt=0)
    """Seconds of the task's own work between the agent's end and its score."""
    verify_timeout_reward: float | None = 0.0
    """Reward of a sample that exceeds score_timeout_s, so that hanging the verifier is no way out. null: none, and the
    sample is left out."""

    def stage_limits(self) -> dict[str, float]:
        """Return the seconds of each stage, by its name in messages and metrics."""
        return {
            "set-up": self.start_timeout_s,
            "play": self.rollout_timeout_s,
            "finalize": self.finalize_timeout_s,
            "score": self.score_timeout_s,
        }

    def env_config(self) -> Any:
        """Return the EnvConfig of verifiers that the section means. The plug-ins that it names are imported. Raises
        EnvironmentConfigError if one of them, the package or an option is not there, or they do not go together."""
        if importlib.util.find_spec("verifiers") is None:
            raise EnvironmentConfigError(
                f"{self.section}: the package verifiers is not installed: pip install 'grpo-mcore[verifiers]'"
            )
        from verifiers.v1.configs.agent import AgentConfig as Seat
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.compile import validate_pairing
        from verifiers.v1.utils.loaders import env_config_type, load_harness, resolve_env_config, task_type

        settings, options = self.verifiers, dict(self.verifiers.options)
        harness = {"id": settings.harness} if isinstance(settings.harness, str) else settings.harness
        runtime = {"type": settings.runtime} if isinstance(settings.runtime, str) else settings.runtime
        limits = self.stage_limits()
        timeout = {"setup": limits["set-up"], "rollout": limits["play"]}
        timeout |= {"finalize": limits["finalize"], "scoring": limits["score"]}
        shared = {"runtime": runtime, "timeout": timeout} | ({"harness": harness} if harness else {})
        try:
            fields = env_config_type(settings.environment, str(options.get("id") or "")).model_fields
            for seat in [name for name, field in fields.items() if isinstance(field.default, Seat)]:
                options[seat] = shared | dict(options.get(seat) or {})
            config = resolve_env_config({**options, "taskset": {**settings.taskset, "id": settings.environment}})
            harnesses = config.agent_harnesses()
            for seat, agent in agent_config_fields(config).items():
                validate_pairing(load_harness(harnesses[seat]), task_type(config.taskset.id), agent.runtime)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise EnvironmentConfigError(f"{self.section} ({settings.environment}): {key}: {first['msg']}") from error
        except Exception as error:  # plug-ins are others' code: their import may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = re.sub(r"--env\.[\w<>]+\.", "verifiers.", reason)  # flags of verifiers' own command
            raise EnvironmentConfigError(f"{self.section} ({settings.environment}): {reason}") from error
        return config
