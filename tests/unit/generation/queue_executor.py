"""vLLM's engine as GPUs run it, without a GPU: asynchronous scheduling over a queue of two batches.

`engine` starts our Engine over vLLM's own engine core, whose executor is a `QueueExecutor`: it computes no model. Its
weights are real: a refit brings them as bytes from a policy rank. All elements have one value, which no other refit
brings. A token tells the weights that computed it, and its log-prob the oldest weights whose keys and values it read.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from grpo_mcore.families import params_of, read_hf_config, shape_of
from grpo_mcore.generation import Engine, EngineConfig
from grpo_mcore.generation.worker_calls import refit_step
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.engine_side.vllm_backend import RefitWeightEngine
from grpo_mcore.refit.plan.plan import RefitPlan, plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from tests.unit.refit.shards import Answer, ShardedModel

FIRST_TOKEN = 20
"""Token of weights of the value 0; that of the value n is n further."""
BLOCK = 4
"""Tokens of a cache block."""
BUFFER_BYTES = 1 << 14
"""Takes a part of the largest parameter at a time: weights are of two versions while a refit in place is under way."""
LOST = -1
"""Value of weights that are dropped, or partly replaced."""


@dataclass
class _Request:
    prompt: int
    blocks: list[int]
    generated: int = 0


class Policy:
    """A policy rank, as a refit's driver calls it. `values`: that of its weights in the last refit to each version."""

    name = "policy-0"

    def __init__(self, folder: str) -> None:
        shape = shape_of(read_hf_config(folder))
        params = [param for param in params_of(shape) if param.megatron.endswith(("_layernorm.weight", "fc2.weight"))]
        self.plan = plan_refit(
            params, shape, PolicyLayout(), EngineLayout(), dtype="float32", buffer_bytes=BUFFER_BYTES
        )
        assert len(self.plan.buckets) > 2, "more than the buffer's halves"
        whole = {tensor.name: torch.zeros(tensor.shape) for param in params for tensor in param.hf}
        self._held = ShardedModel(whole, shape, 0, 1, params).held
        self.version, self.values = 0, {0: 0}
        self.sender = MortalSender(self, 0, run_id="queue")

    def train(self, version: int) -> None:
        """Have other weights than ever before, for a refit to `version`."""
        self.version, self.values[version] = version, 1 + max(self.values.values())
        for tensor in self._held.values():
            tensor.fill_(self.values[version])

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._held

    def call(self, method: str, *args: Any, **_: Any) -> Answer:
        return Answer(getattr(self.sender, method), args)


class MortalSender(RefitSender):
    """Fails in bucket `fails_in`."""

    fails_in: int | None = None

    def fill_bucket(self, index: int, *checked: Any) -> dict[str, Any]:
        if index == self.fails_in:
            raise RuntimeError("out of luck")
        return super().fill_bucket(index, *checked)


class _Backend(RefitWeightEngine):
    """The receiver of an engine with one rank, for which no process group is made."""

    _engine_rank, _engine_ranks = 0, 1  # type: ignore[assignment]
    room = True  # for a second copy of the weights

    def _has_room(self, part: Any) -> bool:
        return self.room


class Rank(Worker):
    """vLLM's worker on GPU as far as a refit needs it. Its model has the plan's parameters, and no layers."""

    def __init__(self, vllm_config: Any, plan: RefitPlan) -> None:
        self.vllm_config, self.rank = vllm_config, 0
        self.model = torch.nn.Module()
        shapes: dict[str, list[int]] = {}
        for read in (read for block in plan.blocks() for read in block.reads):
            ends = [stop for _, stop in read.box]
            shapes[read.param] = list(map(max, ends, shapes.get(read.param, ends)))
        for path, shape in shapes.items():
            *modules, name = path.split(".")
            module = self.model
            for part in modules:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.model_runner: Any = SimpleNamespace(model=self.model, reset_lora_state=lambda: None)
        self.weight_transfer_engine: Any = _Backend(None, vllm_config, torch.device("cpu"), self.model)
        self._weight_update_active = self._weight_update_is_draft = False

    def value(self) -> int:
        """Return the value that all weights have; LOST if they have several."""
        values = {value.item() for weight in self.model.parameters() for value in weight.aminmax()}
        return int(values.pop()) if len(values) == 1 else LOST

    def lose_weights(self) -> None:
        for weight in self.model.parameters():
            weight.fill_(LOST)


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
        # The scheduler works for vLLM's second model runner, as on GPU; its check for Triton came before the executor.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        # vLLM's CPU platform turns this off; the scheduler and the queue are made after the executor.
        self.scheduler_config.async_scheduling = True
        self.policy = Policy(self.model_config.model)
        self.rank = Rank(self.vllm_config, self.policy.plan)
        self.asleep = False
        self.levels: list[int] = []  # of the sleeps
        self.threads: set[int] = set()  # that have called this executor
        self.under_way: set[Any] = set()
        self.launched = 0
        self._requests: dict[str, _Request] = {}
        self._written: dict[int, list[int]] = {}  # value of the weights that wrote each slot of a cache block
        self._batch: ModelRunnerOutput | None = None

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        self.threads.add(threading.get_ident())
        if method is refit_step:
            writes = args[0] in ("start", "finish") or self.rank.weight_transfer_engine._committed
            assert not (writes and self.under_way), f"{args[0]} of a refit while a batch reads the weights"
        if callable(method):
            return [method(self.rank, *args)]
        answers: dict[str, Callable[[], Any]] = {
            "get_kv_cache_spec": lambda: {
                "layer": FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
            },
            "get_supported_kv_cache_layouts": lambda: ["NHD"],
            "determine_available_memory": lambda: 2**18,  # 1,024 blocks; vLLM goes over all in each reset
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
                self.rank.lose_weights()
        self._written.clear()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        assert not self.asleep, "a batch was launched on an engine that sleeps"
        self._value = self.rank.value()
        assert self._value != LOST, "a batch was launched with weights of several versions, or of none"
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
        batch = [(self._requests[key], starts[key], scheduler_output.num_scheduled_tokens[key]) for key in keys]
        for row in batch:
            self._write(*row)
        rows = [self._read(*row) for row in batch]
        tokens = np.array([[FIRST_TOKEN + self._value] for _ in rows], dtype=np.int64).reshape(-1, 1)
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

    def _write(self, request: _Request, start: int, count: int) -> None:
        """Write the keys and values of `count` tokens. A model does so for a whole batch before it reads any: a request
        may share blocks with one of its own batch."""
        for block, slot in (divmod(position, BLOCK) for position in range(start, start + count)):
            self._written.setdefault(request.blocks[block], [0] * BLOCK)[slot] = self._value

    def _read(self, request: _Request, start: int, count: int) -> int | None:
        """Return the value of the oldest weights whose keys and values the last token reads, or None if more of the
        prompt is to come."""
        if start + count < request.prompt + request.generated:
            return None
        request.generated += 1
        slots = (divmod(position, BLOCK) for position in range(start + count))
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
        self.rank.weight_transfer_engine.shutdown()
        self.policy.sender.close_refit()


def engine(folder: Path, **options: Any) -> Engine:
    """Start an engine over a QueueExecutor. `folder`: a tiny model, whose configuration and tokenizer alone count."""
    kwargs = {"distributed_executor_backend": QueueExecutor, "enable_sleep_mode": False, "block_size": BLOCK}
    settings: dict[str, Any] = {"platform": "gpu", "sleep_between_phases": True, "max_model_len": 64}
    settings |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_gb": 0.001}
    return Engine(EngineConfig(str(folder), **settings | options, vllm_kwargs=kwargs))
