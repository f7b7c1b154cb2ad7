"""Send prompts to the engines and the environments; return scored groups."""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_mcore.algorithms.engines.engine_faults import EngineFaults, cause
from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.algorithms.engines.retries import Retries
from grpo_mcore.algorithms.rollouts.agent_rollouts import AgentRollouts
from grpo_mcore.algorithms.rollouts.scoring import EnvironmentWorker, RewardScorer
from grpo_mcore.cluster import Cluster, DeadlineExceeded, Future, Stream, Worker, WorkerDied, WorkerFailed
from grpo_mcore.data import DatumSpec, TurnTemplate
from grpo_mcore.environments.nemo_gym import GymOutcome
from grpo_mcore.rollout.conversation import Conversation, TurnLimits
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Sampling, TrajectoryRef, Turn, sample_seed


@dataclass
class _OpenGroup:
    """A group under way. `engine`: number of the engine that generates its samples. `unfinished`: how many of its
    samples are still to be generated in this turn."""

    prompt: DatumSpec
    step: int
    sampling: Sampling
    engine: int
    conversations: list[Conversation]
    unfinished: int

    @property
    def load(self) -> int:
        """Upper bound of its tokens while its samples have one turn."""
        return len(self.conversations) * (self.prompt["length"] + self.sampling.max_new_tokens)

    def live(self) -> list[Conversation]:
        return [conversation for conversation in self.conversations if not conversation.over]


@dataclass
class _EngineCall:
    """A generation call under way. `expected`: prompt uid -> number of samples still to come."""

    engine: int
    step: int
    sampling: Sampling
    stream: Stream
    expected: Counter[str]
    since: float = field(default_factory=time.perf_counter)


