"""Two machines made of this one: network namespaces joined by a cable, whose names /etc/hosts maps to 127.0.1.1 as
Debian does. Run as a program it is a worker on one of them: its parts answer the test's calls over a Unix socket."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from socket import sethostname
from typing import Any

from grpo_mcore.base.imports import import_by_path

ADDRESSES = ("10.213.7.1", "10.213.7.2")


class Remote:
    """An object in a process on one of the nodes, as the driver of a refit sees it."""

    def __init__(self, name: str, pipe: Connection, process: subprocess.Popen[str]) -> None:
        self.name, self.process = name, process
        self._pipe, self._thread = pipe, ThreadPoolExecutor(1)

    def call(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> Any:
        return self._thread.submit(self._ask, method, args)

    def _ask(self, method: str, args: tuple[Any, ...]) -> Any:
        self._pipe.send((method, args))
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value


def why_not() -> str | None:
    """Return why this machine cannot make network namespaces, None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    try:
        with nodes():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {getattr(error, 'stderr', None) or error}"


@contextmanager
def nodes() -> Iterator[list[str]]:
    """The names of two network namespaces that reach each other at `ADDRESSES`, each with an /etc/hosts of its own."""
    names = [f"grpo-{secrets.token_hex(3)}-{index}" for index in range(2)]
    cables = [name[-8:] for name in names]
    hosts = [Path("/etc/netns") / name / "hosts" for name in names]
    try:
        for name, file in zip(names, hosts, strict=True):
            _ip("netns", "add", name)
            file.parent.mkdir(parents=True)
            file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name, file in zip(names, hosts, strict=True):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            file.unlink(missing_ok=True)
            if file.parent.exists():
                file.parent.rmdir()


@contextmanager
def workers(folder: Path, places: dict[str, tuple[str, str]]) -> Iterator[dict[str, Remote]]:
    """Workers by name. `places`: the node of each, and what makes its object: "module:function"."""
    found: dict[str, Remote] = {}
    started: list[subprocess.Popen[str]] = []
    try:
        for name, (node, maker) in places.items():
            socket = str(folder / name)
            with Listener(socket, "AF_UNIX") as listener:
                command = [sys.executable, "-m", "tests.functional.two_nodes", socket, node, maker]
                started.append(subprocess.Popen(["ip", "netns", "exec", node, "unshare", "--uts", *command], text=True))
                found[name] = Remote(name, listener.accept(), started[-1])
        yield found
    finally:
        for process in started:
            process.kill()
            process.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def serve(socket: str, node: str, maker: str) -> None:
    """Answer calls of the object that `maker` returns, one after the other, until the test ends."""
    sethostname(node)
    target = import_by_path(maker, "maker", ImportError)()
    pipe = Client(socket, "AF_UNIX")
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(target, method)(*args)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        pipe.send(answer)


if __name__ == "__main__":
    serve(*sys.argv[1:])
