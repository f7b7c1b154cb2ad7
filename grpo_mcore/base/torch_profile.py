"""Traces of torch's profiler."""

from pathlib import Path
from typing import ClassVar

import torch


class ProcessProfile:
    """A trace of everything that all threads of this process do. torch makes one at a time: while there is one, such as
    the policy's where the engine runs in the same process, another is not begun."""

    _running: ClassVar[bool] = False

    def __init__(self) -> None:
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        if not ProcessProfile._running:
            ProcessProfile._running = True
            self._profiler = torch.profiler.profile(
                experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)
            )
            self._profiler.start()

    def stop(self, path: Path) -> None:
        """End the trace and write it in Chrome's format. No-op if there is none."""
        if self._profiler is not None:
            ended, self._profiler = self._profiler, None
            ended.stop()
            ProcessProfile._running = False
            path.parent.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(path))
