"""Measures the machines of a run: each GPU's utilisation, memory and power by NVML, processors and memory by psutil."""

from __future__ import annotations

import threading
from importlib import import_module
from statistics import fmean
from typing import Any

import psutil

GIB = 2**30


class MachineMonitor:
    """Samples this node every `interval_s` seconds in a thread. Packages are imported when it is made.

    `_rendezvous`: rendezvous of the worker group that it may be part of; not used.
    """

    def __init__(self, _rendezvous: object, interval_s: float) -> None:
        self.interval_s = interval_s
        self._gpus = _Gpus.find()
        self._samples: list[dict[str, float]] = []
        self._lock, self._end = threading.Lock(), threading.Event()
        psutil.cpu_percent()  # the first call has nothing to compare with
        self._thread = threading.Thread(target=self._run, name="machine-monitor", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call: means, and of memory the largest. `gpu.0.util` and `cpu.util` are
        percent, `mem_gb` GiB, `gpu.0.power_w` watts."""
        now = self._sample()
        with self._lock:
            samples, self._samples = [*self._samples, now], []
        return {
            name: (max if name.endswith("mem_gb") else fmean)([sample[name] for sample in samples if name in sample])
            for name in now
        }

    def gpu_names(self) -> list[str]:
        """Return the name of each GPU, none without NVML."""
        return self._gpus.names() if self._gpus else []

    def shutdown(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self.interval_s):
            sample = self._sample()
            with self._lock:
                self._samples.append(sample)

    def _sample(self) -> dict[str, float]:
        memory = psutil.virtual_memory()
        values = {
            "cpu.util": psutil.cpu_percent(),
            "mem_gb": (memory.total - memory.available) / GIB,
            "mem_total_gb": memory.total / GIB,
        }
        return values | (self._gpus.sample() if self._gpus else {})


class _Gpus:
    """The node's GPUs through NVML."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    @classmethod
    def find(cls) -> _Gpus | None:
        """Return None without the package, without a driver, or without a GPU."""
        try:
            pynvml = import_module("pynvml")  # of the package nvidia-ml-py
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml) if pynvml.nvmlDeviceGetCount() else None
        except pynvml.NVMLError:
            return None

    def names(self) -> list[str]:
        names = [self._nvml.nvmlDeviceGetName(handle) for handle in self._handles]
        return [name.decode() if isinstance(name, bytes) else name for name in names]

    def sample(self) -> dict[str, float]:
        """Return the metrics of each GPU; without one that the device does not give."""
        values, nvml = dict[str, float](), self._nvml
        readings = {
            "util": lambda handle: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "mem_gb": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
            "power_w": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }
        for index, handle in enumerate(self._handles):
            for name, read in readings.items():
                try:
                    values[f"gpu.{index}.{name}"] = read(handle)
                except nvml.NVMLError:  # not supported, not permitted (MIG), or a fault that passes
                    continue
        return values


PEAK_FLOPS = {
    "GB300": 2.5e15, "B300": 2.25e15, "GB200": 2.5e15, "B200": 2.25e15, "GH200": 989.4e12, "H200": 989.4e12,
    "H100": 989.4e12, "H200 NVL": 835.5e12, "H100 NVL": 835.5e12, "H100 PCIE": 756.5e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12,
}  # fmt: skip
"""Dense bfloat16 FLOP/s of a GPU by a part of its name, from NVIDIA's data sheets. The longest fitting part counts."""


def peak_flops(gpu_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU, None for one that is not known."""
    parts = [part for part in PEAK_FLOPS if part in gpu_name.upper().replace("-", " ")]
    return PEAK_FLOPS[max(parts, key=len)] if parts else None


def throughput(
    *, tokens: float, flops: float, total_s: float, train_s: float, devices: int, ranks: int, peak: float | None
) -> dict[str, float]:
    """Return the throughput of a step under NeMo RL's names. `tokens`: number trained on; `flops`: FLOPs of the
    training pass on all ranks; `devices`, `ranks`: number of the run's devices and of the policy's ranks; `peak`:
    FLOP/s of a device."""
    rates = {"tokens_per_sec_per_gpu": tokens / total_s / devices}
    if train_s > 0 and flops:
        rates["policy_training_tokens_per_sec_per_gpu"] = tokens / train_s / ranks
        rates["train_tflops_per_gpu"] = flops / train_s / ranks / 1e12
        if peak:
            rates["train_fp_utilization"] = flops / train_s / ranks / peak
    return rates
