"""Math with one checkable answer: reward 1 where the answer equals the ground truth, 0 where it is wrong or
absent.

A verification that times out or crashes gives no reward at all: the sample is excluded and counted.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.verifiers import HF_MATH_VERIFY
from grpo_mcore.environments.verify_pool import VerifyPool


class MathEnvConfig(BaseModel):
    """The recipe's section `env.math`."""

    model_config = ConfigDict(extra="forbid")

    num_workers: int = Field(8, ge=1)
    """Processes that verify at the same time."""
    math_verify_impl: str = HF_MATH_VERIFY
    """`hf_math_verify`, or the import path of `fn(response, truth) -> bool | float | (bool | float,
    answer)`."""
    verify_timeout_s: float = Field(5.0, gt=0)
    """Seconds that one verification may take; then its process is killed and the sample has no reward."""
    verify_memory_gb: float = Field(2.0, gt=0)
    """GiB that one verification process may use."""
    stop_strings: list[str] | None = None
    """Strings that end a generation for this environment."""

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> MathEnvConfig:
        """Raises EnvironmentConfigError that names the key and, for an unknown one, the nearest known."""
        for key in section:
            if key not in cls.model_fields:
                near = difflib.get_close_matches(key, cls.model_fields, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                known = ", ".join(cls.model_fields)
                raise EnvironmentConfigError(f"env.math.{key}: unknown key; {hint}known: {known}")
        try:
            return cls(**section)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise EnvironmentConfigError(f"env.math.{key}: {first['msg']}, got {first['input']!r}") from error


class MathEnvironment(EnvironmentInterface):
    """Single-turn. Each conversation's metadata holds `ground_truth`; the answer is taken from all that the
    policy said."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = MathEnvConfig.read(config or {})
        self._pool = VerifyPool(
            num_workers=self.config.num_workers,
            timeout_s=self.config.verify_timeout_s,
            memory_gb=self.config.verify_memory_gb,
            verifier=self.config.math_verify_impl,
        )

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        responses = [response_text(messages) for messages in message_log_batch]
        truths = [_ground_truth(entry) for entry in metadata]
        verdicts = self._pool.verify(responses, truths)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"Environment: {v.reason}"} for v in verdicts],
            metadata=list(metadata),
            next_stop_strings=[self.config.stop_strings] * len(verdicts),
            rewards=[verdict.reward for verdict in verdicts],
            terminateds=[True] * len(verdicts),
            answers=[verdict.answer for verdict in verdicts],
            reasons=[verdict.reason for verdict in verdicts],
            seconds=[verdict.seconds for verdict in verdicts],
        )

    def global_post_process_and_metrics(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """`accuracy` and `pass@k` over the samples that have a reward, and how many have none (`num_failed`).

        `batch["rewards"]`: floats or None; `batch["uid"]` (only for pass@k): the prompt of each sample, and
        `batch["k"]`: the numbers k wanted.
        """
        scored = [reward for reward in batch["rewards"] if reward is not None]
        metrics = {
            "num_scored": float(len(scored)),
            "num_failed": float(len(batch["rewards"]) - len(scored)),
        }
        if scored:
            metrics["accuracy"] = sum(reward == 1.0 for reward in scored) / len(scored)
        for k in batch.get("k", ()):
            metrics[f"pass@{k}"] = pass_at_k(batch["uid"], batch["rewards"], k)
        return metrics

    def shutdown(self) -> None:
        self._pool.close()


def response_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the policy said: the generated messages where they are marked, else those of the assistant."""
    marked = [message for message in messages if message.get("generated")]
    said = marked or [message for message in messages if message["role"] == "assistant"]
    return "".join(message["content"] for message in said)


def pass_at_k(uids: Sequence[str], rewards: Sequence[float | None], k: int) -> float:
    """Mean over prompts of the unbiased estimate 1 - C(n - c, k) / C(n, k), n samples of which c are correct.

    Prompts with fewer than k scored samples are left out; NaN where none is left.
    """
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for uid, reward in zip(uids, rewards, strict=True):
        if reward is not None:
            by_prompt[uid].append(reward == 1.0)
    estimates = [
        1.0 - math.comb(len(results) - sum(results), k) / math.comb(len(results), k)
        for results in by_prompt.values()
        if len(results) >= k
    ]
    return sum(estimates) / len(estimates) if estimates else math.nan


def _ground_truth(metadata: Mapping[str, Any]) -> str:
    if metadata.get("ground_truth") is None:
        raise ValueError(
            f"the math environment needs 'ground_truth' in extra_env_info, got {sorted(metadata)}; "
            f"check the dataset's output_key and its processor"
        )
    return str(metadata["ground_truth"])
