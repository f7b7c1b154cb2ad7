"""Reward functions by import path, for the tests of rules."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def share_of_words(response: str, info: Mapping[str, Any]) -> float:
    """Return the share of the prompt's `words` that are in the response."""
    return sum(word in response for word in info["words"]) / len(info["words"])


def takes_words(response: str, info: dict[str, Any]) -> float:
    """Return the number of the prompt's `words`, and take them away."""
    return float(len([info["words"].pop() for _ in range(len(info["words"]))])) + len(info.pop("words"))


def nan(response: str, info: Mapping[str, Any]) -> float:
    return float("nan")


def as_told(response: str, info: Mapping[str, Any]) -> float:
    """Do what the response says."""
    if response == "sleep":
        time.sleep(3600)
    if response == "allocate":
        return float(len(bytearray(8 * 2**30)))
    if response == "raise":
        raise RuntimeError("not\ntoday")
    if response == "inf":
        return float("inf")
    return 0.5


async def by_name(finish_reason: str, level: int, response_tokens: int, prompt_tokens: int) -> float:
    """Asynchronous, and with what it needs by name."""
    assert finish_reason == "length"
    return level + response_tokens / 10 + prompt_tokens / 100


def thought_and_reply(response: str, thought: str, reply: str) -> float:
    return float(thought == "<think>maybe 6, damn</think>" and reply == "5" and thought in response)


def math_reward(completions: list[str], task: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[Any]:
    if task != ["math"]:
        return [None] * len(completions)
    log_extra("length", [len(text) for text in completions])
    log_metric("accuracy", 1.0)
    return [1.0] * len(completions)


async def coding_reward(prompts: list[str], completions: list[str], task: list[str], **kwargs: Any) -> list[Any]:
    return [0.5 if one == "code" else None for one in task]
