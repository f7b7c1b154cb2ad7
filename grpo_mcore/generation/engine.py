"""One vLLM engine: generates samples and hands each over as it finishes; takes new weights from a refit."""

import itertools
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.families import ENGINE_ADAPTER
from grpo_mcore.generation.chat.engine_chat import EngineChat, Reply
from grpo_mcore.generation.config import EngineConfig, engine_arguments, set_engine_environment
from grpo_mcore.generation.cpu_kernels import import_vllm_without_compiler
from grpo_mcore.generation.engine_images import EngineImages, Rendered, prompt_with_images
from grpo_mcore.generation.engine_lock import EngineLock
from grpo_mcore.generation.engine_nodes import Lifeline, await_followers, bind_vllm_to, deaths
from grpo_mcore.generation.shared_steps import Caller, SharedSteps
from grpo_mcore.generation.worker_calls import (
    divide_logits,
    has_only_registered_tensors,
    make_stage_inputs,
    record_layers,
    record_routes,
    refit_step,
    start_profile,
    stop_profile,
    take_records,
    unlink_answer_queue,
    unlink_queue,
    unlink_shared_segments,
)
from grpo_mcore.rollout.images import images_of
from grpo_mcore.rollout.text_tokens import special_tokens
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn

REFIT_TIMEOUT_S = 600.0
POLL_S = 0.004
LOSS_REPORT_S = 3.0
"""Seconds to wait for another node's report of a dead rank, after its absence has already caused an error here."""


class EngineError(RuntimeError):
    """An engine cannot do what it was asked for; the message names the engine."""


@dataclass(eq=False)
class _OpenStream:
    """A stream of samples under way. `requests`, `engine_ids` (vLLM's): of the unfinished ones, by request id."""

    caller: Caller = field(default_factory=Caller)
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    engine_ids: dict[str, str] = field(default_factory=dict)


