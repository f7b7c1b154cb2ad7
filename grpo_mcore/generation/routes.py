"""Which experts each token of a request went to, recorded by an engine on CPU.

On GPU vLLM records them itself; its recorder wants a model runner that its CPU build has not. Here the routers' own
hook is used: functions that run on a rank of an engine, with vLLM's worker as their first argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RouteRecorder:
    """The choices of every request that has not been taken: int16 [context, layers, experts of a token], -1 where a
    layer has no experts. A token that is computed again, after a preemption or with new weights, is recorded again."""

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's model runner."""
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self._runner, config = runner, runner.model_config
        self._shape = (config.max_model_len, config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
        self._found: dict[str, np.ndarray] = {}
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._capture, module.layer_id))

    def _capture(self, layer: int, chosen: Tensor) -> None:
        """chosen: int [tokens of the step, experts of a token]."""
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        values = chosen.to("cpu", torch.int16).numpy()
        for index, request in enumerate(batch.req_ids):
            first, rows = int(batch.num_computed_tokens_cpu[index]), values[starts[index] : starts[index + 1]]
            if request not in self._found:
                self._found[request] = np.full(self._shape, -1, dtype=np.int16)
            self._found[request][first : first + len(rows), layer] = rows

    def take(self, requests: Sequence[str]) -> list[np.ndarray | None]:
        """What was recorded of each request, None where nothing was; it is forgotten here."""
        return [self._found.pop(request, None) for request in requests]


def record_routes(worker: Any) -> None:
    """From now on."""
    worker.route_recorder = RouteRecorder(worker.model_runner)


def take_routes(worker: Any, requests: Sequence[str]) -> list[np.ndarray | None]:
    """Of the first rank; every rank has the same."""
    found = worker.route_recorder.take(requests)
    return found if worker.rank == 0 else []
