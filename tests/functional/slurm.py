"""A real Slurm on this machine: slurmctld and two slurmd on loopback, with processes, keys and files of their own."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
"""Packages of Debian and Ubuntu. Their services and the files in /etc/slurm and /etc/munge are not used."""
PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CTLD, SLURMD = 16817, 16900


def why_not() -> str | None:
    """Return why there can be no Slurm here, or None. Installs it from Debian's packages if permitted."""
    if (missing := _missing()) and os.geteuid() == 0 and shutil.which("apt-get"):
        for words in (("update",), ("install", "-y", "--no-install-recommends", *PACKAGES)):
            done = subprocess.run(("apt-get", *words), capture_output=True, text=True, timeout=300)
            if done.returncode:
                return f"no Slurm: {', '.join(missing)} missing, and apt-get {words[0]} failed: {done.stderr[-300:]}"
        missing = _missing()
    if missing:
        return f"no Slurm: {', '.join(missing)} missing (Debian: apt-get install {' '.join(PACKAGES)})"
    for port in (CTLD, SLURMD, SLURMD + 1):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"port {port} is taken, by another Slurm?"
    return None


def _missing() -> list[str]:
    return [program for program in PROGRAMS if _path(program) is None]


def _path(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Slurm:
    """A Slurm with two nodes that claim 64 cores and 8 GPUs each; a GPU is a link to /dev/null. `with
    Slurm(folder)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # short: sockets live in it
        self.conf = folder / "slurm.conf"

    def __enter__(self) -> Slurm:
        for name in ("pid", "log", "state", "spool/node1", "spool/node2", "run", "dev"):
            (self.folder / name).mkdir(parents=True)
        for name in (".", "run"):
            (self.folder / name).chmod(0o755)  # munged refuses a socket that others could not reach
        (self.folder / "log").chmod(0o700)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for index in range(8):
            (self.folder / f"dev/gpu{index}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/dev/gpu[0-7]\n")
        self.conf.write_text(_configuration(self.folder))
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        at = self.folder
        self._daemon(
            "munged", "--force", f"--key-file={at}/munge.key", f"--socket={at}/run/munge.socket",
            f"--pid-file={at}/pid/munged.pid", f"--log-file={at}/log/munged.log", f"--seed-file={at}/state/seed",
            "--num-threads=2",
        )  # fmt: skip
        socket_of = f"--socket={at}/run/munge.socket"
        wait_for(lambda: self._run("munge", socket_of, "-n").returncode == 0, 20, "munged")
        self._daemon("slurmctld", "-f", str(self.conf))
        wait_for(lambda: self._run("scontrol", "ping").returncode == 0, 30, "slurmctld")
        for node in ("node1", "node2"):
            self.start_node(node)
        self.wait_until_idle(60)

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-f", str(self.conf), "-N", node)

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until both nodes are up and neither a job nor the rest of one is on them."""

        def states() -> list[str]:
            return self._run("sinfo", "-hNo", "%T").stdout.split()

        wait_for(lambda: states() == ["idle"] * 2, seconds, "two idle nodes", lambda: f"{states()}{self.logs()}")

    def logs(self) -> str:
        """Return the end of each daemon's log."""
        files = sorted((self.folder / "log").glob("slurm*.log"))
        return "".join(f"\n== {file.name}\n{file.read_text()[-2500:]}" for file in files)

    def __exit__(self, *_: object) -> None:
        """End the daemons that it has started; each has written its pid into the folder."""
        if (self.folder / "pid/slurmctld.pid").exists():
            self._run("scancel", f"--user={getpass.getuser()}")
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and self._run("squeue", "-h").stdout.strip():
                time.sleep(0.3)
        for name in ("slurmd.node1", "slurmd.node2", "slurmctld", "munged"):
            self.end(name)

    def end(self, daemon: str, how: int = signal.SIGTERM) -> None:
        file = self.folder / f"pid/{daemon}.pid"
        if not file.exists():
            return
        pid = int(file.read_text())
        command = Path(f"/proc/{pid}/cmdline")
        for number in (how, signal.SIGKILL):
            if not command.exists() or str(self.folder).encode() not in command.read_bytes():
                break
            os.kill(pid, number)
            deadline = time.monotonic() + 8
            while command.exists() and command.read_bytes() and time.monotonic() < deadline:
                time.sleep(0.1)
        file.unlink(missing_ok=True)

    def submit(self, script: Path, folder: Path, *options: str, **variables: str) -> str:
        """Run `sbatch OPTIONS SCRIPT` in a folder. Return the job's number."""
        out = self.run("sbatch", "--parsable", *options, str(script), cwd=folder, variables=variables)
        return out.stdout.strip().split(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that scontrol shows of a job."""
        text = self.run("scontrol", "-o", "show", "job", number).stdout
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait(self, number: str, *states: str, seconds: float) -> dict[str, str]:
        """Wait until the job is in one of these states. Return its fields."""
        seen: dict[str, str] = {}

        def there() -> bool:
            seen.update(self.job(number))
            return seen["JobState"] in states

        wait_for(there, seconds, f"job {number} {' or '.join(states)}", lambda: str(seen))
        return seen

    def run(
        self, *words: str, cwd: Path | None = None, check: bool = True, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = self._run(*words, cwd=cwd, variables=variables)
        if check and done.returncode:
            raise AssertionError(f"{words}: {done.stdout}{done.stderr}")
        return done

    def _run(
        self, *words: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "SLURM_CONF": str(self.conf), **(variables or {})}
        program = [_path(words[0]) or words[0], *words[1:]]
        return subprocess.run(program, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)

    def _daemon(self, *words: str) -> None:
        done = self._run(*words)
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")


@contextmanager
def loopback() -> Iterator[Slurm]:
    """Start a Slurm in a folder of its own, which is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with Slurm(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(ready: Callable[[], bool], seconds: float, what: str, detail: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s {detail()}")
        time.sleep(0.3)


def _configuration(at: Path) -> str:
    host = socket.gethostname().split(".")[0]
    return f"""\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={CTLD}
SlurmUser={getpass.getuser()}
SlurmdUser={getpass.getuser()}
AuthType=auth/munge
AuthInfo=socket={at}/run/munge.socket
CredType=cred/munge
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool/%n
SlurmctldPidFile={at}/pid/slurmctld.pid
SlurmdPidFile={at}/pid/slurmd.%n.pid
SlurmctldLogFile={at}/log/slurmctld.log
SlurmdLogFile={at}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
KillWait=20
UnkillableStepTimeout=60
OverTimeLimit=0
SlurmdTimeout=30
MinJobAge=300
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{SLURMD}-{SLURMD + 1}] CPUs=64 Boards=1 \
SocketsPerBoard=1 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:8 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
