"""Asynchronous reward functions by import path, for the tests of async_rewards."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

under_way = most_under_way = calls = 0
attempts: Counter[str] = Counter()
starts: list[float] = []


class Busy(Exception):
    """As HTTP clients raise it."""

    def __init__(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.headers = status, headers or {}


async def counted(response: str) -> float:
    """Return the most calls that were under way at a time so far."""
    global under_way, most_under_way
    under_way += 1
    most_under_way = max(most_under_way, under_way)
    await asyncio.sleep(0.2)
    under_way -= 1
    return float(most_under_way)


async def as_told(response: str, **columns: Any) -> float | None:
    """Do what the response says. "503 2 c": fail with this status the first two times."""
    word, *rest = response.split()
    attempts[response] += 1
    if word.isdigit():
        if attempts[response] <= int(rest[0]):
            raise Busy(int(word), {"Retry-After": "0.01"})
        return float(attempts[response])
    if word == "sleep":
        time.sleep(3600)
    if word == "backtrack":
        re.fullmatch("(a+)+b", "a" * 60)
    if word == "wait":
        await asyncio.sleep(3600)
    if word == "exit":
        os._exit(3)
    if word == "quit":
        sys.exit(3)
    if word == "quit-in-a-task":
        await asyncio.create_task(quits())
    if word == "mistake":
        raise TypeError("no number")
    if word == "thread":
        return await asyncio.to_thread(float, 7)
    return None if word == "none" else float("nan") if word == "nan" else 0.5


async def quits() -> None:
    sys.exit(3)


async def number_of_call(response: str, level: int = 0) -> float:
    global calls
    calls += 1
    number = float(calls)
    await asyncio.sleep(0.05)
    return number


async def start_time(response: str) -> float:
    starts.append(time.monotonic())
    return starts[-1] - starts[0]


def waits(response: str) -> float:
    return 1.0


def helper() -> Any:
    import tests.unit.environments.slow_to_import as slow

    return slow.VALUE


def imports_late(response: str) -> float:
    return helper()


async def imports_late_too(response: str) -> float:
    return helper()


async def takes_rubric(response: str, info: dict[str, Any]) -> float:
    """Fail once after the rubric was taken out of the columns."""
    points = info.pop("rubric").pop()
    attempts["rubric"] += 1
    if attempts["rubric"] == 1:
        raise ConnectionError
    return float(points)
