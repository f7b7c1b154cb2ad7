"""Math with one checkable answer: reward 1 where the answer equals the ground truth, 0 where it is wrong or absent.

With `format_pattern` the reward has two parts, `correct` and `format`, which the estimator gdpo reads one by one.
A verification that runs out of its time gives `verify_timeout_reward`, so that hanging the verifier is no way out. One
whose process is lost gives no reward at all, and no parts: the sample is excluded and counted.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from grpo_mcore.environments.answers import UNFINISHED, split_messages
from grpo_mcore.environments.config import AnswerConfig
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    response_text,
    single_turn_return,
)
from grpo_mcore.environments.math.ground_truths import ground_truth_problems
from grpo_mcore.environments.math.verifiers import (
    HF_MATH_VERIFY,
    MULTIPLE_CHOICE,
    ground_truths,
    make_verifier,
    reason_for,
    verifier_modules,
)
from grpo_mcore.environments.verifier_pool import Result, VerifierPool, WorkerSpec
from grpo_mcore.objective import CORRECT, pass_at_k
from grpo_mcore.recipe import MATH_REWARDS

logger = logging.getLogger(__name__)

_LETTER = re.compile(r"[A-J]")  # of a choice


class MathEnvConfig(AnswerConfig):
    """The recipe's section `env.math`."""

    section: ClassVar[str] = "env.math"

    solved_at: float | None = 1.0
    """Reward from which on a sample counts as solved, for `accuracy` and `pass@k`: a right answer has 1 or more."""
    num_workers: int = Field(8, ge=1)
    """Number of worker processes."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """Kind of answer: math, checked by math_verify_impl, or the letter of a multiple choice after "Answer:"."""
    math_verify_impl: str = HF_MATH_VERIFY
    """`hf_math_verify`; `dapo_math_verify`, which compares what follows "Answer:" as a string and gives 1 or -1; or
    the import path of `fn(response, ground_truth) -> bool | float | (bool | float, answer)`."""
    verify_timeout_s: float = Field(5.0, gt=0)
    """Seconds of wall-clock time for one verification; then its process is killed."""
    verify_timeout_reward: float = 0.0
    """Reward of an answer whose verification runs out of its time."""
    verify_memory_gb: float = Field(2.0, gt=0)
    """GiB that one verification process may use."""
    format_pattern: str | None = None
    """Python regular expression that the whole response must match for the part `format`, 0 or 1. null: no parts.
    Write it so that it cannot backtrack without end: it has no time limit of its own."""
    format_reward: float = Field(0.0, ge=0, lt=1)
    """Reward of a response in the right format, added whether the answer is right or wrong. It is below 1, so that
    only right answers reach 1 (with a verifier that says 0 or 1). Needs format_pattern."""

    @property
    def verifier(self) -> str:
        """Name or import path of the verifier."""
        return self.math_verify_impl if self.verifier_type == "math" else self.verifier_type

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> MathEnvConfig:
        """Return the validated section. Raises EnvironmentConfigError that names the wrong key."""
        config = super().read(section)
        if config.verifier_type != "math" and config.math_verify_impl != HF_MATH_VERIFY:
            raise EnvironmentConfigError(
                f"env.math.math_verify_impl: {config.math_verify_impl!r} has no effect with env.math.verifier_type "
                f"{config.verifier_type}; remove one of them"
            )
        if config.format_reward and config.format_pattern is None:
            raise EnvironmentConfigError("env.math.format_reward has no effect without env.math.format_pattern")
        try:
            re.compile(config.format_pattern or "")
        except re.error as error:
            raise EnvironmentConfigError(
                f"env.math.format_pattern: {config.format_pattern!r} is not a regular expression: {error}"
            ) from error
        return config


class Verification(NamedTuple):
    """The result of one verification. `reward` is None where the verification itself failed; `reason` says how."""

    reward: float | None
    answer: str | None
    reason: str
    seconds: float


class MathEnvironment(EnvironmentInterface):
    """Single-turn. Each conversation's metadata holds `ground_truth`. The verifier sees the answer without the
    reasoning; `format_pattern` sees all of the policy's text, and makes `rewards_by_name` {"correct": 0 or 1,
    "format": 0 or 1}.
    """

    concurrent_calls = 32
    config_class = MathEnvConfig
    config: MathEnvConfig

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        section = self.config
        self._verifier = section.verifier
        self._pool = VerifierPool(
            WorkerSpec(
                what=f"math verifier {self._verifier!r}",
                loader="grpo_mcore.environments.math.verifiers:make_verifier",
                arguments=(self._verifier,),
                num_workers=section.num_workers,
                timeout_s=section.verify_timeout_s,
                memory_gb=section.verify_memory_gb,
                preload=verifier_modules(self._verifier),
            )
        )

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        section = MathEnvConfig.read(config)
        if {".", ":"} & set(section.math_verify_impl):  # an import path
            make_verifier(section.math_verify_impl)

    @classmethod
    def check_truths(cls, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        section = MathEnvConfig.read(config)
        texts = [str(row.get("ground_truth")) for row in rows]
        if section.verifier == HF_MATH_VERIFY and texts and all(map(_LETTER.fullmatch, texts)):
            logger.warning(
                "the ground truths are letters of choices, and hf_math_verify reads no answer such as 'Answer: (%s)'; "
                "set verifier_type: english_multichoice",
                texts[0],
            )
        return ground_truth_problems(section.verifier, rows, "math", section.verify_timeout_s)

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        responses = [response_text(messages) for messages in message_log_batch]
        answers = [split_messages(messages, self.config.thoughts).answer for messages in message_log_batch]
        results = self._verify(answers, [ground_truths(entry, "math") for entry in metadata])
        parts = [self._parts(result, response) for result, response in zip(results, responses, strict=True)]
        return single_turn_return(
            metadata,
            rewards=[self._reward(result, by_name) for result, by_name in zip(results, parts, strict=True)],
            reasons=[result.reason for result in results],
            seconds=[result.seconds for result in results],
            answers=[result.answer for result in results],
            rewards_by_name=parts,
        )

    def _verify(
        self, answers: Sequence[str | None], ground_truths: Sequence[str | Sequence[str]]
    ) -> list[Verification]:
        """Verify answers; None is one that a response does not have, because its reasoning is not closed."""
        alternatives = [[entry] if isinstance(entry, str) else entry for entry in ground_truths]
        pairs = [(answer or "", texts) for answer, texts in zip(answers, alternatives, strict=True)]
        results = zip(self._pool.run(pairs), alternatives, strict=True)
        scores = [self._verification(result, texts) for result, texts in results]
        return [
            score._replace(reason=UNFINISHED) if answer is None and score.answer is None else score
            for score, answer in zip(scores, answers, strict=True)
        ]

    def _verification(self, result: Result, ground_truths: Sequence[str]) -> Verification:
        if result.failure is not None:
            reward = self.config.verify_timeout_reward if result.timed_out else None
            return Verification(reward, None, result.failure, result.seconds)
        reward, answer = result.value
        separator = ", " if self._verifier in MULTIPLE_CHOICE else " or "
        return Verification(reward, answer, reason_for(reward, answer, separator.join(ground_truths)), result.seconds)

    def _parts(self, result: Verification, response: str) -> dict[str, float]:
        if self.config.format_pattern is None or result.reward is None:
            return {}
        matches = re.fullmatch(self.config.format_pattern, response) is not None
        return dict(zip(MATH_REWARDS, (result.reward, float(matches)), strict=True))

    def _reward(self, result: Verification, parts: Mapping[str, float]) -> float | None:
        if result.reward is None:
            return None
        return result.reward + self.config.format_reward * parts.get(MATH_REWARDS[1], 0.0)

    def global_post_process_and_metrics(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return `accuracy` and `pass@k` over the samples that have a reward, and how many have none (`num_failed`). A
        reward of 1 or more means a right answer.

        `batch["rewards"]`: floats or None; `batch["uid"]` (only for pass@k): the prompt of each sample, and
        `batch["k"]`: the numbers k wanted.
        """
        scored = [reward for reward in batch["rewards"] if reward is not None]
        metrics = {
            "num_scored": float(len(scored)),
            "num_failed": float(len(batch["rewards"]) - len(scored)),
        }
        if scored:
            metrics["accuracy"] = sum(reward >= CORRECT for reward in scored) / len(scored)
        for k in batch.get("k", ()):
            value = pass_at_k(_right_by_prompt(batch["uid"], batch["rewards"]), k)
            if value is not None:
                metrics[f"pass@{k}"] = value
        return metrics

    def shutdown(self) -> None:
        self._pool.close()


def _right_by_prompt(uids: Sequence[str], rewards: Sequence[float | None]) -> list[list[bool]]:
    """Return for each prompt whether its samples are right, without those that have no reward."""
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for uid, reward in zip(uids, rewards, strict=True):
        if reward is not None:
            by_prompt[uid].append(reward >= CORRECT)
    return list(by_prompt.values())
