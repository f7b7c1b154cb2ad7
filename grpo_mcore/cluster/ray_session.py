"""A connection to Ray: to one that runs already, or to one that is started here and ends with this process."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ray

from grpo_mcore.cluster.environment import only_allowed
from grpo_mcore.cluster.orphan_reaper import OrphanReaper, end_marked
from grpo_mcore.rollout.workers import DeadlineExceeded

LONGEST_TEMPORARY = 30
"""Maximum characters of the temporary folder's path: Ray puts Unix sockets 75 characters below it, and their paths may
have 107 in all."""

KNOCK_S = 10.0
"""Seconds that the machine of a running Ray gets to accept a connection."""

TOO_SLOW = "timed out during startup"
"""Part of Ray's message when its processes did not start in time."""

logger = logging.getLogger(__name__)


class RaySession:
    """Attaches to `address`, or starts Ray on this machine when `address` is None or "local".

    A Ray started here gets only the allowed environment variables and asks for Ray's token. Its OrphanReaper leaves
    neither process nor file behind, even when this process is killed.
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
        self.reaper = OrphanReaper(_short_folder())
        try:
            with only_allowed(env_vars, self.reaper.variables):
                self._start(start_timeout_s, num_cpus, num_gpus)
        except BaseException:
            self.close()
            raise

    def _start(self, timeout_s: float, num_cpus: int | None, num_gpus: int | None) -> None:
        """Start Ray. Retry if its processes miss Ray's deadline of 30 s, as they may where programs share few cores."""
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
                    _temp_dir=str(self.reaper.folder),
                )
                return
            except Exception as error:
                if TOO_SLOW not in str(error):
                    raise
                ray.shutdown()
                end_marked(self.reaper.mark)
                if time.monotonic() > deadline:
                    raise DeadlineExceeded("start of Ray", "its processes", timeout_s) from error
                logger.warning("Ray's processes were not up within 30 s; starting them again")

    @property
    def address(self) -> str:
        """Address of this machine, for the cluster's other nodes."""
        return ray.util.get_node_ip_address()

    def close(self) -> None:
        """Disconnect, and end a Ray that was started here with everything that runs in it."""
        if not self.started_here:
            return
        ray.shutdown()
        if surviving := self.reaper.close():
            raise RuntimeError(f"processes of this run could not be ended: {surviving}")

    def copy_logs(self, to: Path) -> None:
        """Save the logs of a Ray that was started here."""
        if self.started_here:
            shutil.copytree(self.reaper.folder / "session_latest" / "logs", to, dirs_exist_ok=True)


def _attach(address: str) -> None:
    advice = "start it, or unset RAY_ADDRESS to have one started; if it asks for a token, set RAY_AUTH_MODE=token"
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:  # else a name or a scheme that Ray resolves
        try:
            socket.create_connection((host, int(port)), KNOCK_S).close()  # Ray itself would retry for many minutes
        except OSError as error:
            raise ConnectionError(f"nothing listens at {address} (RAY_ADDRESS): {error}; {advice}") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConnectionError(f"no Ray answers at {address} (RAY_ADDRESS): {advice}") from error


def _short_folder() -> Path:
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="ray-", dir=parent if len(parent) <= LONGEST_TEMPORARY else "/tmp"))
