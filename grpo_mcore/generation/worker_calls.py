"""Functions that an engine runs on each of its ranks, with vLLM's worker as first argument: steps of a
refit, traces of torch's profiler, and recording of what comes out of layers and of the experts to which each token was
routed.

On GPU vLLM records experts itself; its recorder needs a model runner that its CPU build lacks. Ours uses the routers'
hook.
"""

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_mcore.base.torch_profile import ProcessProfile


def refit_step(worker: Any, step: str, argument: Any = None) -> dict[str, Any]:
    """Run one step of a refit through vLLM's worker. Returns the weight-transfer backend's report.

    An error is returned as text under "error". If it were raised, the other ranks' answers would stay in vLLM's queue,
    and every later call would get the answer of the call before it.
    """
    backend = worker.weight_transfer_engine
    try:
        match step:
            case "start":
                worker.init_weight_transfer_engine(argument)
                worker.start_weight_update()
                worker.update_weights({})
            case "wait":
                pass  # the report tells whether buckets are still being taken
            case "finish":
                worker.finish_weight_update()
                backend.put_adapters_to_use()
            case "release":
                backend.release()
            case "abort":
                in_session = backend.in_session
                backend.abort()
                if in_session:
                    worker.finish_weight_update()  # ends vLLM's session; nothing is left to apply
                backend.put_adapters_to_use()
            case _:
                raise ValueError(f"no refit step {step!r}")
        return backend.report()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def unlink_shared_segments(worker: Any) -> None:
    """Remove the names of the segments in which vLLM's CPU ranks exchange data, which vLLM never does.

    Every rank has mapped them once the model is loaded; the memory is freed with the last rank.
    """
    if worker.rank == 0:
        for segment in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*-cpushm_*"):
            segment.unlink()


def unlink_answer_queue(worker: Any) -> None:
    """Remove the name of the shared memory in which this rank answers its engine; both have it mapped. vLLM removes the
    name at the rank's end, which a killed rank does not reach. Only the object of vLLM that runs the rank's calls, such
    as this one, has the queue: it is found on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        unlink_queue(getattr(frame.f_locals.get("self"), "worker_response_mq", None))
        frame = frame.f_back


def unlink_queue(queue: Any) -> None:
    """Remove the name of the segment of a queue that this process has made, if it is one with a segment."""
    buffer: Any = getattr(queue, "buffer", None)
    if getattr(buffer, "is_creator", False):
        buffer.shared_memory.unlink()
        buffer.is_creator = False


def make_stage_inputs(worker: Any) -> None:
    """Make the tensors into which a later pipeline stage receives. vLLM makes them in its warm-up, which its CPU build
    skips in eager mode with a cache of a given size."""
    from vllm.distributed import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def divide_logits(worker: Any, temperature: float) -> bool:
    """Divide all logits by a temperature from now on. Return whether this rank computes logits."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    last = [module for module in worker.model_runner.model.modules() if isinstance(module, LogitsProcessor)]
    for module in last:
        module.scale /= temperature
    return bool(last)


def start_profile(worker: Any) -> None:
    """Start torch's profiler on this rank."""
    worker.process_profile = ProcessProfile()
    worker.process_profile.start()


def stop_profile(worker: Any, start_of_path: str) -> None:
    """End the profiler, and write its trace to a file of this rank. No-op on a rank that started after it."""
    if hasattr(worker, "process_profile"):
        worker.process_profile.stop(Path(f"{start_of_path}-{worker.rank}.json"))


def has_only_registered_tensors(worker: Any) -> bool:
    """Return whether the model on this rank keeps nothing on its device besides parameters, buffers and their views.

    vLLM keeps the buffers when it drops the weights (sleep level 2), and a refit fills all parameters but those that
    EngineConfig.kept names; any other tensor that the model made while it was loaded would lose its values.
    """
    model = worker.model_runner.model
    registered = [*model.parameters(), *model.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in registered}
    device = registered[0].device
    return all(
        tensor.device != device or not tensor.numel() or tensor.untyped_storage().data_ptr() in known
        for module in model.modules()
        for tensor in unregistered_tensors(module)
    )


def unregistered_tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the tensors among a module's attributes that are no parameters or buffers of it or its children."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules", "kv_cache"):
            yield from _tensors_in(value)


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors of an attribute: in containers, and in vLLM's helper objects that are no modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | set):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth)
    elif depth and not isinstance(value, type | torch.nn.Module) and type(value).__module__.startswith("vllm."):
        for name, item in getattr(value, "__dict__", {}).items():
            if name != "kv_cache":
                yield from _tensors_in(item, depth - 1)


class TokenRecorder:
    """Arrays of the requests that have not been taken, by request: a row for each token, `fill` where nothing was
    recorded. A token that is computed again (preemption, new weights) is recorded again."""

    def __init__(self, runner: Any, shape: tuple[int, ...], fill: Any, dtype: Any) -> None:
        """`runner`: vLLM's model runner. `shape`: shape of a request's array."""
        self._runner, self._empty = runner, partial(np.full, shape, fill, dtype=dtype)
        self.records: dict[str, np.ndarray] = {}

    def keep(self, layer: int, values: np.ndarray) -> None:
        """Record a layer's values of a forward pass, a row for each of its tokens."""
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        for index, request in enumerate(batch.req_ids):
            first, rows = int(batch.num_computed_tokens_cpu[index]), values[starts[index] : starts[index + 1]]
            if request not in self.records:
                self.records[request] = self._empty()
            self.records[request][first : first + len(rows), layer] = rows


def record_routes(worker: Any) -> None:
    """Record the experts of all tokens from now on: int16 [context, layers, experts of a token], -1 in layers without
    experts."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runner, config = worker.model_runner, worker.model_runner.model_config
    shape = (config.max_model_len, config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
    worker.route_recorder = recorder = TokenRecorder(runner, shape, -1, np.int16)

    def capture(layer: int, chosen: Tensor) -> None:
        recorder.keep(layer, chosen.to("cpu", torch.int16).numpy())

    for module in runner.model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(capture, module.layer_id))


def record_layers(worker: Any, direction: Tensor) -> bool:
    """Record what comes out of each layer from now on, float64 [context, layers, 2]: the norm of the hidden state, and
    its product with `direction`, [hidden size]. Return whether vLLM's model has its layers in one list; if not, nothing
    is recorded."""
    runner, config = worker.model_runner, worker.model_runner.model_config
    count = config.get_total_num_hidden_layers()
    lists = (module for module in runner.model.modules() if isinstance(module, torch.nn.ModuleList))
    layers = next((modules for modules in lists if len(modules) == count), None)
    if layers is None:
        return False
    worker.layer_recorder = recorder = TokenRecorder(runner, (config.max_model_len, count, 2), np.nan, np.float64)

    def keep(layer: int, _module: Any, _inputs: Any, output: Any) -> None:
        hidden, residual = output if isinstance(output, tuple) else (output, None)
        hidden = (hidden if residual is None else hidden + residual).double()
        recorder.keep(layer, torch.stack([hidden.norm(dim=1), hidden @ direction.to(hidden)], dim=1).cpu().numpy())

    for layer, module in enumerate(layers):
        module.register_forward_hook(partial(keep, layer))
    return True


def take_records(worker: Any, recorder: str, requests: Sequence[str]) -> list[np.ndarray | None]:
    """Return and forget the records of each request, None if it has none. `recorder`: "route_recorder" or
    "layer_recorder". Only the first rank returns them: all ranks have the same."""
    records = [getattr(worker, recorder).records.pop(request, None) for request in requests]
    return records if worker.rank == 0 else []
