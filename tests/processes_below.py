"""Processes that a test looks for below another one, some of which end while it looks."""

from collections.abc import Callable
from contextlib import suppress

import psutil

from grpo_mcore.base.processes import descendants


def named(name: str, pid: int | None = None) -> list[psutil.Process]:
    """Return the processes of this name below `pid` (None: this one)."""
    return _those_that(lambda process: process.name() == name, pid)


def with_words(words: str, pid: int | None = None) -> list[psutil.Process]:
    """Return the processes below `pid` (None: this one) whose command line has these words."""
    return _those_that(lambda process: words in " ".join(process.cmdline()), pid)


def _those_that(match: Callable[[psutil.Process], bool], pid: int | None) -> list[psutil.Process]:
    matching = []
    for process in descendants(pid):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if match(process):
                matching.append(process)
    return matching
