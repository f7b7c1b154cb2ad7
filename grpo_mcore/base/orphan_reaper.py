"""End the processes that a run leaves behind. As a program it waits for the end of a driver, in case that is killed:

    python -I orphan_reaper.py DRIVER_PID MARKER=VALUE FOLDER

Uses the standard library alone, so that the program starts fast and needs little memory.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARKER = "GRPO_MCORE_RUN"
"""Variable that is set in every process of a Ray that a run has started, and inherited by their children: by it the
last ones are found and ended when the run is over."""

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable that names the folder of the sockets of vLLM's ranks, whose files they leave behind."""


TOUCH_S = 3600.0
"""Seconds after which the files of the folder are touched again."""

END_S = 5.0
"""Seconds that killed processes get to be gone."""

TRACKER = b"multiprocessing.resource_tracker"
"""Among the words of a program of Python's own, which removes the shared memory of processes once they have ended, such
as the 160 MB in which an engine of vLLM speaks with its ranks."""
TRACKER_S = 3.0
"""Seconds that it gets for that."""


class OrphanReaper:
    """Ends everything that carries the marker of one run, and removes `folder`: on `close`, or when this process ends.

    `variables`: environment of the processes that the run starts. `mark`: one of these variables, `marker`, as
    "NAME=value".
    """

    def __init__(self, folder: Path, marker: str = MARKER) -> None:
        self.folder = folder
        value = uuid.uuid4().hex
        self.mark = f"{marker}={value}"
        self.variables = {marker: value, SOCKETS: os.environ.get(SOCKETS, str(folder))}
        self._program = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), self.mark, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,  # Ctrl-C is for the driver
        )

    def close(self) -> list[int]:
        """End the marked processes and remove the folder. Return the processes that could not be ended."""
        surviving = end_marked(self.mark)
        self._program.terminate()
        self._program.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        return surviving


def marked(mark: str) -> list[int]:
    """Return the processes whose environment has `mark` ("NAME=value"), except this one. Returns [] without /proc."""
    pids = []
    variable = mark.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if variable in variables and int(folder.name) != os.getpid():
            pids.append(int(folder.name))
    return pids


def end_marked(mark: str, timeout_s: float = END_S) -> list[int]:
    """Kill all processes that carry `mark`, also those that they start meanwhile. Return those left at the timeout.
    Python's resource trackers end by themselves after the others, and are killed only if they do not."""
    started_at = time.monotonic()
    while (pids := marked(mark)) and (passed := time.monotonic() - started_at) < timeout_s:
        for pid in pids:
            if passed < TRACKER_S and is_tracker(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    return pids


def is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker of Python's multiprocessing."""
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def touch(folder: str) -> None:
    """Let all files of a folder look new, to programs that remove old ones from the system's temporary folder."""
    for path in [Path(folder), *Path(folder).rglob("*")]:
        try:
            os.utime(path, follow_symlinks=False)
        except OSError:  # it has just been removed
            pass


def main() -> None:
    driver, mark, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    touched_at = time.monotonic()
    while os.getppid() == driver:
        time.sleep(0.5)
        if time.monotonic() - touched_at > TOUCH_S:
            touched_at = time.monotonic()
            touch(folder)
    end_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
