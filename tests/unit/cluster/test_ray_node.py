"""A launcher's Ray node has its own ports and leaves nothing behind; neighbouring ranks share a node."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_mcore.base.orphan_reaper import MARKER
from grpo_mcore.cluster import ray_node
from grpo_mcore.cluster.ray_placement import rank_order
from grpo_mcore.rollout.workers import DeadlineExceeded
from tests.waiting import wait_until


def options(*words: str) -> list[str]:
    return ray_node.start_command(ray_node._parser().parse_args(words), Path("/tmp/a"))


def test_nodes_of_one_machine_do_not_meet() -> None:
    head = options("head", "--address=10.0.0.1:30120", "--gpus=8", "--cpus=64")
    first = options("worker", "--address=10.0.0.1:30120", "--index=1", "--object-store-gb=0.5")
    for words in (head, first):
        assert {"--min-worker-port=0", "--max-worker-port=0", "--block"} <= set(words)
    assert {"--head", "--port=30120", "--num-gpus=8", "--num-cpus=64", "--temp-dir=/tmp/a"} <= set(head)
    assert "--address=10.0.0.1:30120" in first and "--object-store-memory=536870912" in first
    fixed = [{word for word in words if "listen-port" in word} for words in (head, first)]
    assert not fixed[0] & fixed[1]
    ports = [int(word.rpartition("=")[2]) for word in head if "port=" in word and not word.endswith("=0")]
    assert all(30120 <= port < 30130 for port in ports)


@pytest.mark.slow
def test_a_node_is_started_by_rays_own_command() -> None:
    """With the patience of test_ray_patience.py: Ray's own 30 seconds are too few on a loaded machine."""
    python, run, program = options("head", "--address=10.0.0.1:30120", "--within=700")[:3]
    assert "start_node(sys.argv[1:], 700.0)" in program
    done = subprocess.run([python, run, program, "--help"], capture_output=True, text=True, check=True)
    assert "start [OPTIONS]" in done.stdout and "--dashboard-agent-listen-port" in done.stdout


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 cannot be used: .*RAY_PORT"):
            ray_node.check_ports("127.0.0.1", port)


@pytest.mark.parametrize(("failures", "starts", "code"), [(1, 2, 1), (9, 3, ray_node.START_AGAIN)])
def test_a_node_that_ends_while_it_starts_is_started_again(
    failures: int,
    starts: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A launcher's node gave up at once, where a run's own Ray had three tries."""
    program = f"""
import pathlib, sys
file = pathlib.Path({str(tmp_path / "starts")!r})
file.write_text(text := (file.read_text() if file.exists() else "") + ".")
sys.exit({ray_node.START_AGAIN} if len(text) <= {failures} else 0)"""
    monkeypatch.setattr(ray_node, "start_command", lambda *_: [sys.executable, "-c", program])
    number = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2}
    handlers = {each: signal.getsignal(each) for each in number}
    try:
        assert ray_node.main(["head", "--address=127.0.0.1:31230"]) == code
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert (tmp_path / "starts").read_text() == "." * starts
    assert capfd.readouterr().err.count(ray_node.ENDED_BY_ITSELF) == 1, "job scripts take that line for its end"


@pytest.mark.slow
def test_a_head_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeadlineExceeded, match="Ray's head"):
        ray_node.wait_for_head("127.0.0.1", 1, 0.2)
    assert ray_node.main(["worker", "--address=127.0.0.1:1", "--within=0.1"]) == 1
    assert "ray worker on" in capsys.readouterr().err


def test_rays_files_are_in_a_new_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else can make it before, or read it."""
    folders = list[Path]()
    monkeypatch.setattr(ray_node, "run_node", lambda command, folder, again: folders.append(folder))
    monkeypatch.setattr(ray_node, "check_ports", lambda host, port: None)
    for _ in range(2):
        ray_node.main(["head", "--address=127.0.0.1:30120"])
    for folder in folders:
        assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir()) == []
        folder.rmdir()
    assert len(set(folders)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_what_a_node_has_started_ends_with_it(tmp_path: Path, number: int) -> None:
    """Also processes that left its process group, as Ray's may."""
    folder, seen = tmp_path / "ray", tmp_path / "seen"
    folder.mkdir()
    inner = f"(setsid sleep 300 & echo $! > {seen}; env > {tmp_path}/env); sleep 300"
    code = (
        f"import sys; from pathlib import Path; from grpo_mcore.cluster.ray_node import run_node; "
        f"sys.exit(run_node(['bash', '-c', {inner!r}], Path({str(folder)!r})))"
    )
    node = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "MY_SECRET": "x"})
    wait_until(lambda: node.poll() is not None or (file := tmp_path / "env").exists() and file.read_text().strip())
    assert node.poll() is None
    time.sleep(0.2)
    node.send_signal(number)
    assert node.wait(60) == 0
    command = Path(f"/proc/{int(seen.read_text())}/cmdline")
    assert not command.exists() or not command.read_bytes()  # it has ended, or is a zombie
    assert not folder.exists()
    environment = (tmp_path / "env").read_text()
    assert MARKER in environment and "MY_SECRET" not in environment


def test_a_node_that_ends_by_itself_is_a_failure(tmp_path: Path) -> None:
    code = (
        f"import sys; from pathlib import Path; from grpo_mcore.cluster.ray_node import run_node; "
        f"sys.exit(run_node(['bash', '-c', 'exit 0'], Path({str(tmp_path / 'ray')!r})))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 1


def test_neighbouring_ranks_share_a_node() -> None:
    assert rank_order(["x", "x"]) == [(0, 0), (1, 1)]
    assert rank_order(["y", "x", "y", "x"]) == [(0, 0), (2, 1), (1, 0), (3, 1)]
    # A bundle may hold all ranks of a node.
    assert rank_order(["y", "x"], 4) == [(0, 0), (0, 1), (1, 0), (1, 1)]
