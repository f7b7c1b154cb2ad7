"""vLLM's side of a refit: a weight-transfer engine that reads slices from the refit buffer.

Every vLLM worker process has one. vLLM finds it by the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import psutil
import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpo_mcore.refit.buffer import RefitBuffer, attach_buffer, block_view
from grpo_mcore.refit.engine_adapters import EngineAdapters
from grpo_mcore.refit.engine_weights import EngineWeights
from grpo_mcore.refit.plan import RefitError, RefitPlan
from grpo_mcore.refit.proof import Sums, Verify, checked_parameters, sum_dtype

BACKEND = "grpo_mcore"


@cache
def register() -> None:
    """Register the backend with vLLM in this process."""
    WeightTransferEngineFactory.register_engine(BACKEND, RefitWeightEngine)


@lru_cache(maxsize=2)
def _parsed(text: str) -> RefitPlan:
    return RefitPlan.from_json(text)


@dataclass
class RefitInit(WeightTransferInitInfo):
    """`plan`: JSON of the RefitPlan. `transports`: the buffer to attach on each of the engine's nodes, over which its
    ranks are spread evenly and in order. `verify`, `version`: which copies are checked. `in_place` None: only without
    memory for a second copy of the weights."""

    plan: str
    transports: list[dict[str, Any]]
    verify: Verify = "off"
    version: int = 0
    in_place: bool | None = None


@dataclass
class RefitUpdate(WeightTransferUpdateInfo):
    """`bucket`: index of the bucket that the buffer now holds. `background`: return at once; `report` shows
    when it is done."""

    bucket: int
    background: bool = False


class RefitWeightEngine(WeightTransferEngine[RefitInit, RefitUpdate]):
    """Called in this order: init (plan and buffer, kept), start, one update for each bucket in order, finish (the
    commit), release.

    Before finish the model is unchanged, unless the update is in place. `abort` closes whatever is open; after a finish
    it restores the old weights.
    """

    init_info_cls = RefitInit
    update_info_cls = RefitUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan: RefitPlan | None = None
        self._init: RefitInit | None = None
        self._buffer: RefitBuffer | None = None
        self._adapters: EngineAdapters | None = None  # of an engine that serves adapters, from its first refit on
        self._weights: EngineWeights | EngineAdapters | None = None
        self._committed = False  # and not yet released: the old weights are still here
        self.in_session = False  # vLLM's worker waits for a finish
        self._next_bucket = 0
        self._checked: set[str] = set()
        self._work: threading.Thread | None = None
        self._error: str | None = None
        self._seconds = 0.0
        self.refits = 0

    def init_transfer_engine(self, init_info: RefitInit) -> None:
        plan = _parsed(init_info.plan)
        transport = init_info.transports[self._engine_rank * len(init_info.transports) // self._engine_ranks]
        if self._buffer is None or self._buffer.description != transport:
            self.shutdown()
            self._buffer = attach_buffer(transport, self.device)
        self._plan, self._init = plan, init_info

    def start_weight_update(self) -> None:
        if self._plan is None or self._init is None:
            raise RefitError("cannot start a refit: this engine rank has no plan")
        self._next_bucket, self._seconds, self._error, self._committed = 0, 0.0, None, False
        in_place = self._init.in_place
        if in_place is None:
            in_place = not self._has_room(self._plan)
        rank = self._engine_rank
        # Check everything in an engine's first refit.
        self._verify: Verify = "full" if self._init.verify == "sample" and not self.refits else self._init.verify
        self._checked = checked_parameters(self._plan, self._verify, self._init.version)
        if (manager := getattr(self.model, "lora_manager", None)) is not None:
            self._adapters = self._adapters or EngineAdapters(manager, self.device, self.model_config.dtype)
            self._adapters.expect(self._plan, rank)
            self._weights = self._adapters
        else:
            self._weights = EngineWeights(
                self.model, self._plan, rank, self.device, self.model_config.dtype, in_place=in_place
            )
        self._rank = rank
        self.in_session = True

    def _has_room(self, plan: RefitPlan) -> bool:
        """Return whether a second copy of the weights fits. On CPU all ranks of the engine share the memory."""
        if self.device.type == "cpu":
            return psutil.virtual_memory().available > 1.5 * plan.block_bytes
        return torch.cuda.mem_get_info(self.device)[0] > 1.1 * plan.block_bytes / self._engine_ranks

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Override the base class, which also waits for an accelerator's stream: `receive_weights` does that itself."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RefitUpdate) -> None:
        assert self._plan is not None
        if update_info.bucket != self._next_bucket:
            self.in_session = False  # the worker ends it on an error
            raise RefitError(f"got bucket {update_info.bucket}, expected bucket {self._next_bucket}")
        if update_info.background:
            self._work = threading.Thread(target=self._receive_quietly, args=(update_info.bucket,), daemon=True)
            self._work.start()
            return
        self.in_session = False
        self._receive(update_info.bucket)
        self.in_session = True

    def _receive_quietly(self, bucket: int) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread begins with the first one
            self._receive(bucket)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _receive(self, index: int) -> None:
        began = time.perf_counter()
        assert self._plan is not None and self._buffer is not None and self._weights is not None
        self._buffer.synchronize()
        for number, block in enumerate(self._plan.buckets[index].blocks):
            for copy, read in enumerate(block.reads):
                if read.rank != self._rank or read.param in self._weights.absent:
                    continue
                values = block_view(self._buffer, self._plan, index, block)
                summed = sum_dtype(self._plan, block, self._dtype) if read.param in self._checked else None
                try:
                    self._weights.receive((index, number, copy), read.param, read.box, values, summed)
                except Exception as error:
                    raise RefitError(f"putting a slice of bucket {index} into {read.param} failed: {error}") from error
        self._weights.mark_done()
        self._buffer.synchronize()
        self._next_bucket += 1
        self._seconds += time.perf_counter() - began

    def finish_weight_update(self) -> None:
        """The commit. Raises RefitError when something has not arrived. After `abort` it only ends the session."""
        if self._weights is None:
            self.in_session = False
            return
        began = time.perf_counter()
        assert self._plan is not None
        if self._next_bucket != len(self._plan.buckets):
            raise RefitError(f"only {self._next_bucket} of {len(self._plan.buckets)} buckets have arrived")
        if missing := self._weights.missing():
            raise RefitError(f"parts of {', '.join(missing)} have not arrived")
        if not self._weights.in_place:
            self._weights.exchange()
        if isinstance(self._weights, EngineWeights) and self._weights.fallbacks:
            self._load_wholes(self._weights)
        self._committed, self.in_session = True, False
        self.refits += 1
        self._seconds += time.perf_counter() - began

    def _load_wholes(self, weights: EngineWeights) -> None:
        """Load the tensors that slices cannot express with vLLM's own loading."""
        tied = weights.tied()  # before the reload, which gives each module its own tensor
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                loaded = self.model.load_weights(weights.wholes.items())
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        for name, others in tied.items():
            for module in others if name in (loaded or ()) and self.device.type == "cpu" else ():
                module.quant_method.process_weights_after_loading(module)  # the reload packs only what it loaded
        if missing := sorted(set(weights.unplanned) - set(loaded or ())):
            raise RefitError(f"the refit plan leaves parameters of the engine unfilled: {', '.join(missing)}")

    def put_adapters_to_use(self) -> None:
        """Call this when vLLM's session of a refit has ended: its end makes vLLM forget all adapters."""
        if self._adapters is not None:
            self._adapters.put_to_use()

    def release(self) -> None:
        """Free the old weights: the commit is final."""
        self._weights, self._committed = None, False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the key-value cache needs the staged weights' memory

    def abort(self) -> None:
        """Close an open update, or undo a commit that was not released. No-op if nothing is open."""
        if self._work is not None:
            self._work.join()
            self._work = None
        if self._committed and self.can_go_back:
            assert self._weights is not None
            self._weights.exchange()
        self._weights, self._committed = None, False

    @property
    def can_go_back(self) -> bool:
        """Whether a commit can be undone: not if layers were replaced one by one or loaded by vLLM."""
        return self._weights is not None and not self._weights.in_place and not self._weights.fallbacks

    def report(self) -> dict[str, Any]:
        """Report on the current or last update."""
        if self._plan is None:
            return {}
        busy = self._work is not None and self._work.is_alive()
        found: dict[str, Any] = {
            "digest": self._plan.digest,
            "busy": busy,
            "buckets": self._next_bucket,
            "seconds": self._seconds,
            "dtype": self._dtype,
            "refits": self.refits,
        }
        if self._error:
            found["error"], found["traceback"] = self._error, ""
        if self._weights is not None:
            found |= {
                "in_place": self._weights.in_place,
                "verify": self._verify,
                "parameters": self._weights.parameters,
                "fallbacks": len(self._weights.fallbacks),
            }
            if not busy:
                found["sums"], self._weights.sums = self._weights.sums, Sums()
        return found

    @property
    def _engine_rank(self) -> int:
        """This rank's number in its engine: tensor first, then pipeline."""
        stage = get_pp_group().rank_in_group
        return int(stage * self.parallel_config.tensor_parallel_size + get_tensor_model_parallel_rank())

    @property
    def _engine_ranks(self) -> int:
        return int(self.parallel_config.tensor_parallel_size * self.parallel_config.pipeline_parallel_size)

    @property
    def _dtype(self) -> str:
        """Dtype of the engine, by name."""
        return str(self.model_config.dtype).removeprefix("torch.")

    def shutdown(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
