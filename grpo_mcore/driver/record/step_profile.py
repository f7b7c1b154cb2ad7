"""Traces of whole steps by torch's profiler, of the policy's ranks and the engines'."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from grpo_mcore.driver.interfaces import GenerationInterface, PolicyInterface


class StepProfile:
    """Call `follow` with the number of the step that is under way."""

    def __init__(
        self, policy: PolicyInterface, engines: GenerationInterface, folder: Path, steps: Collection[int]
    ) -> None:
        """`folder`: gets a folder for each of the `steps`, with a file for each rank."""
        self._policy, self._engines, self._folder, self._steps = policy, engines, folder, steps
        self._traced: int | None = None

    def follow(self, step: int) -> None:
        """Start the trace of `step`, if it is one of those to trace, and end that of the step before."""
        if step == self._traced:
            return
        if self._traced is not None:
            folder = (self._folder / f"step_{self._traced:06d}").resolve()
            self._engines.stop_profile(folder)
            self._policy.stop_profile(folder)
            self._traced = None
        if step in self._steps:
            self._policy.start_profile()
            self._engines.start_profile()
            self._traced = step