class Engine:
    """One engine with its tensor-parallel ranks, in process or as a Ray actor. If it spans several nodes, an
    EngineFollower runs the ranks on each further node. Several threads may call it: each `generate` gets its own
    samples, and a refit or `health` runs between two steps of generation.

    `weight_version`: number of the last committed refit; 0: the weights it was started with; None: no valid weights
    (never filled, or half replaced by a failed refit), so it generates nothing.
    """

    def __init__(self, config: EngineConfig) -> None:
        started_at = time.perf_counter()
        self.config = config
        self.name = config.name
        self.weight_version: int | None = 0 if config.load_format == "auto" else None
        self._refit_open = False
        self._in_place = False  # the open refit replaces layers one by one
        self._can_go_back = True  # a commit of the open refit can be taken back
        self._half_replaced = False
        self._version_before: int | None = None  # before a commit that may still be taken back
        self._unreleased = False
        self._lock = EngineLock(REFIT_TIMEOUT_S)
        self._steps = SharedSteps(self._take_step, REFIT_TIMEOUT_S, lambda: self._lock.paused)
        self._callers = itertools.count()
        self._requests: dict[str, GenerationRequest] = {}  # unfinished ones by request id, of all callers
        self._streams: dict[str, _OpenStream] = {}  # those that others may join, by name
        self._layers: dict[tuple[str, int], Any] | None = None  # what came out of layers, by sample, if it is recorded
        self._asleep: list[str] = []  # vLLM's tags of the memory that was given away
        self._cache_number = 0  # of the prefix cache's contents; a request reuses only what has its own number
        self._others: list[Lifeline] = []  # the engine's other nodes
        self._lost: str | None = None  # what happened on one of them
        self._loss_reported = threading.Event()
        self._llm_engine: Any = None
        # vLLM starts and computes on this thread alone. CUDA's current stream and the work space of its libraries are a
        # thread's: each of the callers' threads would take its own, and launch its steps on another stream.
        self._device = ThreadPoolExecutor(1, f"{self.name}-device", initializer=torch.get_num_threads)  # sets OpenMP up
        self._device_thread: int = self._on_device(threading.get_ident)
        self._sleep_level: int | None = None
        set_engine_environment(config, os.environ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
            self._llm_engine = self._on_device(self._start)
        self._max_model_len: int = self._llm_engine.model_config.max_model_len
        reader = images_of(config.model) if config.images else None
        self._images = None if reader is None else EngineImages(self._llm_engine.renderer, reader)
        if self.weight_version is not None:
            self._llm_engine.set_weight_version(str(self.weight_version))
        self._chat: EngineChat | None = None
        if config.chat is not None:
            self._chat = EngineChat(
                config.chat,
                self._llm_engine.get_tokenizer(),
                self.generate,
                max_model_len=self._max_model_len,
                vocab_size=self._llm_engine.model_config.get_vocab_size(),
                images=reader,
            )
        # Of several ranks; a single one lives in this process.
        self._ranks = [rank.proc for rank in getattr(self._llm_engine.model_executor, "workers", ())]
        self.start_seconds = time.perf_counter() - started_at

    def _on_device(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call vLLM on the engine's own thread, and wait."""
        return self._device.submit(call, *args, **kwargs).result()

    def _start(self) -> Any:
        port = 0
        if self.config.node.count > 1:
            bind_vllm_to(self.config.node.address)
            self._others, port = await_followers(self.config, self._node_lost)
            for other in self._others:
                other.watch()
        if self.config.platform == "cpu":
            import_vllm_without_compiler()
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from grpo_mcore.generation.engine_tokenizer import register_tokenizer

        register_tokenizer()
        arguments = EngineArgs(**engine_arguments(self.config, port))
        with self._rank_deaths():
            engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        engine.get_supported_tasks()  # the first request would ask the ranks, on its caller's thread
        # Ray kills Python's resource tracker with a killed engine, which else would remove these names.
        unlink_queue(getattr(engine.model_executor, "rpc_broadcast_mq", None))
        if self.config.ranks > 1:
            engine.collective_rpc(unlink_answer_queue)
        if self.config.platform == "cpu" and self.config.ranks > 1:
            engine.collective_rpc(unlink_shared_segments)
            engine.collective_rpc(make_stage_inputs)
        if self._records_routes:
            engine.collective_rpc(record_routes)
        temperature = self.config.logit_temperature
        if temperature != 1.0 and not any(engine.collective_rpc(divide_logits, args=(temperature,))):
            raise EngineError(f"{self.name}: vLLM's model has no place where its logits could get a temperature")
        return engine

    def generate(self, requests: list[GenerationRequest], sampling: Sampling) -> Iterator[Trajectory]:
        """Yield each sample as it finishes, in any order. A caller that stops early aborts its other samples.

        Raises EngineError if there are no valid weights, ValueError if a prompt exceeds the context.
        """
        for samples in self.generate_together(requests, sampling):
            yield from samples

    def generate_together(
        self, requests: list[GenerationRequest], sampling: Sampling, name: str | None = None
    ) -> Iterator[list[Trajectory]]:
        """Generate as `generate` does, and yield the samples that have finished since the last time: those of a step,
        mostly. Until it has ended, `join` adds requests to the stream `name`."""
        from grpo_mcore.generation.samples import to_trajectory

        tokenizer = self._llm_engine.get_tokenizer()
        with closing(self._finished(requests, sampling, name)) as steps:
            for finished in steps:
                samples = []
                for engine_id, request, output in finished:
                    if self._records_routes:
                        output.outputs[0].routed_experts = self._take("route_recorder", [engine_id])[0]
                    if self._layers is not None:
                        record = self._take("layer_recorder", [engine_id])[0]
                        self._layers[request.uid, request.generation_index] = record
                    unreadable = self._images.unreadable if self._images else frozenset[str]()
                    samples.append(to_trajectory(request, output, tokenizer, unreadable))
                yield samples

    def score_tokens(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the log-prob of each token of the sequences, int64 [n] each, given the tokens before it: float32 [n],
        0 for the first. The distribution is the whole one, at the temperature `config.logit_temperature`. Raises as
        `generate`."""
        from grpo_mcore.generation.samples import prompt_logprobs

        scores = [torch.zeros(len(tokens), dtype=torch.float32) for tokens in sequences]
        requests = [
            GenerationRequest(str(index), 0, (Turn("user", tokens),), seed=0)
            for index, tokens in enumerate(sequences)
            if len(tokens) > 1
        ]
        # vLLM scores a prompt as it reads it; the token that it says then is not looked at.
        sampling = Sampling(max_new_tokens=1, temperature=0.0, scores_prompt=True)
        with closing(self._finished(requests, sampling)) as steps:
            for finished in steps:
                for _, request, output in finished:
                    scores[int(request.uid)][1:] = prompt_logprobs(output)
        return scores

    def _finished(
        self, requests: list[GenerationRequest], sampling: Sampling, name: str | None = None
    ) -> Generator[list[tuple[str, GenerationRequest, Any]], None, None]:
        """Yield what has finished since the last time: vLLM's id of the request, the request, and vLLM's output. `name`
        as in `generate_together`. Unfinished requests are aborted at the end."""
        stream = _OpenStream()
        if name is not None:
            self._streams[name] = stream
        try:
            self._add(stream, requests, sampling)
            while outputs := self._steps.next(stream.caller):
                finished = []
                for output in outputs:
                    key = output.request_id
                    finished.append((stream.engine_ids.pop(key), stream.requests.pop(key), output))
                    del self._requests[key]
                yield finished
        finally:
            if name is not None:
                del self._streams[name]
            self._steps.close(stream.caller)
            forget = partial(self._forget, stream)
            if threading.get_ident() == self._device_thread:
                # The garbage collector ends a stream that its caller has dropped, and it runs inside a call of vLLM:
                # whoever waits for that call has the lock.
                threading.Thread(target=forget, daemon=True).start()
            else:
                forget()

    def join(self, name: str, requests: list[GenerationRequest], sampling: Sampling) -> bool:
        """Add requests to a stream of `generate_together`. Return False if it has ended; raises what that does. In both
        cases none of them is generated."""
        if (stream := self._streams.get(name)) is None:
            return False
        with self._steps.held_open(stream.caller) as is_open:
            return is_open and self._add(stream, requests, sampling)

    def _add(self, stream: _OpenStream, requests: list[GenerationRequest], sampling: Sampling) -> bool:
        """Add requests to a stream between two steps of generation: all or, where it raises or returns False as the
        stream has ended, none."""
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest

        from grpo_mcore.generation.samples import sampling_params

        number, room = next(self._callers), self._max_model_len
        by_key = {f"{number}-{index}": request for index, request in enumerate(requests)}
        images = {key: self._rendered(request) for key, request in by_key.items()}
        special = special_tokens(self._llm_engine.get_tokenizer())
        params = {key: sampling_params(request, sampling, room, special) for key, request in by_key.items()}
        tokens = {key: request.token_ids().tolist() for key, request in by_key.items()}
        with self._lock.call():
            self._refuse_to_generate()
            if stream.caller.closed:
                return False
            # Before the first refit there are no adapters. The path is not read: the refit has registered them.
            adapted = self.config.adapter_rank is not None and bool(self.weight_version)
            adapter = LoRARequest("policy", ENGINE_ADAPTER, "from a refit") if adapted else None
            self._requests |= by_key
            try:
                for key, request in by_key.items():
                    salt = str(self._cache_number)
                    if images[key]:
                        prompt = prompt_with_images(tokens[key], images[key], salt)
                    else:
                        prompt = tokens_input(tokens[key], cache_salt=salt)
                    engine_id = self._llm_engine.add_request(key, prompt, params[key], lora_request=adapter)
                    stream.engine_ids[key], stream.requests[key] = engine_id, request
                    self._steps.add(stream.caller, key, engine_id)
            except BaseException:
                self._forget(stream, list(by_key))
                raise
        return True

    def _rendered(self, request: GenerationRequest) -> list[Rendered]:
        """Return the images of a request in vLLM's form. Raises ValueError where this engine has none."""
        if not (spans := request.image_spans()):
            return []
        if self._images is None:
            raise ValueError(f"{self.name} reads no images, and a prompt has some: the recipe did not announce them")
        return self._images.rendered(spans, request.images)

    def _forget(self, stream: _OpenStream, only: Collection[str] | None = None) -> None:
        """Abort the unfinished ones of a stream's requests `only`, and forget all of `only`; None: all requests of a
        stream that has ended."""
        with self._lock.call():
            keys = list(stream.requests if only is None else only)
            unfinished = self._steps.give_up(keys)
            if unfinished and self._llm_engine is not None:
                self._llm_engine.abort_request(unfinished, internal=True)
            engine_ids = [stream.engine_ids.pop(key) for key in keys if key in stream.engine_ids]
            if engine_ids and self._llm_engine is not None:  # nobody asks for their records any more
                if self._records_routes:
                    self._take("route_recorder", engine_ids)
                if self._layers is not None:
                    self._take("layer_recorder", engine_ids)
            for key in keys:
                stream.requests.pop(key, None)
                self._requests.pop(key, None)

    @property
    def _records_routes(self) -> bool:
        """Return whether our own recorder records experts; on GPU vLLM returns them with a sample."""
        return self.config.record_routes and self.config.platform == "cpu"

    def _take(self, recorder: str, requests: list[str]) -> list[Any]:
        """Return what was recorded for vLLM's requests with these ids; the ranks forget it."""
        with self._lock.call(), self._rank_deaths():
            return self._on_device(self._llm_engine.collective_rpc, take_records, args=(recorder, requests))[0]

    def record_layers(self, direction: torch.Tensor) -> bool:
        """Record what comes out of each layer: see `layer_traces`. `direction`: float64 [hidden size]. On CPU, without
        prefix caching and on one rank. Return whether the layers of vLLM's model can be told apart."""
        with self._lock.call(), self._rank_deaths():
            recorded = all(self._on_device(self._llm_engine.collective_rpc, record_layers, args=(direction,)))
        self._layers = {} if recorded else None
        return recorded

    def layer_traces(self) -> dict[tuple[str, int], Any]:
        """Return float64 [tokens, layers, 2] by (uid, generation index) of the samples that have finished since
        `record_layers`, and forget them: norm of the hidden state after the layer, and product with the direction. NaN
        where a token was not computed, as the last one of a sample."""
        traces, self._layers = self._layers or {}, {}
        return traces

    def give_up(self, uids: Collection[str]) -> None:
        """Abort the unfinished samples of these prompts. Their callers get only the others."""
        with self._lock.call():
            unwanted = [key for key, request in list(self._requests.items()) if request.uid in uids]
            if unfinished := self._steps.give_up(unwanted):
                self._llm_engine.abort_request(unfinished, internal=True)

    def chat(self, kind: str, body: Any, seed: int = 0) -> Iterator[Reply]:
        """Answer a request of the endpoint, as a stream of one item. `kind`: complete or tokenize."""
        if self._chat is None:
            raise EngineError(f"{self.name} serves no endpoint")
        try:
            reply = self._chat.answer(kind, body, seed)
        except EngineError as error:  # asleep, or in a refit: an agent that was given up may still ask
            reply = Reply(503, {"error": {"message": str(error), "type": "ServiceUnavailableError", "code": 503}})
        yield reply

    def _refuse_to_generate(self) -> None:
        """Raise EngineError if this engine cannot take a request now."""
        if self._lock.paused:
            return  # the request waits until the pause is over
        if self.weight_version is None:
            raise EngineError(f"{self.name} holds weights of no version: it generates after the next refit")
        if self._asleep:
            raise EngineError(f"{self.name} cannot generate: it is asleep")

    def _take_step(self, deliver: Callable[[Iterable[Any]], None]) -> None:
        with self._lock.step():
            if self._llm_engine is None:
                raise EngineError(f"{self.name} was shut down while it generated")
            with self._rank_deaths():
                outputs = self._on_device(self._llm_engine.step)
            deliver(output for output in outputs if output.finished)

    def _drain(self) -> None:
        """Finish the batches under way, without scheduling another.

        On GPU (and under pipeline parallelism) vLLM keeps a queue of batches, so one may be under way between two
        steps. Its tokens carry the version that is current when it ends, which must be that of the weights it began
        with. It also holds cache blocks, even after its requests have ended.
        """
        core = self._llm_engine.engine_core.engine_core
        if not core.batch_queue:
            return
        with self._rank_deaths():
            self._on_device(self._llm_engine.sleep, level=0, mode="keep")  # pauses the scheduler and nothing else
            try:
                while core.batch_queue:
                    outputs = self._on_device(self._llm_engine.step)
                    self._steps.deliver(output for output in outputs if output.finished)
            finally:
                self._on_device(self._llm_engine.wake_up, ["scheduling"])

    def start_refit(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Open a refit; abort an open one first. The ranks then take the buckets by themselves, as they are filled,
        while other threads generate. `manifest`: digest of the plan, version, verify, `parts` and `seats` of each rank,
        `transports` (one for each node of the engine).

        Returns {digest of the plan as every rank read it, version: the current one, dtype, in_place, verify: "full" in
        the first refit that samples}. `in_place`: there is no memory to stage in, and generation pauses until the
        refit's end.
        """
        with self._lock.call():  # no request may come between the ranks' answers and the decision about them
            self.abort_refit()
            if "weights" in self._asleep:
                self._on_device(self._llm_engine.wake_up, ["weights"])
                self._asleep.remove("weights")
            self._drain()  # a refit in place writes over the weights that a batch reads
            self._refit_open = True
            names = ("parts", "seats", "transports", "version", "verify", "in_place")
            settings = {name: manifest[name] for name in names if name in manifest} | {"kept": self.config.kept}
            self._lock.hold(True)
            reports = self._refit_step("start", settings | {"engine": self.name})
            if (digests := {report["digest"] for report in reports}) != {manifest["digest"]}:
                self.abort_refit()
                raise EngineError(f"{self.name}: ranks read plan {manifest['digest'][:12]} as {sorted(digests)}")
            self._in_place = any(report["in_place"] for report in reports)
            self._can_go_back = not self._in_place and not reports[0]["fallbacks"]
            self._lock.hold(self._in_place)  # where the ranks replace layers, until the end
        answer = {name: reports[0][name] for name in ("dtype", "verify")}
        return answer | {"digest": manifest["digest"], "version": self.weight_version, "in_place": self._in_place}

    def stage_refit(self) -> dict[str, Any]:
        """Wait until the ranks have taken all buckets. Returns {seconds (of the slowest, without waiting), sums: by
        rank, of the checked copies}. Their own waiting has the refit's deadline."""
        if not self._refit_open:
            raise EngineError(f"{self.name}: nothing to stage, no refit is open")
        started_at, reports = time.monotonic(), self._refit_step("wait")
        while any(report["busy"] for report in reports):
            # Each look takes time from the threads that copy: one in a long refit may come a little later.
            time.sleep(max(POLL_S, (time.monotonic() - started_at) / 32))
            reports = self._refit_step("wait")
        sums = {f"{self.name} rank {rank}": report["sums"] for rank, report in enumerate(reports)}
        return {"seconds": max(report["seconds"] for report in reports), "sums": sums}

    def commit_refit(self, version: int, recompute_kv: bool = False) -> dict[str, Any]:
        """Switch to the staged weights as weight version `version`. Generation then pauses until `finish_refit`, or
        until `abort_refit` restores the old weights. Open requests continue with the new weights.

        `recompute_kv`: recompute their keys and values with the new weights. Returns {version, parameters (on a rank),
        fallbacks (tensors that vLLM's own loading placed), quantized (digests of quantised layers, by rank), seconds}.
        """
        if not self._refit_open:
            raise EngineError(f"{self.name}: weight version {version} cannot be committed, no refit is open")
        started_at = time.perf_counter()
        with self._lock.call():
            self._drain()
            self._lock.hold(True)
            self._half_replaced = not self._can_go_back
            reports = self._refit_step("finish")
            report = reports[0]
            self._refit_open, self._unreleased = False, True
            self._version_before, self.weight_version = self.weight_version, None
            self._forget_cache(recompute_kv)
            self._llm_engine.set_weight_version(str(version))
            self.weight_version = version
        answer = {name: report[name] for name in ("parameters", "fallbacks")}
        answer["quantized"] = [rank["quantized"] for rank in reports]
        return answer | {"version": version, "seconds": time.perf_counter() - started_at}

    def _forget_cache(self, recompute_kv: bool) -> None:
        """Clear the prefix cache: keys and values of the old weights must not serve new prompts.

        vLLM clears nothing while requests hold blocks. The new number of the cache keeps later requests from using what
        stays in it.
        """
        self._cache_number += 1
        in_flight = self._llm_engine.get_num_unfinished_requests()
        recompute = recompute_kv and in_flight > 0
        cleared = self._on_device(self._llm_engine.reset_prefix_cache, reset_running_requests=recompute)
        if not cleared and not in_flight:
            raise EngineError(f"{self.name}: the prefix cache of the old weights could not be cleared")

    def finish_refit(self) -> None:
        """Free the old weights and resume generation, after every engine has committed. No-op if nothing is open."""
        if not self._unreleased:
            return
        self._unreleased = self._half_replaced = False
        self._refit_step("release")
        self._lock.hold(False)

    def abort_refit(self) -> None:
        """Close an open refit and keep, or restore, the old weights. No-op if none is open.

        If layers were replaced one by one, the old weights are gone: the engine generates nothing until a refit
        succeeds, open requests included.
        """
        if not self._refit_open and not self._unreleased:
            return
        if self._unreleased:
            self.weight_version = self._version_before
        was_committed, half_replaced = self._unreleased, self._half_replaced
        self._refit_open = self._half_replaced = self._unreleased = False
        try:
            reports = self._refit_step("abort")
            if half_replaced or (self._in_place and any(report["buckets"] for report in reports)):
                self.weight_version = None
            if was_committed:
                self._forget_cache(recompute_kv=True)
                self._llm_engine.set_weight_version(str(self.weight_version or 0))
        finally:
            self._lock.hold(self.weight_version is None)

    def _refit_step(self, step: str, argument: Any = None) -> list[dict[str, Any]]:
        """Run one step of a refit on every rank. Raises EngineError with the first rank's error."""
        with self._lock.call(), self._rank_deaths():
            reports = self._on_device(self._llm_engine.collective_rpc, refit_step, args=(step, argument))
        for rank, report in enumerate(reports):
            if "error" in report:
                where = f"{self.name} rank {rank}" if len(reports) > 1 else self.name
                error = EngineError(f"{where}: {report['error']}")
                error.add_note(report["traceback"])
                raise error
        return reports

    def prepare(self, version: int) -> None:
        """Get ready to generate with weight version `version`. Raises EngineError if the engine holds another."""
        if self.weight_version != version:
            raise EngineError(f"{self.name} holds weight version {self.weight_version}, not {version}")
        self.finish_refit()  # whoever asks for this version has committed it
        with self._lock.call():
            if self._asleep:
                self._on_device(self._llm_engine.wake_up, self._asleep)
                self._asleep = []
            self._steps.resumed()
            self._lock.pause(False)

    def release(self, pause: bool = False, keep_weights: bool = True) -> None:
        """Free memory for training: an engine that sleeps drops its KV cache and moves its weights to the host.

        `pause`: generation pauses until `prepare` and then continues; keys and values that were dropped are computed
        again. Without `pause`, raises EngineError if the engine is generating. `keep_weights` False: a refit comes
        before `prepare`, so the weights are dropped too, if the refit replaces all that they consist of.
        """
        with self._lock.call():
            self._drain()
            self._lock.pause(pause)
            if not self.config.sleep_between_phases or self._asleep:
                return
            if self._steps.generating and not pause:
                raise EngineError(f"{self.name} cannot give its memory away while it generates")
            if pause:
                self._forget_cache(recompute_kv=True)
            level = 1 if keep_weights else self._level_without_weights()
            self._on_device(self._llm_engine.sleep, level=level, mode="keep" if pause else "abort")
            if level == 2:
                self.weight_version = None
            self._asleep = ["weights", "kv_cache"]

    def _level_without_weights(self) -> int:
        """Return vLLM's level of a sleep after which a refit brings the weights: 2, which drops them, or 1, which
        copies them to the host and back, where the model has tensors that neither refit nor wake-up would restore: a
        frozen tower among them."""
        if self._sleep_level is None:
            fills_all = self.config.adapter_rank is None and not self.config.kept
            only = fills_all and all(self._on_device(self._llm_engine.collective_rpc, has_only_registered_tensors))
            self._sleep_level = 2 if only else 1
        return self._sleep_level

    def health(self) -> dict[str, Any]:
        """Return {name, weight_version, requests (unfinished), state, pid}. Raises if a rank does not answer."""
        with self._lock.call(), self._rank_deaths():
            self._on_device(self._llm_engine.model_executor.check_health)
        state = "refit" if self._refit_open else "asleep" if self._asleep else "ready"
        return {
            "name": self.name,
            "weight_version": self.weight_version,
            "requests": self._llm_engine.get_num_unfinished_requests(),
            "state": "unfilled" if self.weight_version is None and state == "ready" else state,
            "pid": os.getpid(),
        }

    def start_profile(self) -> None:
        """Start torch's profiler on every rank."""
        with self._lock.call(), self._rank_deaths():
            self._on_device(self._llm_engine.collective_rpc, start_profile)

    def stop_profile(self, folder: Path) -> None:
        """End the profiler, and write the traces to `folder`/NAME-RANK.json. No-op on a rank that has none."""
        with self._lock.call(), self._rank_deaths():
            self._on_device(self._llm_engine.collective_rpc, stop_profile, args=(str(folder / self.name),))

    def shutdown(self) -> None:
        """End the ranks' processes and free the memory. Idempotent.

        vLLM also destroys the default torch.distributed group of this process: in process, shut the policy
        down first.
        """
        with self._lock.call():
            engine, self._llm_engine = getattr(self, "_llm_engine", None), None
            self._lock.pause(False)
            self._lock.hold(False)  # whoever waits for a refit learns that there will be none
            if engine is not None:
                for other in self._others:
                    other.close()
                self._on_device(engine.engine_core.shutdown)
                multiprocessing.active_children()  # reaps the ranks
            self._device.shutdown(wait=False)

    @contextmanager
    def _rank_deaths(self) -> Iterator[None]:
        """Replace vLLM's error, which says only "cancelled" when one of its processes died, by what happened."""
        try:
            yield
        except Exception as error:
            executor = getattr(self._llm_engine, "model_executor", None)
            expects_report = bool(self._others) and not getattr(executor, "is_failed", False)
            if self._loss_reported.wait(LOSS_REPORT_S if expects_report else 0.0):
                raise EngineError(f"{self.name}: {self._lost}") from error
            if getattr(executor, "is_failed", False):
                gone = {rank: process.exitcode for rank, process in enumerate(self._ranks)}
                raise EngineError(f"{self.name}: {deaths(gone, self.config.ranks)}") from error
            raise

    def _node_lost(self, reason: str) -> None:
        """Shut down as vLLM does when it loses a local rank. Called by the thread that watches another node."""
        self._lost = self._lost or reason
        self._loss_reported.set()
        if (engine := self._llm_engine) is not None:
            engine.model_executor.is_failed = True
            engine.model_executor.shutdown()
