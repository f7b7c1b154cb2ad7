"""`doctor --cluster` on a real Ray: each node's findings, a wrong clock, the network."""

import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from grpo_mcore.tools.doctor import Needs, checks, nodes


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """As the job scripts start Ray on a node whose GPUs are 3 and 5."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def test_every_node_is_examined(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_now", lambda: time.time() + 60)
    (tmp_path / "file").write_text("")
    folders = {"checkpoints": str(tmp_path / "shared"), "logs": str(tmp_path / "file" / "logs")}
    found = nodes.examine_cluster(Needs(gpu=False, nodes=2, folders=folders), address)
    whole, node = found.pop("cluster"), next(iter(found.values()))
    assert len(found) == 1
    faults = {finding.check: finding.saw for finding in whole if finding.state == "fault"}
    assert faults.keys() == {"Ray", "clock"}
    assert "1 nodes" in faults["Ray"] and "+60.0 s off" in faults["clock"]
    assert any(finding.check == "checkpoints" and "seen by 1" in finding.saw for finding in whole)
    states = {finding.check: finding.state for finding in node}
    assert states["logs"] == "fault" and states["checkpoints"] == states["versions"] == "ok"
    assert list((tmp_path / "shared").iterdir()) == []


def test_auto_is_the_ray_of_this_machine(address: str) -> None:
    """It may find another one: tests run beside each other."""
    assert re.match(r"\S+:\d+", checks.ray_answers("auto").saw)


def test_a_task_sees_the_gpus_of_its_node(address: str) -> None:
    """Also one that asks for none: it may be that a run has them all."""
    (node,) = (each["NodeID"] for each in ray.nodes())
    assert ray.get(nodes._task(ray, node, os.getenv).remote("CUDA_VISIBLE_DEVICES"), timeout=60) == "3,5"


def test_nodes_that_reach_each_other(address: str) -> None:
    """Two ranks of the one node: tasks that know each other only by host and port. What is said of those that do not
    is in unit/tools/doctor/test_doctor.py."""
    (node,) = ray.nodes()
    good = nodes._network(ray, {node["NodeID"]: node["NodeManagerAddress"]}, "gloo", 2)
    assert good.state == "ok" and good.saw.startswith("gloo over 1 nodes: ")
