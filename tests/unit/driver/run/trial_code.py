"""Rewards, an environment and losses for test_trial_calls.py."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from grpo_mcore.objective import ClippedPGLossFn


def right(response: str, ground_truth: str) -> float:
    return float(response.strip() == ground_truth)


def nothing(response: str, ground_truth: str) -> None:
    return None


def words(response: str, ground_truth: str) -> str:
    return "good"


class Slow(EnvironmentInterface):
    """Never answers."""

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        time.sleep(30)
        raise AssertionError


class Wrong(ClippedPGLossFn):
    """Its value is not a number."""

    def policy_term(self, curr: Tensor, prev: Tensor, advantages: Tensor, tokens: Any) -> Tensor:
        return super().policy_term(curr, prev, advantages * float("nan"), tokens)


class Crashes(ClippedPGLossFn):
    def policy_term(self, curr: Tensor, prev: Tensor, advantages: Tensor, tokens: Any) -> Tensor:
        raise KeyError("no_such_column")
