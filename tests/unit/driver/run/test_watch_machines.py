"""logger.monitor_gpus: a monitor on each node, whose metrics the logger takes with each step."""

import logging
from pathlib import Path

import pytest

from grpo_mcore.cluster import LocalCluster, WorkerDied, WorkerFailed
from grpo_mcore.driver.run.setup import watch_machines
from grpo_mcore.observe import Logger
from tests.recipes import small_recipe


@pytest.mark.parametrize("kind", [WorkerDied, WorkerFailed])
def test_the_metrics_of_a_node_until_its_monitor_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[WorkerFailed]
) -> None:
    monitoring = {"monitor_gpus": True, "gpu_monitoring": {"collection_interval": 60}}
    config = small_recipe(logger={"log_dir": str(tmp_path), **monitoring})
    logger = Logger(config.logger)
    assert logger.machines() == {}, "nothing is monitored unless a run asks for it"
    with LocalCluster() as cluster:
        watch_machines(config, cluster, logger)
        assert {"node.0.cpu.util", "node.0.mem_gb", "node.0.mem_total_gb"} <= set(logger.machines())
        (monitor,) = cluster._workers

        def lost(*_: object, **__: object) -> None:
            raise kind("monitor-0", "take", "its process ended")

        monkeypatch.setattr(monitor, "call", lost)
        with caplog.at_level(logging.WARNING, logger="grpo_mcore"):
            assert logger.machines() == {} and logger.machines() == {}
        (record,) = caplog.records  # said once
        assert record.message.startswith("the machines are not monitored any more: ")
    logger.close()
