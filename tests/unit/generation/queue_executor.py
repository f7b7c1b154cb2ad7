"""vLLM's engine as GPUs run it, without a GPU: asynchronous scheduling over a queue of two batches.

`engine` starts our Engine over vLLM's own engine core, whose executor is a `QueueExecutor`: it computes no model. A
token tells the weights that computed it, and its log-prob tells the oldest weights whose keys and values it read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from grpo_mcore.generation import Engine, EngineConfig
from grpo_mcore.generation.worker_calls import has_only_registered_tensors, refit_step

FIRST_TOKEN = 20
"""Token of weight version 0; that of version n is n further."""
BLOCK = 4
"""Tokens of a cache block."""
LOST = -1
"""Version of weights that are dropped, or partly replaced."""


@dataclass
class _Request:
    prompt: int
    blocks: list[int]
    generated: int = 0


@dataclass
class _Weights:
    """What the calls of a refit do to a version number."""

    version: int = 0
    before: int = 0
    coming: int = 0
    calls: list[str] = field(default_factory=list)
    in_place: bool = False

    def step(self, step: str, argument: Any) -> dict[str, Any]:
        self.calls.append(step)
        match step:
            case "start":
                self.coming, self.before = argument["version"], self.version
                self.in_place = bool(argument.get("in_place"))
                if self.in_place:
                    self.version = LOST
            case "finish":
                self.before, self.version = self.version, self.coming
            case "abort":
                self.version = self.before
        return {"digest": "plan", "in_place": self.in_place, "fallbacks": [], "dtype": "float32", "verify": "off",
                "busy": False, "seconds": 0.0, "sums": {}, "parameters": 1, "buckets": 1}  # fmt: skip


class _UnderWay(Future[Any]):
    """A batch's tokens. Until somebody asks for them its kernels may still read the weights."""

    def __init__(self, batches: set[Any]) -> None:
        super().__init__()
        self._batches = batches
        batches.add(self)

    def result(self, timeout: float | None = None) -> Any:
        self._batches.discard(self)
        return super().result(timeout)


class QueueExecutor(Executor):
    """Computes a batch when it is launched, and hands its tokens over when they are asked for, as a GPU's stream."""

    supports_pp = True

    def _init_executor(self) -> None:
        # vLLM's CPU platform turns this off; the scheduler and the queue are made after the executor.
        self.scheduler_config.async_scheduling = True
        self.weights = _Weights()
        self.asleep = False
        self.levels: list[int] = []  # of the sleeps
        self.only_registered_tensors = True
        self.threads: set[int] = set()  # that have called this executor
        self.under_way: set[Any] = set()
        self.launched = 0
        self._requests: dict[str, _Request] = {}
        self._written: dict[int, list[int]] = {}  # weight version of each slot of a cache block
        self._batch: ModelRunnerOutput | None = None

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        self.threads.add(threading.get_ident())
        if method is refit_step:
            assert args[0] == "wait" or not self.under_way, f"{args[0]} of a refit while a batch reads the weights"
            return [self.weights.step(*args)]
        if method is has_only_registered_tensors:
            return [self.only_registered_tensors]
        assert isinstance(method, str), f"{method} has no answer here"
        answers: dict[str, Callable[[], Any]] = {
            "get_kv_cache_spec": lambda: {
                "layer": FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
            },
            "get_supported_kv_cache_layouts": lambda: ["NHD"],
            "determine_available_memory": lambda: 2**20,
            "compile_or_warm_up_model": lambda: SimpleNamespace(language_model=0.0, encoder=0.0),
            "get_supported_tasks": lambda: ("generate",),
            "sleep": lambda: self._sleep(True, **(kwargs or {})),
            "wake_up": lambda: self._sleep("kv_cache" not in (kwargs or {}).get("tags", ["kv_cache"])),
        }
        return [answers.get(method, lambda: None)()]

    def _sleep(self, asleep: bool, level: int = 1) -> None:
        self.asleep = asleep
        if asleep:
            self.levels.append(level)
            if level == 2:
                self.weights.version = LOST
        self._written.clear()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        assert not self.asleep, "a batch was launched on an engine that sleeps"
        assert self.weights.version != LOST, "a batch was launched without weights"
        self.threads.add(threading.get_ident())
        for request in scheduler_output.finished_req_ids:
            self._requests.pop(request, None)
        starts: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            tokens, prompt = new.prefill_token_ids or new.prompt_token_ids, len(new.prompt_token_ids)
            self._requests[new.req_id] = _Request(prompt, list(new.block_ids[0]), len(tokens) - prompt)
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for index, key in enumerate(cached.req_ids):
            known, blocks = self._requests[key], cached.new_block_ids[index]
            if key in cached.resumed_req_ids:
                known.blocks, known.generated = [], cached.num_output_tokens[index]
            known.blocks += blocks[0] if blocks else []
            starts[key] = cached.num_computed_tokens[index]
        keys = [key for key in starts if key in scheduler_output.num_scheduled_tokens]
        rows = [self._compute(self._requests[key], starts[key], scheduler_output.num_scheduled_tokens[key])
                for key in keys]  # fmt: skip
        tokens = np.array([[FIRST_TOKEN + self.weights.version] for _ in rows], dtype=np.int64).reshape(-1, 1)
        self._batch = ModelRunnerOutput(
            req_ids=keys,
            req_id_to_index={key: index for index, key in enumerate(keys)},
            sampled_token_ids=[
                [int(token)] if row is not None else [] for row, (token,) in zip(rows, tokens, strict=True)
            ],
            logprobs=LogprobsLists(
                tokens,
                np.array([-float(row or 0) for row in rows], dtype=np.float32).reshape(-1, 1),
                np.ones(len(rows), dtype=np.int64),
            ),
        )
        self.launched += bool(rows)
        return self._answer(None if rows else self._batch, non_block)

    def _compute(self, request: _Request, start: int, count: int) -> int | None:
        """Write the keys and values of `count` tokens. Returns the oldest version that the last one read, or None if
        more of the prompt is to come."""
        slots = [divmod(position, BLOCK) for position in range(start + count)]
        for block, slot in slots[start:]:
            self._written.setdefault(request.blocks[block], [0] * BLOCK)[slot] = self.weights.version
        if start + count < request.prompt + request.generated:
            return None
        request.generated += 1
        return min(self._written[request.blocks[block]][slot] for block, slot in slots)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        batch, self._batch = self._batch, None
        return self._answer(batch, non_block)

    def _answer(self, value: Any, non_block: bool) -> Any:
        if not non_block:
            return value
        future = _UnderWay(self.under_way) if value is not None and value.req_ids else Future[Any]()
        future.set_result(value)
        return future

    def check_health(self) -> None:
        self.threads.add(threading.get_ident())
        assert not self.asleep

    def shutdown(self) -> None:
        self._requests.clear()


class SecondRunnerExecutor(QueueExecutor):
    """Has the scheduler work for vLLM's second model runner, whose check for Triton came before the executor."""

    def _init_executor(self) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        super()._init_executor()


def engine(folder: Path, executor: type[QueueExecutor] = QueueExecutor, **options: Any) -> Engine:
    """Start an engine over `executor`. `folder`: a tiny model, of which only configuration and tokenizer count."""
    kwargs = {"distributed_executor_backend": executor, "enable_sleep_mode": False, "block_size": BLOCK}
    settings: dict[str, Any] = {"platform": "gpu", "sleep_between_phases": True, "max_model_len": 64}
    settings |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_gb": 0.001}
    return Engine(EngineConfig(str(folder), **settings | options, vllm_kwargs=kwargs))
