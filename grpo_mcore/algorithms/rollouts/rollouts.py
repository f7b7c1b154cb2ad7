"""Prompts out, scored groups back: drives the engines and the environments for the loop."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from grpo_mcore.algorithms.engines.engine_faults import EngineFaults, cause
from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.algorithms.engines.retries import Retries
from grpo_mcore.algorithms.rollouts.agent_rollouts import AgentRollouts
from grpo_mcore.algorithms.rollouts.scoring import RewardScorer
from grpo_mcore.cluster import (
    Cluster,
    DeadlineExceeded,
    Future,
    Stream,
    Worker,
    WorkerDied,
    WorkerFailed,
)
from grpo_mcore.data import TurnTemplate
from grpo_mcore.environments.nemo_gym import GymOutcome
from grpo_mcore.rollout.conversation import Conversation, TurnLimits
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.seeds import sample_seed
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Sampling, TrajectoryRef, Turn


@dataclass
class _Open:
    """A prompt under way. `engine`: number of the one that has its samples. `missing`: samples still to finish their
    turn."""

    prompt: Any
    step: int
    sampling: Sampling
    engine: int
    conversations: list[Conversation]
    missing: int

    @property
    def load(self) -> int:
        """The most tokens that its samples can have, as long as they have one turn."""
        return len(self.conversations) * (self.prompt["length"] + self.sampling.max_new_tokens)

    def live(self) -> list[Conversation]:
        return [conversation for conversation in self.conversations if not conversation.over]


@dataclass
class _Running:
    """What an engine generates. `missing`: prompt uid -> samples still to come."""

    engine: int
    step: int
    sampling: Sampling
    stream: Stream
    missing: Counter[str]


@dataclass
class _Parked:
    """Requests whose engine is lost, and there is no other."""

    engine: int
    step: int
    requests: list[GenerationRequest]
    sampling: Sampling
    what: str


class Rollouts:
    """Several prompts in flight; groups come back in the order in which they finish.

    Waits for: samples of the engines' streams, and verdicts of the environments, whichever is first. A group's verdict
    on a turn is asked for as soon as its last sample is there, while the engines go on with the others.
    The samples that an engine has of one step take their turns together: a next turn waits until all of them are
    generated and judged.

    Where a generation call fails, its groups are generated anew, as a whole: what was short enough to be there
    already is not favoured. An engine that dies or hangs is started anew (`engine_faults.py`); until a refit has
    brought it the weights its groups are with the others, or wait where there are none.

    Prompts whose environment plays its samples itself go there, and come back as groups too (`playing.py`).

    All of this goes on while the driver waits for something else, if that wait is given
    these rollouts as `BackgroundWork`.
    """

    def __init__(
        self,
        engines: EngineGroup,
        environments: Mapping[str, Worker],
        tokenizer: Any,
        limits: TurnLimits,
        *,
        seed: int,
        on_sample: Callable[[], None] = lambda: None,
        retries: Retries | None = None,
        on_retry: Callable[[str, str], None] = lambda uid, why: None,
        restore_engines: Callable[[], None] | None = None,
        on_restart: Callable[[str, str], None] = lambda worker, why: None,
        on_outcome: Callable[[GymOutcome], None] | None = None,
        enough_samples: int | None = None,
    ) -> None:
        """`environments`: task name -> environment. `on_sample`: called for each sample, when its last turn is there.
        `retries`: of calls that fail while their engine lives; `on_retry` gets each prompt of one, and why.
        `restore_engines`: waits for engines that were started anew, and refits them; called in `next_group` only, when
        the policy has nothing else to do. `on_restart` gets the name of each worker that is started anew, and why.
        `on_outcome`: gets what environments that play samples send for each. `enough_samples`: a group with so many
        samples is complete, and the others are given up; None: all. Only where samples have one turn.

        Raises DataError where samples may have several turns and the tokenizer's chat template cannot hold them.
        """
        self.engines, self.environments, self.limits, self.seed = engines, environments, limits, seed
        self.cluster: Cluster = engines.cluster
        self._on_sample, self._on_retry = on_sample, on_retry
        self._faults = EngineFaults(engines, retries or Retries(0, 0.0), restore_engines, on_restart)
        self._enough_samples = enough_samples
        self._given_up: list[tuple[Future, int]] = []  # engines that are being told, and their numbers
        self._template = TurnTemplate(tokenizer) if limits.max_turns > 1 else None
        self._open: dict[str, _Open] = {}
        self._running: dict[int, _Running] = {}  # by id of the stream
        self._parked: list[_Parked] = []
        playing = {task: worker for task, worker in environments.items() if getattr(worker, "plays", False)}
        self._playing = AgentRollouts(playing, engines, seed=seed, on_sample=on_sample, on_outcome=on_outcome)
        judging = {task: worker for task, worker in environments.items() if task not in playing}
        self._judging = RewardScorer(judging, self.cluster, on_restart)
        # (engine, step, sampling) -> next turns that are still to be sent
        self._queued: dict[tuple[int, int, Sampling], list[GenerationRequest]] = defaultdict(list)
        self._finished: deque[Group] = deque()

    @property
    def generating(self) -> bool:
        """Whether an engine still generates; otherwise only verdicts are waited for."""
        return bool(self._running or self._parked or self._playing.awaited())

    def dispatch(self, prompts: Sequence[Any], sampling: Sampling, *, generations: int, step: int) -> None:
        """Sends `generations` requests for each prompt (a DatumSpec) to the engines. Does not wait for samples."""
        while self._given_up:  # it might be about one of these prompts
            self._told(*self._given_up.pop())
        shares: list[list[GenerationRequest]] = [[] for _ in self.engines.workers]
        load = [0] * len(shares)
        for group in self._open.values():
            load[group.engine] += group.load
        candidates = self.engines.serving() or range(len(load))
        for prompt in prompts:
            if prompt["task_name"] not in self.environments:
                raise ValueError(f"{prompt['uid']}: no environment for task {prompt['task_name']!r}")
            if self._playing.plays(prompt):
                continue
            engine = min(candidates, key=load.__getitem__)  # a whole group to one engine: its prompt is prefilled once
            shares[engine] += self._start(prompt, sampling, generations, step, engine)
            load[engine] += self._open[prompt["uid"]].load
        for engine, requests in enumerate(shares):
            if requests:
                self._send(engine, step, requests, sampling, f"samples of step {step}")
        played = [prompt for prompt in prompts if self._playing.plays(prompt)]
        self._playing.dispatch(played, sampling, generations=generations, step=step)

    def _start(
        self, prompt: Any, sampling: Sampling, generations: int, step: int, engine: int
    ) -> list[GenerationRequest]:
        turns = tuple(
            Turn(role=message["role"], token_ids=message["token_ids"], text=message["content"])
            for message in prompt["message_log"]
        )
        uid, info = prompt["uid"], prompt["extra_env_info"]
        stop = tuple(prompt.get("stop_strings") or ())
        # An environment of several turns may keep its state there, sample by sample.
        own = copy.deepcopy if self.limits.max_turns > 1 else lambda shared: shared
        conversations = [Conversation(own(info), stop) for _ in range(generations)]
        self._open[uid] = _Open(prompt, step, sampling, engine, conversations, generations)
        return [
            GenerationRequest(uid, index, turns, sample_seed(self.seed, step, uid, index), stop)
            for index in range(generations)
        ]

    def give_up(self, uids: Collection[str]) -> None:
        """These prompts will not come back: their samples are given up where they are. They may be dispatched again."""
        self._judging.forget(uids)
        self._finished = deque(group for group in self._finished if group.uid not in uids)
        for key, requests in self._queued.items():
            self._queued[key] = [request for request in requests if request.uid not in uids]
        for parked in self._parked:
            parked.requests = [request for request in parked.requests if request.uid not in uids]
        self._parked = [parked for parked in self._parked if parked.requests]
        self._playing.forget(uids)
        engines = set()
        for running in self._running.values():
            if any([running.missing.pop(uid, 0) for uid in uids]):
                engines.add(running.engine)
        for uid in uids:
            self._open.pop(uid, None)
        told = [(self._tell(engine, uids), engine) for engine in sorted(engines)]
        for answer, engine in told:
            self._told(answer, engine)

    def _tell(self, engine: int, uids: Collection[str]) -> Future:
        return self.engines.workers[engine].call("give_up", tuple(uids), what="giving samples up")

    def _told(self, answer: Future, engine: int) -> None:
        """The engine knows it; one that has died has no samples, which its streams or a refit find."""
        try:
            with suppress(WorkerDied):
                answer.result()
        except DeadlineExceeded as error:
            self._failed(engine, error)

    def next_group(self) -> Group:
        """Waits for the next group whose samples are all generated and scored.

        Raises WorkerFailed and DeadlineExceeded of engines and environments.
        """
        while not self._finished:
            for engine, error in list(self.engines.deaths.items()):
                self._failed(engine, error)
            if self._parked or (self._playing.awaited() and not self.engines.reachable()):
                self._restore()
            ready = self._wait()
            if ready is None:
                self._go_on_judged()
            else:
                self.take(ready)
        return self._finished.popleft()

    def _wait(self) -> Any:
        """The first of `awaited` that has something; None: an environment or an engine is late."""
        busy = {running.engine for running in self._running.values()}
        patience_s, timeout_s = self._judging.patience_s(), self.cluster.call_timeout_s
        left_s = min(patience_s, self._faults.seconds_left(busy))
        try:
            return self.cluster.next_ready(self.awaited(), min(left_s, timeout_s), "samples and verdicts")
        except DeadlineExceeded as error:
            if silent := self._faults.silent(busy):
                name = self.engines.workers[silent[0]].name
                self._failed(silent[0], DeadlineExceeded("samples", name, timeout_s, error.detail))
            elif left_s == timeout_s:
                raise
            return None

    def awaited(self) -> list[Any]:
        """The verdicts and streams that are waited for."""
        streams = (running.stream for running in self._running.values())
        telling = (answer for answer, _ in self._given_up)
        return [*self._judging.pending(), *streams, *telling, *self._playing.awaited()]

    def take(self, ready: Any) -> None:
        """Goes on with one of `awaited` that has something. Raises what it raises."""
        if told := [entry for entry in self._given_up if entry[0] is ready]:
            self._given_up.remove(told[0])
            self._told(*told[0])
        elif self._playing.take(ready):
            self._finished.extend(self._playing.finished())
        elif not self._judging.take(ready):
            self._take_next_of(self._running[id(ready)])
        self._go_on_judged()

    def _take_next_of(self, running: _Running) -> None:
        """The next sample of an engine, or that its call has failed."""
        stream = running.stream
        try:
            parcel = next(stream, None)
        except (WorkerFailed, DeadlineExceeded) as error:
            self._failed(running.engine, error, running)
            return
        self._faults.heard(running.engine)
        if parcel is None:  # its last samples were given up
            del self._running[id(stream)]
            return
        if not running.missing[parcel.label.uid]:  # it was given up, and came all the same
            return
        running.missing[parcel.label.uid] -= 1
        sample = replace(parcel.label, ref=parcel.content)
        if self._is_enough(sample.uid):
            del running.missing[sample.uid]
            self._forget_missing(sample, running.engine)
        if not running.missing.total():
            self._faults.reset()
            if next(stream, None) is None:  # nothing is left but its end, and perhaps what was given up
                del self._running[id(stream)]
        self._take_sample(sample)

    def _is_enough(self, uid: str) -> bool:
        """Whether a group can do without the samples that are missing when the next one is there."""
        group = self._open[uid]
        return group.missing > 1 and len(group.conversations) - group.missing + 1 == self._enough_samples

    def _forget_missing(self, last: TrajectoryRef, engine: int) -> None:
        """The group of `last` is complete with it: the engine is told to give up the others."""
        group = self._open[last.uid]
        for index, conversation in enumerate(group.conversations):
            conversation.over = conversation.sample is None and index != last.generation_index
        group.missing = 1
        self._given_up.append((self._tell(engine, [last.uid]), engine))

    def _go_on_judged(self) -> None:
        """Closes the groups that are judged to the end, and sends the next turns of the others."""
        while (judged := self._judging.next()) is not None:
            uid, outcomes = judged
            self._go_on(self._open[uid], outcomes)
            if not self._open[uid].missing:
                self._finished.append(self._close(uid))
        self._send_queued()

    def _failed(self, engine: int, error: WorkerFailed | DeadlineExceeded, call: _Running | None = None) -> None:
        """A call has failed, or its engine has died or hangs, and all its calls with it. May raise `error`."""
        name, lost = self.engines.workers[engine].name, self._faults.met(error, engine)
        failed = [other for other in self._running.values() if other.engine == engine if lost or other is call]
        target = self._faults.another(engine)
        for running in failed:
            del self._running[id(running.stream)]
            self._generate_anew(running, target, f"{name}: {cause(error)}")
        if lost:
            self._given_up = [entry for entry in self._given_up if entry[1] != engine]
            self._move_all(engine, target)

    def _generate_anew(self, failed: _Running, engine: int, why: str) -> None:
        """Starts the unfinished groups of a failed call from the beginning."""
        requests: list[GenerationRequest] = []
        for uid in +failed.missing:  # the samples of the others are there
            group = self._open[uid]
            self._on_retry(uid, why)
            requests += self._start(group.prompt, failed.sampling, len(group.conversations), group.step, engine)
        if requests:
            self._send(engine, failed.step, requests, failed.sampling, f"{len(requests)} samples anew")

    def _move_all(self, lost: int, target: int) -> None:
        """Later turns go on with another engine, which gets the trajectories so far."""
        for group in self._open.values():
            group.engine = target if group.engine == lost else group.engine
        for key in [key for key in self._queued if key[0] == lost and lost != target]:
            self._queued[target, *key[1:]] += self._queued.pop(key)

    def _restore(self) -> None:
        """Engines are there again, and get what waited for them."""
        self._faults.restore(sum(len(parked.requests) for parked in self._parked))
        parked, self._parked = self._parked, []
        for call in parked:
            self._send(call.engine, call.step, call.requests, call.sampling, call.what)

    def _take_sample(self, sample: TrajectoryRef) -> None:
        group = self._open[sample.uid]
        group.conversations[sample.generation_index].sample = sample
        if sample.turns == self.limits.max_turns:
            self._on_sample()
        group.missing -= 1
        if not group.missing:
            live = group.live()
            metadata = [conversation.metadata for conversation in live]
            references = [conversation.sample.ref for conversation in live if conversation.sample]
            self._judging.ask(sample.uid, group.prompt["task_name"], metadata, references)

    def _go_on(self, group: _Open, outcomes: Sequence[Outcome]) -> None:
        """Queues the next turn of those that have one."""
        for conversation, outcome in zip(group.live(), outcomes, strict=True):
            sample = conversation.sample
            assert sample is not None
            request = None
            if conversation.judged(outcome, self.limits):
                assert self._template is not None and outcome.observation is not None
                said = self._template.turn(outcome.observation, outcome.role, sample.stop_token)
                seed = sample_seed(self.seed, group.step, sample.uid, sample.generation_index, sample.turns)
                request = conversation.next_request(said, seed, self.limits)
            if request is not None:
                self._queued[group.engine, group.step, group.sampling].append(request)
                group.missing += 1
            elif sample.turns < self.limits.max_turns:
                self._on_sample()

    def _send_queued(self) -> None:
        if not self._queued:
            return
        busy = {(running.engine, running.step) for running in self._running.values()}
        busy |= {(group.engine, group.step) for group in map(self._open.__getitem__, self._judging.uids())}
        for engine, step, sampling in [key for key in self._queued if key[:2] not in busy]:
            requests = self._queued.pop((engine, step, sampling))
            if requests:
                self._send(engine, step, requests, sampling, f"later turns of {len(requests)} samples")

    def _send(self, engine: int, step: int, requests: list[GenerationRequest], sampling: Sampling, what: str) -> None:
        if engine in self.engines.lost:
            self._parked.append(_Parked(engine, step, requests, sampling, what))
            return
        stream = self.engines.workers[engine].stream("generate_refs", requests, sampling, what=what)
        missing = Counter(request.uid for request in requests)
        if all(running.engine != engine for running in self._running.values()):
            self._faults.heard(engine)
        self._running[id(stream)] = _Running(engine, step, sampling, stream, missing)

    def _close(self, uid: str) -> Group:
        group = self._open.pop(uid)
        kept = [conversation for conversation in group.conversations if conversation.sample]
        samples = tuple(conversation.sample for conversation in kept)
        return Group(group.prompt, samples, tuple(conversation.score for conversation in kept))
