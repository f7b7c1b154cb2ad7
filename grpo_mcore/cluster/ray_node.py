"""Run one node of a Ray cluster that a launcher starts, or wait until the cluster is complete:

    python -m grpo_mcore.cluster.ray_node head --address IP:PORT --cpus 64 --gpus 8
    python -m grpo_mcore.cluster.ray_node worker --address IP:PORT --cpus 64 --gpus 8
    python -m grpo_mcore.cluster.ray_node wait --address IP:PORT --nodes 2 --gpus 16 --within 600

A node lives as long as its program and leaves no process and no file behind, however it ends. Ray's own `ray stop` ends
every Ray of the machine and cannot be used.
"""

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_mcore.base import processes
from grpo_mcore.base.addresses import family_of, split_port
from grpo_mcore.base.orphan_reaper import OrphanReaper
from grpo_mcore.cluster.environment import RAYS_OWN, only_allowed, private_files
from grpo_mcore.rollout.workers import DeadlineExceeded, NotEnoughResources

ENDED_BY_ITSELF = "this node of Ray ended by itself"
"""Line that a node prints if it ends without having been asked to. Job scripts look for it (slurm_body.sh)."""

STARTS, START_AGAIN = 3, 76
"""Maximum starts of a node whose node process ends while it starts, as it does where its agent takes longer than 15
seconds, such as that of many nodes at once from one file system; and the exit code of such a start."""

END_S = 8.0
"""Seconds that Ray gets to end its processes by itself."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one role. Return the exit code: 0 when asked to end, else Ray's own or 1."""
    args = _parser().parse_args(words)
    host, port = split_port(args.address)
    try:
        if args.role == "wait":
            print(wait_for_nodes(args.address, args.nodes, args.gpus, args.within), flush=True)
            return 0
        if args.role == "worker":
            wait_for_head(host, int(port), args.within)
        else:
            check_ports(host, int(port))
    except (DeadlineExceeded, NotEnoughResources, OSError) as error:
        print(f"ray {args.role} on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        return 1
    for left in reversed(range(STARTS)):
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path, and only the owner may enter
        code = run_node(start_command(args, folder / RAYS_OWN), folder, again=left > 0)
        if code != START_AGAIN or not left:
            break
        print(f"it is started again; {left} starts are left", file=sys.stderr, flush=True)
    return code


def start_command(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return `ray start` in the foreground, with the patience of `start_node`. Workers listen on ports that the kernel
    chooses, so that nodes and jobs on one machine do not collide."""
    host, port = split_port(args.address)
    where = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
    if args.role == "worker":
        where = [f"--address={args.address}"]
    options = {
        "num-cpus": args.cpus,
        "num-gpus": args.gpus,
        "temp-dir": folder,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "dashboard-agent-listen-port": int(port) + 1 + args.index % 8,
    }
    if args.role == "head":
        options["ray-client-server-port"] = int(port) + 9
    if args.object_store_gb:
        options["object-store-memory"] = int(args.object_store_gb * 2**30)
    words = [f"--{name}={value}" for name, value in options.items()]
    start = (
        f"import sys; from grpo_mcore.cluster.ray_session import start_node; start_node(sys.argv[1:], {args.within}); "
        f"sys.exit({START_AGAIN})"
    )
    return [sys.executable, "-c", start, "--block", "--disable-usage-stats", *where, *words]


def run_node(command: Sequence[str], folder: Path, *, again: bool = False) -> int:
    """Run `command` until it ends or a signal comes, then end everything it has started and remove `folder`. Return 0
    after a signal, else its exit code, or 1 for 0. `again`: exit code START_AGAIN leads to another start, so the node's
    end is not printed."""
    signals: list[int] = []
    reaper = OrphanReaper(folder)
    with only_allowed(added=reaper.variables), private_files():  # secrets stay with the driver
        child = subprocess.Popen([*command])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):  # the last one passes through srun
        signal.signal(number, lambda got, _frame: signals.append(got))
    try:
        while (code := child.poll()) is None:
            if signals:
                processes.end([child], grace_s=END_S)
            time.sleep(0.2)
    finally:
        surviving = reaper.close()
    if surviving:
        print(f"processes of Ray could not be ended: {surviving}", file=sys.stderr, flush=True)
        return 1
    if not signals and not (again and code == START_AGAIN):
        print(f"{ENDED_BY_ITSELF}: {processes.describe_exit(code)}", file=sys.stderr, flush=True)
    return 0 if signals else code or 1


def wait_for_head(host: str, port: int, seconds: float) -> None:
    """Wait until something listens there. Raises DeadlineExceeded."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), 2.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise DeadlineExceeded("Ray's head", f"{host}:{port}", seconds, str(error)) from error
            time.sleep(0.3)


def check_ports(host: str, port: int) -> None:
    """Raise OSError, with the remedy, if a port that the head needs is taken."""
    for needed in (port, port + 9):
        with socket.socket(family_of(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended job's port may linger
            try:
                probe.bind((host, needed))
            except OSError as error:
                advice = "set RAY_PORT to the first of ten free ports below 32768"
                raise OSError(f"port {needed} of {host} cannot be used: {error.strerror}; {advice}") from error


def wait_for_nodes(address: str, nodes: int, gpus: float, seconds: float) -> str:
    """Wait until `nodes` nodes with `gpus` GPUs in total have joined. Return a summary of the cluster.

    Raises DeadlineExceeded with what has joined and what is missing.
    """
    deadline = time.monotonic() + seconds
    host, port = split_port(address)
    wait_for_head(host, int(port), seconds)
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        while True:
            alive = [node for node in ray.nodes() if node["Alive"]]
            joined = f"{len(alive)} of {nodes} nodes, {_total(alive, 'GPU'):g} of {gpus:g} GPUs"
            if len(alive) >= nodes and _total(alive, "GPU") >= gpus:
                return f"{joined}, {_total(alive, 'CPU'):g} CPUs"
            if time.monotonic() > deadline:
                names = ", ".join(f"{n['NodeManagerAddress']} ({n['Resources'].get('GPU', 0):g} GPUs)" for n in alive)
                raise DeadlineExceeded("all nodes of Ray", address, seconds, f"there are {joined}: {names or 'none'}")
            time.sleep(0.5)
    finally:
        ray.shutdown()


def _total(nodes: Sequence[dict[str, Any]], unit: str) -> float:
    return float(sum(node["Resources"].get(unit, 0.0) for node in nodes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ray_node", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("role", choices=("head", "worker", "wait"))
    parser.add_argument("--address", required=True, help="IP:PORT of the head")
    parser.add_argument("--cpus", type=int, default=max(1, int(processes.available_cores())))
    parser.add_argument("--gpus", type=int, default=0, help="of this node; with wait, of all")
    parser.add_argument("--nodes", type=int, default=1, help="to wait for")
    parser.add_argument("--index", type=int, default=0, help="of this node in the job")
    parser.add_argument("--object-store-gb", type=float, default=0.0, help="0: Ray's own choice")
    parser.add_argument("--within", type=float, default=600.0, help="seconds until the others must be there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
