"""Functions that test_supervise.py starts in processes of their own, in place of a run."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from grpo_mcore.base.stopping import on_signal, on_sigterm
from grpo_mcore.recipe import MasterConfig
from tests.recipes import small_recipe

DIED = "policy-1: train failed: its process ended"


def config_for(folder: Path) -> MasterConfig:
    cluster = {"max_restarts": 1, "retry_wait_s": 0.01}
    return small_recipe(checkpointing={"checkpoint_dir": str(folder)}, cluster=cluster)


def lost(config: Any, resume: Any, began: float) -> tuple[int, str | None]:
    """Is killed, dies, is lost, and then reaches its end: one after the other, with a checkpoint at each."""
    folder = Path(config.checkpointing.checkpoint_dir)
    number = len(list(folder.glob("step_*")))
    with (folder / "resumed.txt").open("a") as file:
        print(resume, file=file)
    if number == 3:
        return 7, None
    (folder / f"step_{number + 1}").mkdir()
    (folder / f"step_{number + 1}" / "training_info.json").write_text("{}")
    if number == 0:
        orphan = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (folder / "orphan.txt").write_text(str(orphan.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 1:
        os._exit(1)  # as Ray does
    return 1, DIED


def stuck(config: Any, resume: Any, began: float) -> tuple[int, str | None]:
    return 1, DIED


def mistaken(config: Any, resume: Any, began: float) -> tuple[int, str | None]:
    raise ValueError("a mistake")


def waiting(config: Any, resume: Any, began: float) -> tuple[int, str | None]:
    """Wait for a signal. On SIGUSR1 end in order with code 75, but with a thread that never ends."""
    with on_signal() as stop, on_sigterm(stop):
        Path(config.checkpointing.checkpoint_dir, str(os.getpid())).touch()
        try:
            while not stop.reason:
                time.sleep(0.02)
        except KeyboardInterrupt:
            time.sleep(0.5)  # as for the end of its workers
            raise
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return 75, None
