"""A modelled engine: continuous batching over a KV cache, sleep and wake, and refits, as the driver sees them.

All running samples gain a token in each step, and a step takes the longer the more samples run and the more tokens they
hold. Between two events (a request, an end, a full cache) nothing changes, so a whole stretch of steps is one wait.
"""

import heapq
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_mcore.cluster.virtual_cluster import Condition, sleep
from grpo_mcore.driver.engines.engine_group import with_trajectories
from grpo_mcore.generation import EngineConfig
from grpo_mcore.generation.engine import EngineError
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, TrajectoryRef, Turn
from grpo_mcore.rollout.workers import ObjectStore, Parcel, Ref, Rendezvous
from grpo_mcore.tools.rehearse.durations import SMALL_CALL_S
from grpo_mcore.tools.rehearse.world import END, ENGINE_CORES, Modelled, World

PARCELS = 32
"""Most samples that are handed over as one item."""
_IDS, _LOGPROBS = torch.full((1 << 20,), END), torch.zeros(1 << 20)


@dataclass(eq=False)
class _Stream:
    """A caller. `left` counts its samples that are not finished; `finished` are those that it has not taken."""

    left: int = 0
    finished: list[Trajectory] = field(default_factory=list)


@dataclass(eq=False)
class _Sample:
    """A sample under way. `context` is the tokens before this turn, `tokens` those that it will generate, `generated`
    those up to the engine's step `since`. `parts` has for all weights so far (version claimed, real version, tokens
    generated until they ended)."""

    request: GenerationRequest
    stream: _Stream
    context: int
    tokens: int
    truncated: bool
    generated: int = 0
    since: int = 0
    aborted: bool = False
    parts: list[tuple[int, int, int]] = field(default_factory=list)


class ModelledFollower(Modelled):
    """The part of an engine on one of its further nodes."""

    def __init__(self, world: World, *_: Any, name: str = "") -> None:
        super().__init__(world, name)

    close_receiver = Modelled.nothing

    def open_receiver(self, *_: Any) -> dict[str, Any]:
        return {"transport": {}}

    async def receive_refit(self) -> dict[str, Any]:
        await _arrival(self.world)
        return {}


