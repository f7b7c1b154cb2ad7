"""A connection to Ray: to one that runs already, or to one that is started here and ends with us."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import ray

from grpo_mcore.cluster import orphan_reaper
from grpo_mcore.cluster.environment import MARKER, of_the_run, only_allowed
from grpo_mcore.rollout.workers import DeadlineExceeded

LONGEST_TEMPORARY = 30
"""Characters of the temporary folder's path: Ray puts Unix sockets 75 characters below it, and their paths
may have 107 in all."""

KNOCK_S = 10.0
"""How long the machine of a running Ray may take to answer at all."""

TOO_SLOW = "timed out during startup"
"""Part of Ray's message."""

_log = logging.getLogger(__name__)


class RaySession:
    """Attaches to `address`, or starts Ray on this machine when `address` is None or "local".

    A started Ray gets only the allowed environment variables, asks for Ray's token, and leaves neither
    process nor file behind: a small program beside it sees to that even when this one is killed.
    """

    def __init__(
        self,
        address: str | None,
        env_vars: Sequence[str] = (),
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.started_here = False
        if ray.is_initialized():
            return
        if address and address != "local":
            _attach(address)
            return
        self.started_here = True
        self.folder = _short_folder()
        self._mark = f"{MARKER}={uuid.uuid4().hex}"
        self._sweeper = orphan_reaper.start_beside(self._mark, self.folder)
        try:
            with only_allowed(env_vars):
                ours = of_the_run(self._mark.partition("=")[2], self.folder, os.environ)
                before = {name: os.environ[name] for name in ours if name in os.environ}
                os.environ.update(ours)
                try:
                    self._start(start_timeout_s, num_cpus, num_gpus)
                finally:
                    for name in ours:
                        del os.environ[name]
                    os.environ.update(before)
        except BaseException:
            self.close()
            raise

    def _start(self, timeout_s: float, num_cpus: int | None, num_gpus: int | None) -> None:
        """More than once: Ray gives its processes 30 s, too little where many programs share few cores."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(self.folder),
                )
                return
            except Exception as error:
                if TOO_SLOW not in str(error):
                    raise
                ray.shutdown()
                orphan_reaper.sweep(self._mark)
                if time.monotonic() > deadline:
                    raise DeadlineExceeded("start of Ray", "its processes", timeout_s) from error
                _log.warning("Ray's processes were not up within 30 s; starting them again")

    @property
    def address(self) -> str:
        """Of this machine, for the cluster's other nodes."""
        return ray.util.get_node_ip_address()

    def close(self) -> None:
        """Disconnects. A Ray that was started here ends, with all that runs in it."""
        if not self.started_here:
            return
        ray.shutdown()
        resisting = orphan_reaper.sweep(self._mark)
        self._sweeper.terminate()
        self._sweeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        if resisting:
            raise RuntimeError(f"processes of this run could not be ended: {resisting}")

    def copy_logs(self, to: Path) -> None:
        """Saves the logs of a Ray that was started here."""
        if self.started_here:
            shutil.copytree(self.folder / "session_latest" / "logs", to, dirs_exist_ok=True)


def _attach(address: str) -> None:
    advice = "start it, or unset RAY_ADDRESS to have one started; if it asks for a token, set RAY_AUTH_MODE=token"
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:  # else a word or a scheme that Ray resolves
        try:
            socket.create_connection((host, int(port)), KNOCK_S).close()  # Ray itself would knock for many minutes
        except OSError as error:
            raise ConnectionError(f"nobody listens at {address} (RAY_ADDRESS): {error}; {advice}") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConnectionError(f"no Ray answers at {address} (RAY_ADDRESS): {advice}") from error


def _short_folder() -> Path:
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="ray-", dir=parent if len(parent) <= LONGEST_TEMPORARY else "/tmp"))
