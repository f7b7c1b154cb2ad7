"""Call the rewards, environments and losses of a recipe once, for `grpo-mcore train --check`: what only shows when the
code is called shows before anything is started. Processors are called when the data is read."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from grpo_mcore.driver.run.checks import SetupError
from grpo_mcore.driver.run.environment_checks import environment_of
from grpo_mcore.environments.code.environment import CodeEnvironment
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.interfaces import EnvironmentInterface
from grpo_mcore.environments.math.math_environment import MathEnvironment
from grpo_mcore.environments.rules.rule_environment import RuleEnvironment
from grpo_mcore.objective import build_loss
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.trajectory import Trajectory, Turn

logger = logging.getLogger(__name__)
T = TypeVar("T")

ALREADY_CALLED = (MathEnvironment, CodeEnvironment)
"""Environments whose verifiers have scored the ground truths of the first rows themselves (`check_truths`)."""


def try_environments(
    config: MasterConfig, env_names: Mapping[str, str | None], rows: Sequence[DatumSpec], tokenizer: Any
) -> list[str]:
    """Let each environment score the first row of a task, with the row's ground truth as the answer. Return a line for
    each. Environments that need a GPU, and those that run agents, are left out. Raises SetupError for one that gives no
    reward or does not answer in its time."""
    lines = []
    tasks = {name: task for task, name in reversed(list(env_names.items()))}  # each environment once, by its first task
    for name, task in tasks.items():
        cls, section, timeout_s = environment_of(task, name, config)
        row = next((row for row in rows if row["task_name"] == task), None)
        agents = cls.sample_timeout_s(section) is not None
        if row is None or issubclass(cls, ALREADY_CALLED) or agents or cls.resources(section)["gpus"]:
            continue
        info = dict(row["extra_env_info"])
        truth = str(info.get("ground_truth", ""))
        turns = [
            Turn(str(turn["role"]), torch.as_tensor(turn["token_ids"], dtype=torch.int64), text=str(turn["content"]))
            for turn in row["message_log"]
        ]
        ids = torch.tensor(tokenizer(truth, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        answer = Turn("assistant", ids, logprobs=torch.zeros(len(ids)), loss_mask=True, text=truth)
        sample = Trajectory(row["uid"], 0, (*turns, answer), (), "stop", truncated=False)
        environment = cls(cls.completed(section, tokenizer))
        try:
            outcome = _within(timeout_s, f"env.{name}", partial(_score, environment, info, sample))
        finally:
            environment.shutdown()
        answer_text = "the ground truth of the first row as the answer" if truth else "an empty answer to the first row"
        if outcome.reward is None:
            problem = f"env.{name}: {answer_text} gets no reward: {outcome.reason}"
            if issubclass(cls, RuleEnvironment):
                raise SetupError(problem)
            logger.warning("%s", problem)
            continue
        parts = ", ".join(f"{part} {value:g}" for part, value in outcome.rewards_by_name.items())
        lines.append(f"env.{name}: {answer_text}: reward {outcome.reward:g}" + (f" ({parts})" if parts else ""))
    return lines


def _score(environment: Any, info: dict[str, Any], sample: Trajectory) -> Any:
    if not isinstance(environment, EnvironmentInterface):
        raise EnvironmentConfigError(f"{type(environment).__name__} has no step for a conversation")
    return environment.advance([info], sample)[0]


def try_loss(config: MasterConfig) -> list[str]:
    """Call a custom loss on two samples of two tokens, and compute its gradient. Return a line that says so; none for a
    built-in loss. Raises SetupError for one whose value or gradient is not finite or that raises."""
    if config.loss_fn.path is None:
        return []
    key = f"loss_fn.path {config.loss_fn.path}"
    logprobs = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    same = logprobs.detach() - 0.01
    batch = {
        "token_mask": torch.tensor([[0.0, 1.0, 1.0]] * 2), "sample_mask": torch.ones(2),
        "advantages": torch.tensor([[1.0] * 3, [-1.0] * 3]), "rewards": torch.tensor([1.0, 0.0]),
        "prev_logprobs": same, "generation_logprobs": same, "reference_policy_logprobs": same, "covariance_marks": same,
        "entropies": torch.ones(2, 3), "ages": torch.zeros(2, 3, dtype=torch.int64),
    }  # fmt: skip
    try:
        loss, metrics = build_loss(config.loss_fn)(logprobs, batch, 2, 4)
        loss.backward()
    except Exception as error:
        raise SetupError(f"{key}: called on two samples, it raised {type(error).__name__}: {error}") from error
    if logprobs.grad is None or not (torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()):
        raise SetupError(f"{key}: on two samples its value {loss.item():g} or its gradient is not finite")
    return [f"{key}: on two samples it is {loss.item():.4g}, with {len(metrics)} metrics"]


def _within(seconds: float, name: str, call: Callable[[], T]) -> T:
    """Return what a call in a thread of its own returns, or raise what it raises. Raises SetupError after `seconds`."""
    answers: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name=f"trial of {name}", daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise SetupError(f"{name}: it did not score one answer within {seconds:g} s (verdict_timeout_s)") from None
    if isinstance(error, EnvironmentConfigError):
        raise error
    if error is not None:
        raise SetupError(f"{name}: scoring one answer raised {type(error).__name__}: {error}") from error
    return value  # type: ignore[return-value]
