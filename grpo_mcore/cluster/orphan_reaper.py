"""Ends what a run has left behind. As a program it stands beside a driver, in case that is killed:

    python -I orphan_reaper.py DRIVER_PID MARK FOLDER

Runs on the standard library alone, so that it costs little and can wait as long as the driver lives.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def marked(entry: str) -> list[int]:
    """Processes whose environment has `entry` ("NAME=value"), but this one. Needs /proc: [] without it."""
    found = []
    wanted = entry.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        if wanted in variables and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def sweep(entry: str, patience_s: float = 5.0) -> list[int]:
    """Kills all processes that carry `entry`, and those they start meanwhile. Returns those that resist."""
    deadline = time.monotonic() + patience_s
    while (pids := marked(entry)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    return pids


def start_beside(mark: str, folder: Path) -> subprocess.Popen[bytes]:
    """This file as a program that waits for the end of the caller, however it comes, and then sweeps."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,  # Ctrl-C is for the driver
    )


def main() -> None:
    driver, entry, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    while os.getppid() == driver:
        time.sleep(0.5)
    sweep(entry)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
