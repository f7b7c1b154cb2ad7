"""vLLM's side of a refit: a weight-transfer engine that loads whole tensors out of the shared refit buffer.

It lives in every vLLM worker process. vLLM finds it by the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from grpo_mcore.refit.buffer import RefitBuffer, attach_buffer, slot_view
from grpo_mcore.refit.plan import RefitError, RefitPlan

BACKEND = "grpo_mcore"


@cache
def register() -> None:
    """Make the backend known to vLLM in this process."""
    WeightTransferEngineFactory.register_engine(BACKEND, RefitWeightEngine)


@dataclass
class RefitInit(WeightTransferInitInfo):
    """`plan`: JSON of the RefitPlan. `transport`: description of the buffer to attach."""

    plan: str
    transport: dict[str, Any]


@dataclass
class RefitUpdate(WeightTransferUpdateInfo):
    """`bucket`: index of the bucket that the buffer now holds."""

    bucket: int


class RefitWeightEngine(WeightTransferEngine[RefitInit, RefitUpdate]):
    """init (plan and buffer, kept) -> start -> one update a bucket, in order -> finish; `abort` anywhere."""

    init_info_cls = RefitInit
    update_info_cls = RefitUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan: RefitPlan | None = None
        self._buffer: RefitBuffer | None = None
        self._open = False  # vLLM's layers are being reloaded
        self.in_session = False  # vLLM's worker waits for a finish
        self._next_bucket = 0
        self._loaded: set[str] = set()
        self._shared_names: list[list[str]] = []
        self._seconds = 0.0

    def init_transfer_engine(self, init_info: RefitInit) -> None:
        plan = RefitPlan.from_json(init_info.plan)
        if self._buffer is None or self._buffer.description != init_info.transport:
            self.shutdown()
            self._buffer = attach_buffer(init_info.transport)
        self._plan = plan

    def start_weight_update(self) -> None:
        if self._plan is None:
            raise RefitError("a refit is to start, but no plan has been given to this engine rank")
        self._next_bucket, self._loaded, self._seconds = 0, set(), 0.0
        # The reload gives tied parameters a tensor each, so what is tied must be seen before it.
        self._shared_names = _names_of_shared_parameters(self.model)
        self._open = True
        initialize_layerwise_reload(self.model)
        self.in_session = True

    def receive_weights(self, update_info: RefitUpdate) -> None:
        began = time.perf_counter()
        assert self._plan is not None and self._buffer is not None
        self.in_session = False  # the worker ends it on an error
        if update_info.bucket != self._next_bucket:
            raise RefitError(f"bucket {update_info.bucket} came, bucket {self._next_bucket} was expected")
        current = "none"

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            assert self._plan is not None and self._buffer is not None
            for slot in self._plan.buckets[update_info.bucket].slots:
                current = slot.name
                yield slot.name, slot_view(self._buffer, self._plan, update_info.bucket, slot)

        try:
            with disable_mtp_completeness_check():  # a bucket is only a part of the model
                self._loaded |= self.model.load_weights(tensors())
        except Exception as error:
            raise RefitError(f"loading {current!r} of bucket {update_info.bucket} failed: {error}") from error
        self._copy_pending()
        self._next_bucket += 1
        self.in_session = True
        self._seconds += time.perf_counter() - began

    def finish_weight_update(self) -> None:
        """Raises RefitError when a bucket, a parameter or a part of one has not arrived.

        After `abort` it only ends the session.
        """
        if not self._open:
            self.in_session = False
            return
        began = time.perf_counter()
        assert self._plan is not None
        if self._next_bucket != len(self._plan.buckets):
            raise RefitError(f"only {self._next_bucket} of {len(self._plan.buckets)} buckets were loaded")
        if missing := self._missing():
            raise RefitError(f"the refit plan leaves parameters of the engine unfilled: {', '.join(missing)}")
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied()
        self._open = self.in_session = False
        self._seconds += time.perf_counter() - began

    def abort(self) -> None:
        """Close a half-open update. Layers whose weights have not all arrived keep their old ones; those
        complete have the new ones, so after a bucket was loaded the model is of no version. No-op when
        nothing is open."""
        if not self._open:
            return
        for module in self.model.modules():
            info = get_layerwise_info(module)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied()
        self._open = False

    def report(self) -> dict[str, Any]:
        """What the current or last update has done. `tensors` are Hugging Face's, `parameters` vLLM's."""
        if self._plan is None:
            return {}
        slots = [slot for bucket in self._plan.buckets[: self._next_bucket] for slot in bucket.slots]
        return {
            "digest": self._plan.digest,
            "tensors": len(slots),
            "bytes": sum(slot.nbytes for slot in slots),
            "parameters": len(self._loaded),
            "seconds": self._seconds,
        }

    def shutdown(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _copy_pending(self) -> None:
        """vLLM keeps the tensors of a layer until all of the layer has come (q until v, say). Those kept past
        their bucket view a half of the buffer that is filled again soon: vLLM gets copies of them instead."""
        assert self._buffer is not None
        shared = self._buffer.flat.untyped_storage().data_ptr()
        for module in self.model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                for name, value in call.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == shared:
                        call.arguments[name] = value.clone()

    def _missing(self) -> list[str]:
        """Parameters that nothing was loaded into, or only a part."""
        tied = {name: names for names in self._shared_names for name in names}
        missing = [
            name
            for name, _ in self.model.named_parameters()
            if name not in self._loaded and self._loaded.isdisjoint(tied.get(name, ()))
        ]
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            # A vocabulary that vLLM pads never counts as complete: its last rows are in no checkpoint.
            partly = info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0)
            if partly and not isinstance(module, VocabParallelEmbedding):
                missing.append(f"{name} ({info.load_numel:,} of {info.load_numel_total:,} elements)")
        return missing

    def _repack_tied(self) -> None:
        """A tied output layer shares its parameter with the embedding. But the CPU build computes with a packed
        copy, made by `process_weights_after_loading`, and a reload runs that only on the layer it loaded."""
        if self.device.type != "cpu":
            return
        for names in self._shared_names:
            for name in names:
                module = self.model.get_submodule(name.rpartition(".")[0])
                method = getattr(module, "quant_method", None)
                if name not in self._loaded and isinstance(method, QuantizeMethodBase):
                    method.process_weights_after_loading(module)


def _names_of_shared_parameters(model: nn.Module) -> list[list[str]]:
    """The names under which each parameter that has several is known."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
