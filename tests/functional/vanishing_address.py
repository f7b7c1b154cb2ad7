"""Runs in a network namespace of its own: a Ray on this machine works on when the machine's only outward address goes.

Prints "NAME SECONDS" for each step.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from grpo_mcore.base.addresses import outward_address
from grpo_mcore.cluster.ray_cluster import RayCluster

DEVICE, ADDRESS = "vpn0", "10.99.0.7"


class Echo:
    def say(self, text: str) -> str:
        return text

    def shutdown(self) -> None:
        """Nothing is held."""


def network() -> None:
    for words in (
        "link set lo up",
        f"link add {DEVICE} type veth peer name other0",
        f"addr add {ADDRESS}/24 dev {DEVICE}",
        f"link set {DEVICE} up",
        "link set other0 up",
        "route add default via 10.99.0.1",
    ):
        subprocess.run(["ip", *words.split()], check=True)


def main(log_dir: Path) -> None:
    network()
    assert outward_address() == ADDRESS
    with RayCluster(log_dir, address="local", call_timeout_s=60.0, num_cpus=2, num_gpus=0) as cluster:
        assert cluster.address == ADDRESS, "where other machines reach an endpoint of the run"
        first = cluster.spawn("first", Echo, cpus=0.1)
        assert first.call("say", "before").result() == "before"
        subprocess.run(["ip", "link", "del", DEVICE], check=True)
        started_at = time.monotonic()
        assert first.call("say", "after").result() == "after"
        print(f"call {time.monotonic() - started_at:.1f}", flush=True)
        second = cluster.spawn("second", Echo, cpus=0.1)
        assert second.call("say", "new").result() == "new"
        print(f"spawn {time.monotonic() - started_at:.1f}", flush=True)
    print(f"closed {time.monotonic() - started_at:.1f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
