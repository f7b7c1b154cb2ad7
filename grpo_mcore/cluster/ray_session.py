"""A connection to Ray: to one that runs already, or to one that is started here and ends with this process."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import ray
from ray import NodeID
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]

from grpo_mcore.base.addresses import outward_address, running_ray, split_port
from grpo_mcore.base.orphan_reaper import END_S, OrphanReaper, end_marked
from grpo_mcore.base.processes import descendants
from grpo_mcore.cluster.environment import RAYS_OWN, only_allowed, private_files
from grpo_mcore.rollout.workers import DeadlineExceeded, NodeLost

LONGEST_TEMPORARY = 28
"""Maximum characters of the temporary folder's path: Ray puts Unix sockets 77 characters below it, and their paths may
have 107 in all."""

KNOCK_S = 10.0
"""Seconds that the machine of a running Ray gets to accept a connection."""

OWN_MACHINE = "127.0.0.2"
"""Address at which the processes of a Ray that was started here meet. It stays when a network of the machine goes, as a
VPN does. Ray would replace 127.0.0.1 by the machine's outward address."""

STARTS = 3
"""Maximum starts of a Ray whose node process ends while it starts."""

LATE = "timed out during startup"
"""Text of Ray's error about a node process that has not registered within 30 seconds, for which Ray has no setting."""

SHUTDOWN_S = 30.0
"""Seconds that Ray gets to end in order before its processes are killed."""

WATCH_NODE_S, ASK_S = 5.0, 10.0
"""Seconds between two questions to Ray's head whether this node is alive, and for its answer."""

TOKEN_PATH, TOKEN = "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
"""Variables in which Ray looks for the token that its processes ask for."""

SETTINGS = {"RAY_memory_monitor_refresh_ms": "0", "RAY_prestart_worker_first_driver": "0"}
"""Variables for a Ray that is started here; the environment's values win. Ray's memory monitor is off, as in the job
scripts of Slurm and Kubernetes: at 95 % of the machine's memory it would kill a worker, mostly one that holds a model.
Ray starts no workers in advance: it would start one for each core, and a run uses none of them, since its workers have
environments of their own."""

SHORTEST_SECRET = 6
"""Minimum number of characters of a value that is hidden in logs: a shorter one would be found everywhere."""

logger = logging.getLogger(__name__)


class RayUnreachable(ConnectionError):
    """No Ray answers at the address of the cluster that was named. It may be starting."""


class BadRayAddress(ValueError):
    """RAY_ADDRESS names no cluster that a driver can join."""


