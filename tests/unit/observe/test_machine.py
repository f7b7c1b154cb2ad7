"""Metrics of the machines, and the throughput of a step."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.observe.machine import MachineMonitor, peak_flops, throughput
from tests.waiting import wait_until


def test_processors_and_memory_of_this_machine() -> None:
    monitor = MachineMonitor(None, 0.02)
    try:
        wait_until(lambda: len(monitor._samples) > 1)
        taken = monitor.take()
        assert 0 <= taken["cpu.util"] <= 100 and 0 < taken["mem_gb"] < taken["mem_total_gb"]
        assert not any(name.startswith("gpu") for name in taken) or monitor.gpu_names()
    finally:
        monitor.shutdown()
    assert not monitor._thread.is_alive() and monitor.take().keys() == taken.keys()


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class NoPermission(NVMLError):
    """The answer of a MIG device to a user who may not read the whole GPU."""


def nvml(power: Any) -> Any:
    """An NVML with one H100, half used. `power`: milliwatts, or the error of a device that does not report it."""

    def power_usage(_: Any) -> float:
        if isinstance(power, Exception):
            raise power
        return power

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H100 80GB HBM3",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=40 * 2**30),
        nvmlDeviceGetPowerUsage=power_usage,
        NVMLError=NVMLError,
        NVMLError_NotSupported=NotSupported,
    )


@pytest.mark.parametrize(("power", "watts"), [(350_000, 350.0), (NotSupported(), None), (NoPermission(), None)])
def test_gpus_through_nvml(monkeypatch: pytest.MonkeyPatch, power: Any, watts: float | None) -> None:
    """The real library needs a driver; what is read of it and in which units is fixed here."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(power))
    monitor = MachineMonitor(None, 60)
    taken = monitor.take()
    monitor.shutdown()
    assert (taken["gpu.0.util"], taken["gpu.0.mem_gb"], taken.get("gpu.0.power_w")) == (50.0, 40.0, watts)
    assert [peak_flops(name) for name in monitor.gpu_names()] == [989.4e12]


def test_peaks_by_name() -> None:
    found = {name: peak_flops(name) for name in ("NVIDIA L40S", "NVIDIA L4", "NVIDIA A100-SXM4-80GB", "Tesla T4")}
    assert found == {"NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "NVIDIA A100-SXM4-80GB": 312e12, "Tesla T4": None}
    assert [peak_flops(f"NVIDIA H100 {kind}") for kind in ("80GB HBM3", "NVL", "PCIe")] == [
        989.4e12,
        835.5e12,
        756.5e12,
    ]
    assert peak_flops("NVIDIA B300 SXM6 AC") == peak_flops("NVIDIA B200") == 2.25e15


def test_throughput_of_a_step() -> None:
    step = {"tokens": 1e6, "flops": 8e15, "total_s": 10.0, "train_s": 2.0, "devices": 16, "ranks": 8}
    assert throughput(**step, peak=1e15) == {
        "tokens_per_sec_per_gpu": 6250.0,
        "policy_training_tokens_per_sec_per_gpu": 62500.0,
        "train_tflops_per_gpu": 500.0,
        "train_fp_utilization": 0.5,
    }
    assert "train_fp_utilization" not in throughput(**step, peak=None)
    assert throughput(**{**step, "flops": 0.0}, peak=1e15) == {"tokens_per_sec_per_gpu": 6250.0}
