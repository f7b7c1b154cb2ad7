"""vLLM's side of a refit: a weight-transfer engine that reads slices from the refit buffer.

Every vLLM worker process has one. vLLM finds it by the entry point `vllm.general_plugins`.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpo_mcore.base.processes import bind_near_gpu
from grpo_mcore.refit.engine_side.engine_adapters import EngineAdapters
from grpo_mcore.refit.engine_side.engine_weights import EngineWeights
from grpo_mcore.refit.plan.parts import Part
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.plan.proof import Verify, is_checked, sum_dtype
from grpo_mcore.refit.transport.board import Board, Mapped, Seat, next_bucket
from grpo_mcore.refit.transport.buffer import block_view

BACKEND = "grpo_mcore"


@cache
def register() -> None:
    """Register the backend with vLLM in this process."""
    WeightTransferEngineFactory.register_engine(BACKEND, RefitWeightEngine)


@dataclass
class RefitInit(WeightTransferInitInfo):
    """`engine`: its name. `parts`: each rank's part of the plan. `transports`: the buffer and board to attach on each
    of the engine's nodes, over which its ranks are spread evenly and in order. `seats`: each rank's seat there.
    `verify`, `version`: which copies are checked. `in_place` None: only without memory for a second copy of the
    weights. `kept`: first parts of the names of parameters that stay as they were loaded."""

    engine: str
    parts: list[bytes]
    transports: list[dict[str, Any]]
    seats: list[Sequence[Any]]
    verify: Verify = "off"
    version: int = 0
    in_place: bool | None = None
    kept: Sequence[str] = ()


@dataclass
class RefitUpdate(WeightTransferUpdateInfo):
    """Begin to take all buckets, in a thread of its own; `report` shows when it is done."""


class RefitWeightEngine(WeightTransferEngine[RefitInit, RefitUpdate]):
    """Called in this order: init (part of the plan, buffer and board, kept), start, update (takes all buckets), finish
    (the commit), release.

    Before finish the model is unchanged, unless the update is in place. `abort` closes whatever is open; after a finish
    it restores the old weights.
    """

    init_info_cls = RefitInit
    update_info_cls = RefitUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.device.type == "cuda":
            bind_near_gpu(torch.cuda.get_device_properties(self.device))
        self._part: Part | None = None
        self._init: RefitInit | None = None
        self._mapped: Mapped | None = None
        self._adapters: EngineAdapters | None = None  # of an engine that serves adapters, from its first refit on
        self._weights: EngineWeights | EngineAdapters | None = None
        self._spare: dict[str, Tensor] = {}  # memory of the weights before those in use, by parameter
        self._committed = False  # and not yet released: the old weights are still here
        self.in_session = False  # vLLM's worker waits for a finish
        self._taken = 0  # buckets
        self._work: threading.Thread | None = None
        self._error: str | None = None
        self._seconds = 0.0
        self.refits = 0

    def init_transfer_engine(self, init_info: RefitInit) -> None:
        rank = self._engine_rank
        part = Part.unpacked(init_info.parts[rank])
        transport = init_info.transports[rank * len(init_info.transports) // self._engine_ranks]
        if self._mapped is None or self._mapped.transport != transport:
            self.shutdown()
            self._mapped = Mapped.attach(transport, self.device)
        self._part, self._init = part, init_info
        self._mapped.board.sit(Seat(*init_info.seats[rank]), f"{init_info.engine} rank {rank}")

    def start_weight_update(self) -> None:
        if self._part is None or self._init is None:
            raise RefitError("cannot start a refit: this engine rank has no plan")
        self._taken, self._seconds, self._error, self._committed = 0, 0.0, None, False
        in_place = self._init.in_place
        if in_place is None:
            in_place = not self._has_room(self._part)
        # Check everything in an engine's first refit.
        self._verify: Verify = "full" if self._init.verify == "sample" and not self.refits else self._init.verify
        if (manager := getattr(self.model, "lora_manager", None)) is not None:
            self._adapters = self._adapters or EngineAdapters(manager, self.device, self.model_config.dtype)
            self._adapters.expect(self._part)
            self._weights = self._adapters
        else:
            self._weights = EngineWeights(
                self.model,
                self._part,
                self.device,
                self.model_config.dtype,
                in_place=in_place,
                spare=self._spare,
                version=self._init.version,
                kept=tuple(self._init.kept),
            )
            self._spare = {}
        self.in_session = True

    def _has_room(self, part: Part) -> bool:
        """Return whether a second copy of the weights fits. On CPU all ranks of the engine share the memory."""
        if self.device.type == "cpu":
            return psutil.virtual_memory().available > 1.5 * part.block_bytes
        return torch.cuda.mem_get_info(self.device)[0] > 1.1 * sum(load.nbytes for load in part.all_loads())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Override the base class, which also waits for an accelerator's stream: `receive_weights` does that itself."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RefitUpdate) -> None:
        self._work = threading.Thread(target=self._take_quietly, daemon=True, name="refit")
        self._work.start()

    def _take_quietly(self) -> None:
        assert self._mapped is not None
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread begins with the first one
            self._take(self._mapped.board)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            self._mapped.board.fail(str(error))

    def _take(self, board: Board) -> None:
        """Take every bucket with something for this rank as soon as it is full."""
        assert self._part is not None
        following = next_bucket(map(bool, self._part.loads))
        index = following[0]
        board.finished(index)
        while index < len(self._part.loads):
            board.wait(board.writers, index + 1, f"fill bucket {index}")
            self._receive(index)
            self._taken = index = following[index + 1]
            board.finished(index)
        self._taken = index

    def _receive(self, index: int) -> None:
        started_at = time.perf_counter()
        assert self._part is not None and self._mapped is not None and self._weights is not None
        assert self._init is not None
        self._mapped.buffer.synchronize()
        for load in self._part.loads[index]:
            if load.param in self._weights.absent:
                continue
            values = block_view(self._mapped.buffer, self._part, index, load)
            checked = is_checked(self._verify, self._init.version, index, load.number)
            summed = sum_dtype(self._part, load, self._dtype) if checked else None
            try:
                self._weights.receive((index, load.number, load.copy), load.param, load.box, values, summed)
            except Exception as error:
                raise RefitError(f"putting a slice of bucket {index} into {load.param} failed: {error}") from error
        self._weights.mark_done()
        self._mapped.buffer.synchronize()
        self._seconds += time.perf_counter() - started_at

    def finish_weight_update(self) -> None:
        """The commit. Raises RefitError when something has not arrived. After `abort` it only ends the session."""
        if self._weights is None:
            self.in_session = False
            return
        started_at = time.perf_counter()
        assert self._part is not None
        if self._taken < (buckets := len(self._part.loads)):
            raise RefitError(f"only {self._taken} of {buckets} buckets have arrived")
        if missing := self._weights.missing():
            raise RefitError(f"parts of {', '.join(missing)} have not arrived")
        if not self._weights.in_place:
            self._weights.exchange()
        elif isinstance(self._weights, EngineWeights):
            self._weights.refresh()
        if isinstance(self._weights, EngineWeights) and self._weights.fallbacks:
            self._load_wholes(self._weights)
        self._committed, self.in_session = True, False
        self.refits += 1
        self._seconds += time.perf_counter() - started_at

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
        """Free the old weights: the commit is final. On CPU their memory is kept for the next refit, as long as the
        machine has enough."""
        if self.device.type == "cpu" and isinstance(self._weights, EngineWeights):
            self._spare = self._weights.old_memory()
        self._weights, self._committed = None, False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the key-value cache needs the staged weights' memory

    def abort(self) -> None:
        """Close an open update, or undo a commit that was not released. No-op if nothing is open."""
        if self._work is not None:
            if self._mapped is not None and self._work.is_alive():
                self._mapped.board.fail("it was aborted")  # ends the waiting of this rank and of all others
            self._work.join()
            self._work = None
        if self._committed and self.can_go_back:
            assert self._weights is not None
            self._weights.exchange()
        self._weights, self._committed, self._error = None, False, None

    @property
    def can_go_back(self) -> bool:
        """Whether a commit can be undone: not if layers were replaced one by one or loaded by vLLM."""
        return self._weights is not None and not self._weights.in_place and not self._weights.fallbacks

    def report(self) -> dict[str, Any]:
        """Report on the current or last update."""
        if self._part is None:
            return {}
        busy = self._work is not None and self._work.is_alive()
        state: dict[str, Any] = {
            "digest": self._part.digest,
            "busy": busy,
            "buckets": self._taken,
            "seconds": self._seconds,
            "dtype": self._dtype,
            "refits": self.refits,
        }
        if self._error:
            state["error"], state["traceback"] = self._error, ""
        if self._weights is not None:
            state |= {
                "in_place": self._weights.in_place,
                "verify": self._verify,
                "parameters": self._weights.parameters,
                "fallbacks": len(self._weights.fallbacks),
                "quantized": getattr(self._weights, "quantized", {}),
            }
            if not busy and self.in_session:  # until the commit: another rank may still be busy
                state["sums"] = self._weights.sums
        return state

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
        return str(self.model_config.dtype).removeprefix("torch.")

    def shutdown(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