class RaySession:
    """Attaches to `address`, or starts Ray on this machine when `address` is None or "local".

    A Ray started here gets only the allowed environment variables, which have no secrets. It asks for a token of its
    own, unless the environment names one, and its files can be read by their owner alone. Its OrphanReaper leaves
    neither process nor file behind, even when this process is killed. `umask`: the one of this process.
    """

    def __init__(
        self,
        address: str | None,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.started_here = False
        self.token: Path | None = None  # file with the token of a Ray that is started here
        self._watch: NodeWatch | None = None
        with private_files() as self.umask:
            self._connect(address, num_cpus, num_gpus, start_timeout_s)
        self._watch = NodeWatch.of_this_machine()

    def _connect(self, address: str | None, num_cpus: int | None, num_gpus: int | None, start_timeout_s: float) -> None:
        if ray.is_initialized():
            return
        if running := running_ray(address):
            attach(running)
            return
        self.started_here = True
        self.reaper = OrphanReaper(_short_folder())
        settings = {name: value for name, value in SETTINGS.items() if name not in os.environ}
        try:
            variables = _token(self.reaper.folder)
            self.token = Path(variables[TOKEN_PATH]) if variables else None
            with only_allowed(added={**self.reaper.variables, **variables, **settings}):
                AuthenticationTokenLoader.instance().reset_cache()  # of an earlier Ray of this process
                self._start(start_timeout_s, num_cpus, num_gpus)
        except BaseException:
            self.close()
            raise

    def _start(self, timeout_s: float, num_cpus: int | None, num_gpus: int | None) -> None:
        """Start Ray. A node process that is only late, as where programs share few cores, is waited for and joined. One
        that ends while it starts is started again: it gives up where an agent of its own takes longer than 15 s."""
        deadline = time.monotonic() + timeout_s
        for left in reversed(range(STARTS)):
            try:
                ray.init(
                    address="local",
                    _node_ip_address=OWN_MACHINE,
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(self.reaper.folder / RAYS_OWN),
                )
                return
            except Exception as error:
                if LATE not in str(error):
                    raise
                if join_late_node(deadline, timeout_s):
                    return
                failure = last_failure(self.reaper.folder / RAYS_OWN / "session_latest" / "logs")
                reason = f"Ray's node process (raylet) ended while it started{failure}"
                if not left:
                    raise NodeLost(f"{reason}; that was {STARTS} times in a row") from error
                logger.warning("%s; Ray is started again", reason)
                ray.shutdown()
                end_marked(self.reaper.mark)

    @property
    def address(self) -> str:
        """Address of this machine: for the cluster's other nodes, or if Ray was started here, for other machines."""
        return outward_address() if self.started_here else ray.util.get_node_ip_address()

    def close(self) -> None:
        """Disconnect, and end a Ray that was started here with everything that runs in it. Processes that cannot be
        ended, since the kernel still frees their memory, are logged and end no run."""
        if self._watch is not None:
            self._watch.end()
        if not self.started_here:
            return
        # A raylet that stands still answers nothing; Ray would wait for it without end.
        killer = threading.Timer(SHUTDOWN_S, end_marked, [self.reaper.mark])
        killer.daemon = True
        killer.start()
        ray.shutdown()
        killer.cancel()
        if surviving := self.reaper.close():
            logger.error("processes of this run have not ended %g s after they were killed: %s", END_S, surviving)

    def check_files(self) -> None:
        """Raise NodeLost if files of a Ray that was started here are gone: a new worker would wait for them for many
        minutes. A new start of the run makes them anew."""
        if not self.started_here:
            return
        session = self.reaper.folder / RAYS_OWN / "session_latest"
        paths = [self.token, session / "logs", session / "sockets" / "raylet", session / "sockets" / "plasma_store"]
        if missing := [str(path) for path in paths if path is not None and not path.exists()]:
            raise NodeLost(
                f"no worker can start any more: files of Ray below {self.reaper.folder} have been removed "
                f"({', '.join(missing)}); let nothing clean that folder up (tmpreaper, systemd-tmpfiles), or set "
                "TMPDIR to another one"
            )

    def copy_logs(self, to: Path, hidden: Collection[str] = ()) -> None:
        """Save the logs of a Ray that was started here, for their owner alone, without the values in `hidden`."""

        def copy(source: str, target: str) -> None:
            content = Path(source).read_bytes()
            for value in hidden:
                content = content.replace(value.encode(), b"(hidden)") if len(value) >= SHORTEST_SECRET else content
            with open(target, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(content)

        if not self.started_here:
            return
        logs = self.reaper.folder / RAYS_OWN / "session_latest" / "logs"
        try:
            shutil.copytree(logs, to, dirs_exist_ok=True, copy_function=copy)
            to.chmod(0o700)
        except OSError as error:  # such as a full disk: the death is the news
            logger.warning("Ray's logs cannot be copied to %s: %s", to, error)


class NodeWatch(threading.Thread):
    """Ends the node process (raylet) of this machine once Ray's head has given it up.

    One that hangs answers nothing, and holds the object store: the driver would wait in `ray.put` without a deadline,
    and no signal or exception reaches it there. When the process is gone, every such call fails, and Ray ends the
    driver, which `supervise` starts again. A launcher's node ends with it, so that a job is queued again without it.

    `lives`: asks the head whether this node is alive; `node`: the node's id, which is on the command line of its
    process.
    """

    def __init__(self, lives: Callable[[], bool], node: str, period_s: float = WATCH_NODE_S) -> None:
        super().__init__(name="node watch", daemon=True)
        self._lives, self._node, self._period_s = lives, node, period_s
        self._ended = threading.Event()

    @classmethod
    def of_this_machine(cls) -> NodeWatch:
        """Watch the node that this process is connected to. It asks without ray.nodes(), which would start another Ray
        if this one has just been shut down."""
        context = ray.get_runtime_context()
        watch = cls.of(context.get_node_id(), context.gcs_address)
        watch.start()
        return watch

    @classmethod
    def of(cls, node: str, head: str) -> NodeWatch:
        identity, client = NodeID.from_hex(node), GcsClient(address=head)
        return cls(lambda: client.check_alive([identity], timeout=ASK_S)[0], node)

    @classmethod
    def of_child(cls) -> NodeWatch:
        """Watch the node process that this process, a launcher's, starts, from the time on when its head knows it."""
        while not (words := _words_of_node_process()):
            time.sleep(WATCH_NODE_S)
        watch = cls.of(words["node_id"], words["gcs-address"])
        while not watch._is_alive():
            time.sleep(WATCH_NODE_S)
        watch.start()
        return watch

    def end(self) -> None:
        self._ended.set()
        self.join(ASK_S)

    def run(self) -> None:
        given_up = 0  # times in a row: a head that has just been started again may not know its nodes yet
        while not self._ended.wait(self._period_s):
            if (lives := self._is_alive()) is None:
                continue
            given_up = 0 if lives else given_up + 1
            if given_up == 2 and not self._ended.is_set():
                hanging = self._node_processes()
                state = "does not answer and is ended now" if hanging else "has ended"
                logger.error("Ray has given up this machine, whose node process (raylet) %s", state)
                for process in hanging:  # after it is said: Ray may end this process at once
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                return

    def _is_alive(self) -> bool | None:
        try:
            return self._lives()
        except Exception as error:  # the head does not answer: Ray itself ends a driver or a node that has lost it
            logger.debug("Ray's head does not say whether this node is alive: %s", error)
            return None

    def _node_processes(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["name", "cmdline"])
            if process.info["name"] == "raylet" and any(self._node in word for word in process.info["cmdline"] or ())
        ]


def join_late_node(deadline: float, timeout_s: float) -> bool:
    """Join the Ray whose node process this one has started, once that has registered. Return False if it has ended.
    Raises DeadlineExceeded at `deadline`, `timeout_s` after its start."""
    while words := _words_of_node_process():
        logger.info("  Ray is still starting: its node process (raylet) has not registered")
        try:
            ray.init(address=words["gcs-address"], log_to_driver=False, logging_level=logging.ERROR)
            return True
        except (ConnectionError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise DeadlineExceeded("start of Ray", "its node process (raylet)", timeout_s) from error
        time.sleep(1.0)
    return False


def _words_of_node_process() -> dict[str, str]:
    """Return the command line options of the node process that this process has started; none as long as there is no
    such process."""
    for child in descendants():
        with suppress(psutil.Error):
            if child.name() == "raylet":
                return dict(word[2:].split("=", 1) for word in child.cmdline() if word[:2] == "--" and "=" in word)
    return {}


def last_failure(logs: Path) -> str:
    """Return what the node process said of its end, for a message; nothing if it said nothing."""
    try:
        lines = (logs / "raylet.err").read_text(errors="replace", encoding="utf-8").splitlines()
    except OSError:
        return ""
    failures = [line.partition("Check failed: ")[2] for line in lines if "Check failed: " in line]
    return f": {failures[-1][:300]}" if failures else ""


def start_node(words: Sequence[str], timeout_s: float) -> None:
    """Run `ray start` with these words in this process, and watch the node that it starts. A node process that is only
    late is waited for. If the node process ended while it started, print that and return; otherwise this process
    ends."""
    from ray.scripts.scripts import cli

    threading.Thread(target=NodeWatch.of_child, name="node watch", daemon=True).start()
    folder = next((Path(word.partition("=")[2]) for word in words if word.startswith("--temp-dir=")), Path())
    deadline = time.monotonic() + timeout_s
    try:
        cli(["start", *words])
    except Exception as error:
        if LATE not in str(error):
            raise
        while _words_of_node_process():  # it registers late, or it gives up
            time.sleep(1.0)
        if time.monotonic() > deadline:
            sys.exit(1)
        failure = last_failure(folder / "session_latest" / "logs")
        print(f"Ray's node process (raylet) ended while it started{failure}", file=sys.stderr, flush=True)


def attach(address: str) -> None:
    """Join a running Ray as a driver. Raises RayUnreachable or BadRayAddress."""
    advice = "start it, or unset RAY_ADDRESS to have one started; if it asks for a token, set RAY_AUTH_MODE=token"
    if "://" in address:
        raise BadRayAddress(
            f"RAY_ADDRESS {address} is for a client outside the cluster; a run's driver is a process of the cluster: "
            "start it on one of its nodes, with RAY_ADDRESS=HOST:6379 or auto"
        )
    host, port = split_port(address)
    if port.isdigit():  # else a name that Ray resolves
        try:
            socket.create_connection((host, int(port)), KNOCK_S).close()  # Ray itself would retry for many minutes
        except OSError as error:
            raise RayUnreachable(f"nothing listens at {address} (RAY_ADDRESS): {error}; {advice}") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise RayUnreachable(f"no Ray answers at {address} (RAY_ADDRESS): {advice}") from error
    except ValueError as error:
        raise BadRayAddress(f"RAY_ADDRESS {address}: expected HOST:PORT of a running Ray, or auto: {error}") from error
    except (RuntimeError, ray.exceptions.AuthenticationError) as error:  # another version of Ray, another token
        raise BadRayAddress(f"the Ray at {address} (RAY_ADDRESS) cannot be joined: {error}") from error


def _token(folder: Path) -> dict[str, str]:
    """Return the variable of a new token in `folder`; nothing if the environment names a token."""
    if TOKEN in os.environ or TOKEN_PATH in os.environ:
        return {}
    path = folder / "token"
    path.write_text(secrets.token_hex(32), encoding="utf-8")
    return {TOKEN_PATH: str(path)}


def _short_folder() -> Path:
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="ray-", dir=parent if len(parent) <= LONGEST_TEMPORARY else "/tmp"))