class Rollouts:
    """Generates and scores groups. Several prompts are in flight; groups come back in the order in which they finish.

    Consumes: the prompts given to `dispatch`.
    Waits for: samples from the engines' streams, rewards from the environments, samples from environments that run
        agents, and the engines' answers to aborts.
    Unblocked by: whichever of these comes first. A deadline also unblocks it: an environment or an engine that exceeds
        it is restarted, and what it was asked is asked again.

    A group is scored as soon as the last sample of its turn is generated, while the engines go on with other groups.
    The samples of one step on one engine take their turns together: their next turn starts when all of them are
    generated and scored.

    When a generation call fails, its unfinished groups are generated again from the start, all samples of each: keeping
    those that had finished would favour short ones. A lost engine's groups move to the other engines, or wait for the
    refit of its successor if there are none (`engine_faults.py`).

    All of this goes on while the driver waits for something else, if that wait is given this object as
    `BackgroundWork`.
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
        watch: Callable[[], None] = lambda: None,
        on_span: Callable[[str, str, float, float], None] = lambda worker, what, start, end: None,
    ) -> None:
        """`environments`: by task name. `on_sample`: called for each sample when its last turn is generated.
        `retries`: limit for calls that fail while their engine is alive; `on_retry` gets the uid of each prompt that is
        generated again, and the reason. `restore_engines`: waits for restarted engines and refits them; called only in
        `next_group`, when the policy is idle. `on_restart`: gets the name of each worker that is restarted, and the
        reason. `on_outcome`: gets every outcome of environments that run agents. `enough_samples`: a group is complete
        with this many samples and its other samples are aborted; None: with all of them. Only for samples of one turn.
        `watch`: called again and again while `next_group` only waits; nothing is lost if it raises. `on_span`: gets
        (worker, what it did, start, end) of each call that has ended, by time.perf_counter.

        Raises DataError if samples may have several turns and the tokenizer's chat template cannot hold them.
        """
        self.engines, self.environments, self.limits, self.seed = engines, environments, limits, seed
        self.cluster: Cluster = engines.cluster
        self._on_sample, self._on_retry = on_sample, on_retry
        self._faults = EngineFaults(engines, retries or Retries(0, 0.0), restore_engines, on_restart)
        self._enough_samples, self._watch, self._on_span = enough_samples, watch, on_span
        self._template = TurnTemplate(tokenizer) if limits.max_turns > 1 else None
        agents = {
            task: worker
            for task, worker in environments.items()
            if isinstance(worker, EnvironmentWorker) and worker.runs_agents
        }
        self._finished: deque[Group] = deque()
        self._agents = AgentRollouts(
            agents, engines, seed, lambda group: self._finished.append(group), on_sample, on_outcome, limits.max_tokens
        )
        scored = {task: worker for task, worker in environments.items() if task not in agents}
        self._scorer = RewardScorer(scored, self.cluster, on_restart, on_span)
        self._groups: dict[str, _OpenGroup] = {}  # by uid
        self._calls: dict[int, _EngineCall] = {}  # by id of the stream
        self._aborts: list[tuple[Future, int]] = []  # not answered yet, with the number of the engine
        # (engine, step, sampling) -> requests not sent yet: of a next turn, or of a lost engine when there is no other
        self._queued: dict[tuple[int, int, Sampling], list[GenerationRequest]] = defaultdict(list)

    @property
    def generating(self) -> bool:
        """Whether samples are still being generated; otherwise only rewards are waited for."""
        return bool(self._calls or self._without_engine() or self._agents.awaited())

    def _without_engine(self) -> int:
        """Return the number of requests that wait for a lost engine."""
        return sum(len(requests) for key, requests in self._queued.items() if key[0] in self.engines.lost)

    def dispatch(self, prompts: Sequence[DatumSpec], sampling: Sampling, *, generations: int, step: int) -> None:
        """Send `generations` requests for each prompt to the engines. Does not wait for samples."""
        while self._aborts:  # an abort that arrives late could hit a prompt that is dispatched again
            self._confirm_abort(*self._aborts.pop())
        requests: list[list[GenerationRequest]] = [[] for _ in self.engines.workers]
        load = [0] * len(requests)
        for group in self._groups.values():
            load[group.engine] += group.load
        candidates = self.engines.serving() or range(len(load))
        for_agents: list[DatumSpec] = []
        for prompt in prompts:
            if prompt["task_name"] not in self.environments:
                raise ValueError(
                    f"{prompt['uid']}: no environment for task {prompt['task_name']!r}. Environments are given by the "
                    f"datasets' task names; known are {', '.join(map(repr, self.environments)) or 'none'}"
                )
            if self._agents.handles(prompt):
                for_agents.append(prompt)
                continue
            engine = min(candidates, key=load.__getitem__)  # a whole group to one engine: its prompt is prefilled once
            requests[engine] += self._open_group(prompt, sampling, generations, step, engine)
            load[engine] += self._groups[prompt["uid"]].load
        for engine, share in enumerate(requests):
            if share:
                self._send(engine, step, sampling, share, f"samples of step {step}")
        self._agents.dispatch(for_agents, sampling, generations=generations, step=step)

    def _open_group(
        self, prompt: DatumSpec, sampling: Sampling, generations: int, step: int, engine: int
    ) -> list[GenerationRequest]:
        turns = tuple(
            Turn(role=message["role"], token_ids=message["token_ids"], text=message["content"])
            for message in prompt["message_log"]
        )
        uid, info = prompt["uid"], prompt["extra_env_info"]
        stop = tuple(prompt.get("stop_strings") or ())
        # An environment of several turns may keep each sample's state in its metadata: each gets a copy.
        copied = copy.deepcopy if self.limits.max_turns > 1 else lambda shared: shared
        conversations = [Conversation(copied(info), stop) for _ in range(generations)]
        self._groups[uid] = _OpenGroup(prompt, step, sampling, engine, conversations, generations)
        return [
            GenerationRequest(uid, index, turns, sample_seed(self.seed, step, uid, index), stop)
            for index in range(generations)
        ]

    def give_up(self, uids: Collection[str]) -> None:
        """Drop these prompts and abort their samples. They may be dispatched again."""
        self._scorer.give_up(uids)
        self._finished = deque(group for group in self._finished if group.uid not in uids)
        for requests in self._queued.values():
            requests[:] = [request for request in requests if request.uid not in uids]
        self._agents.give_up(uids)
        engines = set()
        for call in self._calls.values():
            if any([call.expected.pop(uid, 0) for uid in uids]):
                engines.add(call.engine)
        for uid in uids:
            self._groups.pop(uid, None)
        aborts = [(self._abort_on_engine(engine, uids), engine) for engine in sorted(engines)]
        for answer, engine in aborts:
            self._confirm_abort(answer, engine)

    def _abort_on_engine(self, engine: int, uids: Collection[str]) -> Future:
        return self.engines.workers[engine].call("give_up", tuple(uids), what="giving samples up")

    def _confirm_abort(self, answer: Future, engine: int) -> None:
        """Wait until the engine has aborted. A dead engine has no samples; its streams or a refit will find it dead."""
        try:
            with suppress(WorkerDied):
                answer.result()
        except DeadlineExceeded as error:
            self._handle_failure(engine, error)

    def next_group(self) -> Group:
        """Wait for the next group whose samples are all generated and scored.

        Raises WorkerFailed and DeadlineExceeded of engines and environments.
        """
        while not self._finished:
            for engine, error in list(self.engines.deaths.items()):
                self._handle_failure(engine, error)
            waiting = self._without_engine()
            if waiting or (self._agents.awaited() and not self.engines.reachable()):
                self._faults.restore(waiting)
                self._send_queued()
            ready = self._wait()
            if ready is None:
                self._advance_scored()
            else:
                self.take(ready)
        return self._finished.popleft()

    def _wait(self) -> Future | Stream | None:
        """Return the first of `awaited` that is ready; None if an environment or an engine exceeded its deadline."""
        busy = {call.engine for call in self._calls.values()}
        timeout_s = self.cluster.call_timeout_s
        left_s = min(self._scorer.seconds_left(), self._faults.seconds_left(busy))
        try:
            return self.cluster.next_ready(self.awaited(), min(left_s, timeout_s), "samples and verdicts", self._watch)
        except DeadlineExceeded as error:
            if late := [engine for engine in busy if not self._faults.seconds_left([engine])]:
                name = self.engines.workers[late[0]].name
                self._handle_failure(late[0], DeadlineExceeded("samples", name, timeout_s, error.detail))
            elif left_s == timeout_s:
                raise
            return None

    def awaited(self) -> list[Future | Stream]:
        """Return all calls and streams under way."""
        streams = (call.stream for call in self._calls.values())
        aborts = (answer for answer, _ in self._aborts)
        return [*self._scorer.awaited(), *streams, *aborts, *self._agents.awaited()]

    def take(self, ready: Future | Stream) -> None:
        """Process one of `awaited` that is ready. Raises what it raises."""
        if abort := next((entry for entry in self._aborts if entry[0] is ready), None):
            self._aborts.remove(abort)
            self._confirm_abort(*abort)
        elif not (self._agents.take(ready) or self._scorer.take(ready)):
            self._take_sample(self._calls[id(ready)])
        self._advance_scored()

    def _take_sample(self, call: _EngineCall) -> None:
        """Take the next sample of a generation call, its end or its failure."""
        stream = call.stream
        try:
            parcel = next(stream, None)
        except (WorkerFailed, DeadlineExceeded) as error:
            self._handle_failure(call.engine, error, call)
            return
        self._faults.mark_active(call.engine)
        if parcel is None:
            missing = call.expected.total()
            if not missing:  # its last samples were aborted
                self._end_call(call)
                return
            name, why = self.engines.workers[call.engine].name, f"its stream ended without {missing} samples"
            self._handle_failure(call.engine, WorkerFailed(name, stream.what, why), call)
            return
        if not call.expected[parcel.label.uid]:  # the sample finished before its abort arrived
            return
        call.expected[parcel.label.uid] -= 1
        sample = replace(parcel.label, ref=parcel.content)
        if self._completes_group(sample.uid):
            del call.expected[sample.uid]
            self._abort_missing(sample, call.engine)
        self._record_sample(sample)
        if not call.expected.total():
            self._faults.reset()
            self._take_end(call)

    def _take_end(self, call: _EngineCall) -> None:
        """Take the end of a call whose samples have all come, or one that was aborted and comes all the same. The
        engine may die before the end: its samples stay."""
        try:
            if next(call.stream, None) is None:
                self._end_call(call)
        except (WorkerFailed, DeadlineExceeded) as error:
            self._handle_failure(call.engine, error, call)

    def _end_call(self, call: _EngineCall) -> None:
        del self._calls[id(call.stream)]
        self._on_span(self.engines.workers[call.engine].name, "generate", call.since, time.perf_counter())

    def _completes_group(self, uid: str) -> bool:
        """Whether one more sample is enough for this group, although others are missing."""
        group = self._groups[uid]
        return group.unfinished > 1 and len(group.conversations) - group.unfinished + 1 == self._enough_samples

    def _abort_missing(self, last: TrajectoryRef, engine: int) -> None:
        """Complete the group of `last` with that sample, and abort the samples that are missing."""
        group = self._groups[last.uid]
        for index, conversation in enumerate(group.conversations):
            conversation.over = conversation.sample is None and index != last.generation_index
        group.unfinished = 1
        self._aborts.append((self._abort_on_engine(engine, [last.uid]), engine))

    def _record_sample(self, sample: TrajectoryRef) -> None:
        """Add a generated turn to its group; request rewards when it is the group's last one."""
        group = self._groups[sample.uid]
        group.conversations[sample.generation_index].sample = sample
        if sample.turns == self.limits.max_turns:
            self._on_sample()
        group.unfinished -= 1
        if not group.unfinished:
            live = group.live()
            metadata = [conversation.metadata for conversation in live]
            references = [conversation.sample.ref for conversation in live if conversation.sample]
            self._scorer.submit(sample.uid, group.prompt["task_name"], metadata, references)

    def _advance_scored(self) -> None:
        """Take the rewards that have come: close groups that are done, send the next turns of the others."""
        while (scored := self._scorer.next()) is not None:
            uid, outcomes = scored
            self._queue_next_turns(self._groups[uid], outcomes)
            if not self._groups[uid].unfinished:
                self._finished.append(self._close_group(uid))
        self._send_queued()

    def _queue_next_turns(self, group: _OpenGroup, outcomes: Sequence[Outcome]) -> None:
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
                group.unfinished += 1
            elif sample.turns < self.limits.max_turns:
                self._on_sample()

    def _send_queued(self) -> None:
        """Send the queued requests of each engine and step of which nothing is being generated or scored."""
        if not self._queued:
            return
        busy = {(call.engine, call.step) for call in self._calls.values()}
        busy |= {(group.engine, group.step) for group in map(self._groups.__getitem__, self._scorer.uids())}
        for key in [key for key in self._queued if key[:2] not in busy and key[0] not in self.engines.lost]:
            if requests := self._queued.pop(key):
                self._send(*key, requests, f"{len(requests)} samples")

    def _close_group(self, uid: str) -> Group:
        group = self._groups.pop(uid)
        finished = [(each.sample, each.score) for each in group.conversations if each.sample and each.score]
        return Group(group.prompt, tuple(sample for sample, _ in finished), tuple(score for _, score in finished))

    def _send(self, engine: int, step: int, sampling: Sampling, requests: list[GenerationRequest], what: str) -> None:
        if engine in self.engines.lost:
            self._queued[engine, step, sampling] += requests
            return
        stream = self.engines.workers[engine].stream("generate_refs", requests, sampling, what=what)
        expected = Counter(request.uid for request in requests)
        if all(call.engine != engine for call in self._calls.values()):
            self._faults.mark_active(engine)
        self._calls[id(stream)] = _EngineCall(engine, step, sampling, stream, expected)

    def _handle_failure(
        self, engine: int, error: WorkerFailed | DeadlineExceeded, failed_call: _EngineCall | None = None
    ) -> None:
        """Regenerate what a failed call, or a lost engine with all its calls, did not finish. May raise `error`."""
        name, lost = self.engines.workers[engine].name, self._faults.handle(error, engine)
        target = self._faults.next_engine(engine)
        for call in [call for call in self._calls.values() if call.engine == engine and (lost or call is failed_call)]:
            self._end_call(call)
            self._regenerate(call, target, f"{name}: {cause(error)}")
        if lost:
            self._aborts = [entry for entry in self._aborts if entry[1] != engine]
            self._move_groups(engine, target)

    def _regenerate(self, failed: _EngineCall, engine: int, why: str) -> None:
        """Generate the unfinished groups of a failed call again from the start."""
        requests: list[GenerationRequest] = []
        for uid in +failed.expected:  # without groups whose samples have all come
            group = self._groups[uid]
            self._on_retry(uid, why)
            requests += self._open_group(group.prompt, failed.sampling, len(group.conversations), group.step, engine)
        if requests:
            self._send(engine, failed.step, failed.sampling, requests, f"{len(requests)} samples again")

    def _move_groups(self, lost: int, target: int) -> None:
        """Let engine `target` generate the later turns of a lost engine's groups; it gets their trajectories so far."""
        for group in self._groups.values():
            group.engine = target if group.engine == lost else group.engine
        for key in [key for key in self._queued if key[0] == lost and lost != target]:
            self._queued[target, *key[1:]] += self._queued.pop(key)