class ModelledEngine(ModelledFollower):
    """Stands for `EngineWorker`. `weights` is the version of the weights that it really has, `weight_version` the one
    that it names."""

    def __init__(self, world: World, config: EngineConfig, store: ObjectStore) -> None:
        super().__init__(world, name=config.name)
        self.config, self._store = config, store
        self.weight_version: int | None = 0 if config.load_format == "auto" else None
        self.weights = 0
        self._streams: dict[str, _Stream] = {}
        self.samples: dict[tuple[str, int], _Sample] = {}
        self._waiting: deque[_Sample] = deque()
        self._running: list[tuple[int, int, _Sample]] = []  # a heap: (step in which it ends, number, sample)
        self._step = self._admitted = 0
        self._held = 0  # tokens in the cache
        self._stall = 0.0  # seconds of prefill to be spent
        self._cached: set[str] = set()  # prompts in the prefix cache
        self._leads = self._paused = self._committing = False
        self._staged: int | None = None
        self._before: tuple[int | None, int] | None = None
        self._changed = Condition()  # of what runs
        self._finished = Condition()  # a sample, or the leading of the steps
        self.refits = self.requested = 0  # refits that it committed, samples that it was asked for
        self.alive, self._busy = True, False
        if world.cores is not None:
            world.cores.changed.append(self._changed)
        world.engines.append(self)

    def died(self) -> None:
        self.alive = False
        self._keep_cores_busy(False)

    def _keep_cores_busy(self, busy: bool) -> None:
        if self.world.cores is not None and busy != self._busy:
            self._busy = busy
            self.world.cores.want(ENGINE_CORES if busy else -ENGINE_CORES)

    async def generate_refs(
        self, requests: list[GenerationRequest], sampling: Sampling, name: str | None = None
    ) -> AsyncIterator[list[Parcel]]:
        """Generate as the engine does: of several callers one runs the steps for all."""
        stream = self._streams[name or ""] = _Stream()
        try:
            self._add(stream, requests, sampling)
            while stream.left or stream.finished:
                while stream.finished:
                    few, stream.finished = stream.finished[:PARCELS], stream.finished[PARCELS:]
                    yield [Parcel(self._label(sample), sample) for sample in few]
                if stream.left and not self._leads:
                    self._leads = True
                    while stream.left and not stream.finished:
                        await self._advance()
                    self._leads = False
                    self._keep_cores_busy(bool(self._running))
                    self._finished.notify()
                elif stream.left:
                    await self._finished.wait()
        finally:
            self._streams.pop(name or "", None)

    def join(self, name: str, requests: list[GenerationRequest], sampling: Sampling) -> bool:
        if (stream := self._streams.get(name)) is None or not (stream.left or stream.finished):
            return False
        self._add(stream, requests, sampling)
        return True

    def give_up(self, uids: Collection[str]) -> None:
        for key in [key for key in self.samples if key[0] in uids]:
            sample = self.samples.pop(key)
            sample.aborted = True
            sample.stream.left -= 1
        self._changed.notify()
        self._finished.notify()

    def _add(self, stream: _Stream, requests: list[GenerationRequest], sampling: Sampling) -> None:
        if self.weight_version is None:
            raise EngineError(f"{self.name} holds weights of no version: it generates after the next refit")
        if self._is_away and not self._paused:
            raise EngineError(f"{self.name} cannot generate: it is asleep")
        longest = self.world.config.policy.generation.vllm_cfg.max_model_len
        for request in with_trajectories(requests, self._store):
            context = sum(map(len, request.turns))
            room = min(sampling.max_new_tokens, longest - context)
            if room < 1:
                raise ValueError(f"{request.uid}: {context} tokens leave no room for an answer")
            unlimited = self.world.answer_tokens(request)
            sample = _Sample(request, stream, context, min(unlimited, room), unlimited > room)
            key = request.uid, request.generation_index
            if any(key in engine.samples for engine in self.world.engines if engine.alive):
                self.world.flaws.append(
                    f"{self.name} generates {request.uid}#{request.generation_index} twice at a time"
                )
            self.samples[key] = sample
            stream.left += 1
            self.requested += 1
            self._waiting.append(sample)
        self._changed.notify()

    async def _advance(self) -> None:
        """Run steps up to the next end of a sample or change of the batch."""
        self._drop_aborted()
        works = not (self._paused or self._committing or self._is_away) and self._admit()
        self._keep_cores_busy(works)
        if not works:
            await self._changed.wait()
            return
        durations, count = self.world.durations, len(self._running)
        room = (durations.kv_tokens - self._held) // count
        if room < 1 and count > 1:
            self._preempt()
            return
        steps = max(1, min(self._running[0][0] - self._step, int(max(1, room))))
        slowness = 1.0 if self.world.cores is None else self.world.cores.slowness
        step_s = slowness * self._seconds(durations.decode(count, self._held + count * steps / 2))
        start, stall = self.world.clock.now(), slowness * self._stall
        await self._changed.wait(stall + steps * step_s)
        spent = self.world.clock.now() - start
        self._stall = max(0.0, stall - spent) / slowness
        done = min(steps, round((spent - stall) / step_s, 3).__floor__()) if spent > stall else 0
        self._step += done
        self._held += done * count
        while self._running and self._running[0][0] <= self._step:
            sample = heapq.heappop(self._running)[2]
            self._leave(sample)
            if not sample.aborted:
                self._finish(sample)
        if done:
            self._finished.notify()

    def _drop_aborted(self) -> None:
        if any(sample.aborted for _, _, sample in self._running):
            for _, _, sample in self._running:
                if sample.aborted:
                    self._leave(sample)
            self._running = [entry for entry in self._running if not entry[2].aborted]
            heapq.heapify(self._running)

    def _admit(self) -> bool:
        """Take waiting samples into the batch, as many as the cache has room for. Return whether any runs."""
        durations = self.world.durations
        while self._waiting and len(self._running) < durations.max_samples:
            sample = self._waiting[0]
            tokens = sample.context + sample.generated
            if not sample.aborted:
                if self._running and self._held + tokens + len(self._running) + 1 > durations.kv_tokens:
                    break
                fresh = tokens if sample.request.uid not in self._cached else max(1, sample.generated)
                self._cached.add(sample.request.uid)
                self._stall += self._seconds(fresh * durations.prefill + durations.request)
                self._admitted += 1
                self._held += tokens
                sample.since = self._step
                heapq.heappush(self._running, (self._step + sample.tokens - sample.generated, self._admitted, sample))
            self._waiting.popleft()
        return bool(self._running)

    def _leave(self, sample: _Sample) -> None:
        """Take a sample out of the cache."""
        sample.generated, sample.since = sample.generated + self._step - sample.since, self._step
        self._held -= sample.context + sample.generated

    def _preempt(self) -> None:
        """Give the room of the youngest sample to the others. What it has generated is computed again later."""
        youngest = max(self._running, key=lambda entry: entry[1])
        self._running.remove(youngest)
        heapq.heapify(self._running)
        self._leave(youngest[2])
        self._cached.discard(youngest[2].request.uid)
        self._waiting.appendleft(youngest[2])

    def _finish(self, sample: _Sample) -> None:
        request, count = sample.request, sample.tokens
        del self.samples[request.uid, request.generation_index]
        assert self.weight_version is not None
        parts = [*sample.parts, (self.weight_version, self.weights, count)]
        earlier = 0 if request.continues is None else request.continues.length
        spans = [] if request.continues is None else list(request.continues.weight_versions)
        first = earlier
        for claimed, _, until in parts:
            if sample.context + until > first:
                spans.append((claimed, first, sample.context + until))
                first = sample.context + until
        text = f"weights {min(real for _, real, _ in parts)}"
        turn = Turn("assistant", _IDS[:count], _LOGPROBS[:count], loss_mask=True, text=text)
        sample.stream.left -= 1
        sample.stream.finished.append(
            Trajectory(
                request.uid,
                request.generation_index,
                (*request.turns, turn),
                tuple(spans),
                "length" if sample.truncated else "stop",
                truncated=sample.truncated,
                stop_token=None if sample.truncated else END,
            )
        )

    def _label(self, sample: Trajectory) -> TrajectoryRef:
        """Return what the driver gets of a sample: `TrajectoryRef.of`, without computing a prompt's sketch anew."""
        prompt = sample.prompt_length
        return TrajectoryRef(
            uid=sample.uid,
            generation_index=sample.generation_index,
            length=sample.length,
            prompt_length=prompt,
            generated_length=sample.generated_length,
            weight_version=sample.weight_version,
            truncated=sample.truncated,
            finish_reason=sample.finish_reason,
            ref=None,
            turns=sum(turn.loss_mask for turn in sample.turns),
            stop_token=sample.stop_token,
            prompt_sketch=self.world.sketch(sample.uid, lambda: sample.token_ids()[:prompt].tolist()),
        )

    async def start_refit(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        self.abort_refit()
        await sleep(self._seconds(SMALL_CALL_S))
        answer = {"dtype": self.config.dtype, "verify": "off", "digest": manifest["digest"], "in_place": False}
        return answer | {"version": self.weight_version, "transport": {}}

    async def stage_refit(self) -> dict[str, Any]:
        start = self.world.clock.now()
        self._staged = await _arrival(self.world)
        return {"seconds": self.world.clock.now() - start, "sums": {}}

    async def commit_refit(self, version: int, recompute_kv: bool = False) -> dict[str, Any]:
        if self._staged is None:
            raise EngineError(f"{self.name}: nothing to commit, no refit is staged")
        self._committing, self._before = True, (self.weight_version, self.weights)
        self._changed.notify()
        await sleep(self._seconds(self.world.durations.commit))
        for sample in self.samples.values():
            running = self._step - sample.since if any(sample is other for _, _, other in self._running) else 0
            if (total := sample.generated + running) > (sample.parts[-1][2] if sample.parts else 0):
                sample.parts.append((self.weight_version or 0, self.weights, total))
        self.world.commits.append((self.name, version, self._staged))
        self.weight_version, self.weights, self._staged = version, self._staged, None
        self._cached.clear()
        self.refits += 1
        return {"version": version, "fallbacks": 0, "quantized": []}

    def finish_refit(self) -> None:
        self._committing, self._before = False, None
        self._changed.notify()

    def abort_refit(self) -> None:
        if self._before is not None:
            self.weight_version, self.weights = self._before
        self._staged = None
        self.finish_refit()

    async def prepare(self, version: int) -> None:
        if self.weight_version != version:
            raise EngineError(f"{self.name} holds weight version {self.weight_version}, not {version}")
        await self._move(away=False, seconds=self.world.durations.offload)
        self._paused = False
        self.finish_refit()

    async def release(self, pause: bool = False, keep_weights: bool = True) -> None:
        self._paused = pause
        self._changed.notify()
        if not self.config.sleep_between_phases or self._is_away:
            return
        if self.samples and not pause:
            raise EngineError(f"{self.name} cannot give its memory away while it generates")
        self._cached.clear()
        if not keep_weights:
            self.weight_version = None
        await self._move(away=True, seconds=self.world.durations.offload)

    def health(self) -> dict[str, Any]:
        return {"name": self.name, "weight_version": self.weight_version, "requests": len(self.samples)}


class ModelledTeacherEngine(Modelled):
    """Stands for `TeacherEngineWorker`."""

    def __init__(self, world: World, config: EngineConfig, store: ObjectStore) -> None:
        super().__init__(world, config.name)
        self.config, self._store, self._durations = config, store, world.teacher_of_engine(config.name)

    async def score(self, samples: Mapping[int, Ref], prompts: Mapping[int, torch.Tensor]) -> dict[int, Ref]:
        if self._is_away:
            self.world.flaws.append(f"{self.name} scored without its weights")
        lengths = [trajectory.length for trajectory in self._store.fetch_many(list(samples.values()))]
        await sleep(self._seconds(self._durations.score(lengths)))
        return {index: self._store.put(torch.zeros(0)) for index in samples}

    async def prepare(self, version: int) -> None:
        await self._move(away=False, seconds=self._durations.move)

    async def release(self, pause: bool = False, keep_weights: bool = True) -> None:
        await self._move(away=self.config.sleep_between_phases, seconds=self._durations.move)

    def health(self) -> dict[str, Any]:
        return {"name": self.name, "weight_version": 0, "requests": 0}


def modelled_node(
    world: World, rendezvous: Rendezvous, config: EngineConfig, store: ObjectStore, token: str
) -> ModelledFollower:
    """Build the part of an engine over several nodes that runs on one of them."""
    return ModelledEngine(world, config, store) if rendezvous.rank == 0 else ModelledFollower(world)


async def _arrival(world: World) -> int:
    """Wait until the ranks have sent their weights. Return the version of these."""
    transfer = world.transfer
    while not transfer.came:
        if transfer.broken is not None:
            raise EngineError(f"the refit has lost a writer: {transfer.broken}")
        await transfer.changed.wait()
    return transfer.version
