"""vLLM's worker for CPUs, put to sleep as its worker for GPUs is: what no refit brings back is NaN."""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.v1.worker.cpu_worker import CPUWorker

from grpo_mcore.generation.worker_calls import unregistered_tensors


class WeightsPool(TorchDispatchMode):
    """The memory that torch takes while a model is loaded: vLLM's pool of weights in its sleep mode, which needs a GPU.
    Put to sleep at level 2, as vLLM's worker does it: buffers are copied and come back, everything else is lost."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            handle = tensor.dtype == torch.int64 and tensor.numel() == 1  # the address of what oneDNN has packed
            if tensor.device.type == "cpu" and tensor.layout == torch.strided and not handle:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)

    def sleep(self, runner: Any) -> None:
        model = runner.model
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._add(model.parameters())  # a refit on CPU gives them other memory, on a GPU other contents
        self._add(tensor for module in model.modules() for tensor in unregistered_tensors(module))
        gc.collect()
        for reference in self._storages.values():
            if (storage := torch.UntypedStorage._new_with_weak_ptr(reference.cdata)) is not None:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN in every float
        for cache in tree_leaves(runner.kv_caches):
            cache.zero_()  # as what CUDA maps anew

    def wake_up(self, runner: Any) -> None:
        for name, buffer in runner.model.named_buffers():
            buffer.data.copy_(self._buffers.get(name, buffer))


class SleepingWorker(CPUWorker):
    """Loads its model into a WeightsPool."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self.pool = WeightsPool()
        with self.pool:
            super().load_model(*args, **kwargs)

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            self.pool.sleep(self.model_runner)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if "weights" in (tags or ["weights"]):
            self.pool.wake_up(self.model_runner)
