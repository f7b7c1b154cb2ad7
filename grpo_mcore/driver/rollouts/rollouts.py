"""Send prompts to the engines and the environments; return scored groups.

The life of a sample, turn by turn:

    queued --> generating --> scoring --> done      the environment ended it, or no turn or room is left
      ^             |            |
      |             |            +------> failed    no reward: the environment failed, or the engine aborted it
      |             |            |
      +-------------+            +------> queued    the environment has answered: the next turn
       its engine failed: the same request again

    playing --> done      where the environment runs agents (`agent_rollouts.py`): they take all turns and score them
      ^  |
      |  +----> failed    its agent came back without a trajectory, or without a reward
      |  |
      +--+                its environment failed: the same sample from the start

queued: its request waits for room on its engine. generating: it is in a stream of its engine, or on its way to one
that is open. scoring: its turn waits for its environment, or is with it. playing: it is in a stream of its environment,
whose agents ask the engines through the policy's endpoint. A sample of a dropped prompt leaves from any state. With
`grpo.turns: free` no sample waits for another one; with `together` those of one step on one engine take their turns in
step, and groups are scored whole. Agents always play each sample by itself.
"""

from __future__ import annotations

import copy
import heapq
import secrets
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from grpo_mcore.cluster import Cluster, DeadlineExceeded, Future, ObjectLost, Stream, Worker, WorkerDied, WorkerFailed
from grpo_mcore.data import DatumSpec, TurnTemplate
from grpo_mcore.driver.engines.engine_faults import EngineFaults, cause
from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.interfaces import GenerationInterface
from grpo_mcore.driver.rollouts.agent_rollouts import AgentRollouts
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker, RewardScorer
from grpo_mcore.environments.gym.nemo_gym import GymOutcome
from grpo_mcore.rollout.conversation import Conversation, TurnLimits
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Sampling, Score, TrajectoryRef, Turn, sample_seed
from grpo_mcore.rollout.workers import remote_call, remote_stream

STREAMS = 4
"""Number of streams that are opened on an engine, each of which holds a thread of it; further requests join one of
them. With several, the engine goes on stepping while the samples of one are handed over."""
MAX_STREAMS = 48
"""Maximum number of streams of an engine where none can be joined."""
PLAYED = -1
"""Stands for the engine of a group whose samples agents play: they ask any engine."""
REMEMBERED = 100_000
"""Number of prompts whose mean length is remembered."""


_Urgency = tuple[bool, float, int]
"""(it is a first turn, minus the tokens that are expected of it, number)."""


@dataclass
class _OpenGroup:
    """A group under way. `engine`: number of the engine that generates its samples, or `PLAYED`. `unfinished`: how many
    of its samples are not over; if they take their turns together, how many are still to be generated in this turn.
    `ended`: generation indexes of samples whose last turn is generated."""

    prompt: DatumSpec
    step: int
    sampling: Sampling
    engine: int
    conversations: list[Conversation]
    unfinished: int
    ended: set[int] = field(default_factory=set)

    @property
    def load(self) -> int:
        """Upper bound of its tokens while its samples have one turn."""
        return len(self.conversations) * (self.prompt["length"] + self.sampling.max_new_tokens)


@dataclass(eq=False)
class _EngineCall:
    """A stream of an engine under way. `name`: under which the engine knows it; `step`: training step of the requests
    with which it was opened. `expected`: (prompt uid, generation index) -> request, of samples still to come. `closed`:
    nothing joins it any more. `number`: calls are numbered in the order in which they were made."""

    number: int
    engine: int
    name: str
    step: int
    stream: Stream
    expected: dict[tuple[str, int], GenerationRequest]
    worker: Worker
    since: float
    closed: bool = False


@dataclass(eq=False)
class _Join:
    """Requests that were sent to an open stream, which may have ended before they reached it. They are among the
    `expected` of its call."""

    number: int
    call: _EngineCall
    answer: Future
    requests: dict[tuple[str, int], GenerationRequest]


@dataclass(frozen=True)
class RolloutHooks:
    """Functions that `Rollouts` calls while it samples."""

    on_sample: Callable[[], None] = lambda: None
    """Called for each sample when its last turn is generated."""
    on_retry: Callable[[str, str], None] = lambda uid, reason: None
    """Gets the uid of each prompt of which something is generated again, and the reason."""
    on_restart: Callable[[str, str], None] = lambda worker, reason: None
    """Gets the name of each worker that is restarted, and the reason."""
    on_outcome: Callable[[GymOutcome], None] | None = None
    """Gets every outcome of environments that run agents."""
    on_span: Callable[[str, str, float, float], None] = lambda worker, action, start, end: None
    """Gets (worker, what it did, start, end) of each call that has ended, by the cluster's clock."""
    phase: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()
    """Opens the phase in which `next_group` waits: "generate" while samples are generated, "reward" while only rewards
    are awaited."""
    watch: Callable[[], None] = lambda: None
    """Called again and again while `next_group` only waits; nothing is lost if it raises."""
    restore_engines: Callable[[], object] | None = None
    """Waits for restarted engines and refits them; called only in `next_group`, when the policy is idle."""


class Rollouts:
    """Generates and scores groups. Several prompts are in flight; groups come back in the order in which they finish.

    Consumes: the prompts given to `dispatch`.
    Waits for: samples from the engines' streams, rewards from the environments, samples from environments that run
        agents, and the engines' answers to aborts.
    Unblocked by: whichever of these comes first. A deadline also unblocks it: an environment or an engine that exceeds
        it is restarted, and what it was asked is asked again.

    A sample is scored as soon as its turn is generated, and its engine takes its next turn into the running batch as
    soon as its environment has answered. If turns are taken together (`TurnLimits.together`), a group is scored when
    the last sample of its turn is generated, and the samples of one step on one engine start their next turn when all
    of them are generated and scored.

    When a generation call fails, its unfinished samples repeat the turn under way, with its seed: they are the samples
    that they would have been, so that keeping the finished ones does not favour short ones. Their environment has not
    seen that turn. A sample whose earlier turns were lost with a node starts from the beginning. A lost engine's groups
    move to the other engines, or wait for the refit of its successor if there are none (`engine_faults.py`).

    All of this goes on while the driver waits for something else, if that wait is given this object as
    `BackgroundWork`.
    """

    def __init__(
        self,
        engines: GenerationInterface,
        environments: Mapping[str, Worker],
        tokenizer: Any,
        limits: TurnLimits,
        *,
        seed: int,
        retries: Retries | None = None,
        enough_samples: int | None = None,
        max_running: int | None = None,
        hooks: RolloutHooks = RolloutHooks(),
    ) -> None:
        """`environments`: workers by task name. `retries`: limit for calls that fail while their engine is alive.
        `enough_samples`: a group is complete with this many samples and its other samples are aborted; None: with all
        of them. If turns are taken together, only for samples of one turn. `max_running`: samples that an engine
        generates at a time, unless turns are taken together; None: all of them.

        Raises DataError if samples may have several turns and the tokenizer's chat template cannot hold them.
        """
        self.engines, self.environments, self.limits, self.seed = engines, environments, limits, seed
        self.cluster: Cluster = engines.cluster
        self._hooks, self._enough_samples, self._max_running = hooks, enough_samples, max_running
        self._name = secrets.token_hex(4)  # its streams have other names than those of other rollouts
        self._faults = EngineFaults(engines, retries or Retries(0, 0.0), hooks.restore_engines, hooks.on_restart)
        self._template = TurnTemplate(tokenizer) if limits.max_turns > 1 else None
        agents = {
            task: worker
            for task, worker in environments.items()
            if isinstance(worker, EnvironmentWorker) and worker.runs_agents
        }
        self._finished: deque[Group] = deque()
        self._agents = AgentRollouts(agents, engines, seed, self._record_played, hooks.on_outcome, limits.max_tokens)
        scored = {task: worker for task, worker in environments.items() if task not in agents}
        self._scorer = RewardScorer(scored, self.cluster, hooks.on_restart, hooks.on_span, joins=not limits.together)
        self._groups: dict[str, _OpenGroup] = {}  # by uid
        self._calls: dict[int, _EngineCall] = {}  # by id of the stream
        self._joins: dict[int, _Join] = {}  # not answered yet, by id of the answer
        self._calls_made = 0
        self._calls_of: dict[int, list[_EngineCall]] = defaultdict(list)  # by engine, in the order of their numbers
        self._failed_at: dict[int, int] = {}  # engine -> calls that had been made when one of its calls last failed
        self._load: Counter[int] = Counter()  # engine -> sum of its groups' loads
        self._aborts: dict[int, tuple[Future, int]] = {}  # not answered yet, by id, with the number of the engine
        # (engine, step, sampling) -> requests not sent yet: a heap each, first what is sent first
        self._queued: dict[tuple[int, int, Sampling], list[tuple[_Urgency, GenerationRequest]]] = defaultdict(list)
        self._queued_ever = self._most_queued = 0
        self._lengths: OrderedDict[str, tuple[int, float]] = OrderedDict()  # prompt -> samples, their mean tokens

    @property
    def generating(self) -> bool:
        """Whether samples are still being generated; otherwise only rewards are waited for."""
        return bool(self._calls or self._joins or self._without_engine() or self._agents.awaited())

    def most_queued(self) -> int:
        """Return the largest number of samples that waited for room on their engines since the last call; 0 if there is
        no limit."""
        most, self._most_queued = self._most_queued, 0
        return most

    def _without_engine(self) -> int:
        """Return the number of requests that wait for a lost engine."""
        if not self.engines.lost:
            return 0
        return sum(len(requests) for key, requests in self._queued.items() if key[0] in self.engines.lost)

    def dispatch(self, prompts: Sequence[DatumSpec], sampling: Sampling, *, generations: int, step: int) -> None:
        """Send `generations` requests for each prompt to the engines. Does not wait for samples."""
        while self._aborts:  # an abort that arrives late could hit a prompt that is dispatched again
            self._confirm_abort(*self._aborts.popitem()[1])
        requests: dict[int, list[GenerationRequest]] = defaultdict(list)
        candidates = self.engines.serving() or range(len(self.engines.slots))
        by_load = [(self._load[engine], engine) for engine in candidates]  # a heap
        heapq.heapify(by_load)
        for_agents: list[DatumSpec] = []
        for prompt in prompts:
            if prompt["task_name"] not in self.environments:
                raise ValueError(
                    f"{prompt['uid']}: no environment for task {prompt['task_name']!r}. Environments are given by the "
                    f"datasets' task names; known are {', '.join(map(repr, self.environments)) or 'none'}"
                )
            if self._agents.handles(prompt):
                for_agents.append(prompt)
                self._open_group(prompt, sampling, generations, step, PLAYED)
                continue
            engine = by_load[0][1]  # a whole group to one engine: its prompt is prefilled once
            self._open_group(prompt, sampling, generations, step, engine)
            turns = _prompt_turns(prompt)
            requests[engine] += [self._first_request(prompt, step, index, turns) for index in range(generations)]
            heapq.heapreplace(by_load, (self._load[engine], engine))
        for engine in sorted(requests):
            if self.limits.together:
                self._send(engine, step, sampling, requests[engine])
            else:
                self._queue(engine, step, sampling, requests[engine])
        if not self.limits.together:
            self._send_queued()
        self._agents.dispatch(for_agents, sampling, generations=generations, step=step)

    def _open_group(self, prompt: DatumSpec, sampling: Sampling, generations: int, step: int, engine: int) -> None:
        new = (lambda: Conversation({}, ())) if engine == PLAYED else partial(self._new_conversation, prompt)
        conversations = [new() for _ in range(generations)]
        group = self._groups[prompt["uid"]] = _OpenGroup(prompt, step, sampling, engine, conversations, generations)
        self._load[engine] += group.load

    def _new_conversation(self, prompt: DatumSpec) -> Conversation:
        info = prompt["extra_env_info"]
        if self.limits.max_turns > 1:  # an environment may keep each sample's state in its metadata
            info = copy.deepcopy(info)
        return Conversation(info, tuple(prompt.get("stop_strings") or ()))

    def _first_request(self, prompt: DatumSpec, step: int, index: int, turns: tuple[Turn, ...]) -> GenerationRequest:
        uid = prompt["uid"]
        stop = tuple(prompt.get("stop_strings") or ())
        return GenerationRequest(uid, index, turns, sample_seed(self.seed, step, uid, index), stop)

    def drop(self, uids: Collection[str]) -> None:
        """Drop these prompts and abort their samples. They may be dispatched again."""
        self._scorer.drop(uids)
        self._finished = deque(group for group in self._finished if group.uid not in uids)
        self._forget_queued(uids)
        self._agents.drop(uids)
        engines = self._forget_expected(uids)
        for call in self._calls.values():  # their samples may still come, and must not pass for those of a new dispatch
            call.closed |= call.engine in engines
        for uid in uids:
            self._forget_group(uid)
        aborts = [(self._abort_on_engine(engine, uids), engine) for engine in sorted(engines)]
        for answer, engine in aborts:
            self._confirm_abort(answer, engine)

    def _forget_group(self, uid: str) -> _OpenGroup | None:
        if (group := self._groups.pop(uid, None)) is not None:
            self._load[group.engine] -= group.load
        return group

    def _forget_queued(self, uids: Collection[str]) -> None:
        for entries in self._queued.values():
            entries[:] = [entry for entry in entries if entry[1].uid not in uids]
            heapq.heapify(entries)

    def _forget_expected(self, uids: Collection[str]) -> set[int]:
        """Expect no more samples of these prompts. Return the engines that were generating some."""
        for join in [join for join in self._joins.values() if any(uid in uids for uid, _ in join.requests)]:
            del self._joins[id(join.answer)]
            self._take_join(join)  # an abort that overtakes its requests would miss them
        self._forget_queued(uids)
        engines = set()
        for call in self._calls.values():
            if unwanted := [key for key in call.expected if key[0] in uids]:
                engines.add(call.engine)
                for key in unwanted:
                    del call.expected[key]
        return engines

    def _abort_on_engine(self, engine: int, uids: Collection[str]) -> Future:
        return remote_call(self.engines.slots[engine].worker, EngineWorker.give_up, purpose="giving samples up")(
            tuple(uids)
        )

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
        while True:
            generating = self.generating
            with self._hooks.phase("generate" if generating else "reward"):
                while not self._finished and self.generating == generating:
                    self._progress()
                if self._finished:
                    return self._finished.popleft()

    def each_group(
        self, prompts: Iterable[DatumSpec], sampling: Sampling, *, generations: int, most: int
    ) -> Iterator[Group]:
        """Yield the groups of these prompts as they finish, with at most `most` prompts in flight."""
        waiting, in_flight = iter(prompts), 0
        while True:
            while in_flight < most and (prompt := next(waiting, None)) is not None:
                self.dispatch([prompt], sampling, generations=generations, step=0)
                in_flight += 1
            if not in_flight:
                return
            group = self.next_group()
            in_flight -= 1
            yield group

    def _progress(self) -> None:
        """Wait for what comes next, and process it."""
        for engine, error in list(self.engines.deaths.items()):
            self._handle_failure(engine, error)
        waiting = self._without_engine()
        if waiting or (self._agents.awaited() and not self.engines.reachable()):
            self._faults.restore(waiting)
            self._send_queued()
        self.take(self._wait())

    def _wait(self) -> Sequence[Future | Stream]:
        """Return those of `awaited` that are ready; none if an environment or an engine exceeded its deadline."""
        timeout_s = self.cluster.call_timeout_s
        left_s = min(self._scorer.seconds_left(), self._faults.seconds_left())
        things = self.awaited()
        if not things:
            self._scorer.send(hold=False)  # nothing is under way that could join it
            things = self.awaited()
        try:
            return self.cluster.ready(things, min(left_s, timeout_s), "samples and verdicts", self._hooks.watch)
        except DeadlineExceeded as error:
            if (late := self._faults.late_engine()) is not None:
                name = self.engines.slots[late].worker.name
                self._handle_failure(late, DeadlineExceeded("samples", name, timeout_s, error.detail))
            elif left_s == timeout_s:
                raise
            return ()

    def awaited(self) -> list[Future | Stream]:
        """Return all calls and streams under way."""
        answers = [*(join.answer for join in self._joins.values()), *(answer for answer, _ in self._aborts.values())]
        streams = [call.stream for call in self._calls.values()]
        return [*self._scorer.awaited(), *answers, *streams, *self._agents.awaited()]

    def take(self, ready: Sequence[Future | Stream]) -> None:
        """Process those of `awaited` that are ready; nothing of one that is not awaited any more. Raises what they
        raise. What came together goes to its environment and its engine together: a call costs the driver as much as
        many samples in it."""
        for answer in ready:
            if call := self._calls.get(id(answer)):
                self._take_samples(call)
            elif join := self._joins.pop(id(answer), None):
                self._take_join(join)
            elif abort := self._aborts.pop(id(answer), None):
                self._confirm_abort(*abort)
            elif not self._scorer.take(answer):
                self._agents.take(answer)
        self._advance_scored()
        self._scorer.send()

    def _take_samples(self, call: _EngineCall) -> None:
        """Take the next samples of a stream, its end or its failure."""
        stream = call.stream
        try:
            parcels = next(stream, None)
        except (WorkerFailed, DeadlineExceeded) as error:
            self._handle_failure(call.engine, error, call)
            return
        self._faults.mark_active(call.engine)
        if parcels is None:
            on_their_way = [join.requests for join in self._joins.values() if join.call is call]
            missing = len(call.expected) - sum(map(len, on_their_way))
            if not missing:  # its last samples were aborted, or came too late: their answers say so
                self._end_call(call)
                return
            name, reason = self.engines.slots[call.engine].worker.name, f"its stream ended without {missing} samples"
            self._handle_failure(call.engine, WorkerFailed(name, stream.purpose, reason), call)
            return
        for parcel in parcels:
            key = (parcel.label.uid, parcel.label.generation_index)
            if call.expected.pop(key, None) is not None:  # else it finished before its abort arrived
                sketch = sys.intern(parcel.label.prompt_sketch)  # one object for all samples of a prompt
                self._record_sample(replace(parcel.label, ref=parcel.content, prompt_sketch=sketch))
        if not call.expected:
            self._faults.reset()
            self._take_end(call)

    def _take_join(self, join: _Join) -> None:
        """Take an engine's answer to further requests. Those of a stream that has ended are queued again."""
        engine = join.call.engine
        self._mark_if_idle(engine)
        try:
            if join.answer.result() and join.call in self._calls_of[engine]:
                return
        except (WorkerFailed, DeadlineExceeded) as error:
            self._handle_failure(engine, error, join)
            return
        join.call.closed = True
        for key, request in join.requests.items():
            if join.call.expected.pop(key, None) is not None:  # else it was dropped meanwhile
                group = self._groups[request.uid]
                self._queue(group.engine, group.step, group.sampling, [request])

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
        self._calls_of[call.engine].remove(call)
        self._mark_if_idle(call.engine)
        self._hooks.on_span(
            self.engines.slots[call.engine].worker.name, "generate", call.since, self.cluster.clock.now()
        )

    def _mark_if_idle(self, engine: int) -> None:
        if not self._calls_of[engine] and all(join.call.engine != engine for join in self._joins.values()):
            self._faults.mark_idle(engine)

    def _record_sample(self, sample: TrajectoryRef) -> None:
        """Add a generated turn to its group, and request its reward: at once, or when it is the group's last one."""
        group, index = self._groups[sample.uid], sample.generation_index
        group.conversations[index].sample = sample
        if sample.turns == self.limits.max_turns:
            self._record_end(group, index)
        if not self.limits.together:
            self._submit(group, (index,))
            return
        group.unfinished -= 1
        if not group.unfinished:
            self._submit(group, [i for i, conversation in enumerate(group.conversations) if not conversation.over])

    def _submit(self, group: _OpenGroup, indices: Sequence[int]) -> None:
        """Request the rewards of the last turns of these samples."""
        live = [group.conversations[index] for index in indices]
        metadata = tuple(conversation.metadata for conversation in live)
        references = tuple(conversation.sample.ref for conversation in live if conversation.sample)
        self._scorer.submit(group.prompt["uid"], group.prompt["task_name"], metadata, references, indices)

    def _record_end(self, group: _OpenGroup, index: int) -> None:
        """Record that a sample's last turn is generated. If its group has enough samples now, drop the others."""
        group.ended.add(index)
        self._hooks.on_sample()
        if (sample := group.conversations[index].sample) is not None:
            self._remember_length(sample)
        if len(group.ended) == self._enough_samples and len(group.ended) < len(group.conversations):
            self._drop_unfinished(group, index)

    def _record_played(self, sample: TrajectoryRef, score: Score) -> None:
        """Record a sample that an agent has played to its end."""
        group = self._groups[sample.uid]
        conversation = group.conversations[sample.generation_index]
        conversation.sample, conversation.score, conversation.over = sample, score, True
        conversation.ended_at = self.cluster.clock.now()
        self._hooks.on_sample()
        group.unfinished -= 1
        if not group.unfinished:
            self._finished.append(self._close_group(sample.uid))

    def _drop_unfinished(self, group: _OpenGroup, last: int) -> None:
        """Complete a group with the samples that have ended, `last` the last of them; abort the others."""
        uid = group.prompt["uid"]
        others = set(range(len(group.conversations))) - group.ended
        for index in others:
            conversation = group.conversations[index]
            conversation.over, conversation.sample, conversation.score = True, None, None
        if self.limits.together:
            group.unfinished = 1  # `last`, which is being recorded
        else:
            group.unfinished -= len(others)
            self._scorer.drop([uid], others)
        for engine in self._forget_expected([uid]):
            answer = self._abort_on_engine(engine, [uid])
            self._aborts[id(answer)] = answer, engine

    def _advance_scored(self) -> None:
        """Take the rewards that have come: close groups that are done, send the next turns of the others."""
        while (scored := self._scorer.next()) is not None:
            group = self._groups[scored.uid]
            self._queue_next_turns(group, scored.indices, scored.outcomes)
            if not group.unfinished:
                self._finished.append(self._close_group(scored.uid))
        self._send_queued()

    def _queue_next_turns(self, group: _OpenGroup, indices: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        if not self.limits.together:
            group.unfinished -= len(indices)
        for index, outcome in zip(indices, outcomes, strict=True):
            conversation = group.conversations[index]
            sample = conversation.sample
            assert sample is not None
            request = None
            if conversation.judged(outcome, self.limits):
                assert self._template is not None and outcome.observation is not None
                turn = self._template.turn(outcome.observation, outcome.role, sample.stop_token)
                seed = sample_seed(self.seed, group.step, sample.uid, sample.generation_index, sample.turns)
                request = conversation.next_request(turn, seed, self.limits)
            if request is not None:
                self._queue(group.engine, group.step, group.sampling, [request])
                group.unfinished += 1
                continue
            conversation.ended_at = self.cluster.clock.now()
            if sample.turns < self.limits.max_turns:
                self._record_end(group, index)

    def _queue(self, engine: int, step: int, sampling: Sampling, requests: Sequence[GenerationRequest]) -> None:
        """Let requests wait for their engine. Next turns come first, as their environment and the engine's cache hold
        what they continue; then those of which most tokens are expected, so that they are not the step's last ones."""
        entries = self._queued[engine, step, sampling]
        for request in requests:
            self._queued_ever += 1
            urgency = (request.continues is None, -self._expected_tokens(request.uid), self._queued_ever)
            heapq.heappush(entries, (urgency, request))

    def _expected_tokens(self, uid: str) -> float:
        """Return the mean tokens of the prompt's samples so far, in earlier epochs too; 0 where there are none."""
        return self._lengths.get(uid.partition("@")[0], (0, 0.0))[1]

    def _remember_length(self, sample: TrajectoryRef) -> None:
        prompt = sample.uid.partition("@")[0]
        count, mean = self._lengths.pop(prompt, (0, 0.0))
        self._lengths[prompt] = count + 1, mean + (sample.generated_length - mean) / (count + 1)
        if len(self._lengths) > REMEMBERED:
            self._lengths.popitem(last=False)

    def _send_queued(self) -> None:
        """Send the queued requests of each engine that can take them. If turns are taken together: when nothing of
        that engine and step is being generated or scored. Otherwise as many as the engine has room for, oldest step
        first, in a stream of their own or to one that is open."""
        if not self._queued:
            return
        if self.limits.together:
            busy = {(call.engine, call.step) for call in self._calls.values()}
            busy |= {(group.engine, group.step) for group in map(self._groups.__getitem__, self._scorer.uids())}
            ready = [key for key in self._queued if key[:2] not in busy]
        else:
            ready = sorted(self._queued, key=lambda key: key[1])
        for key in ready:
            engine, entries = key[0], self._queued[key]
            if engine not in self.engines.lost and (count := min(len(entries), self._room(engine))):
                self._send(*key, [heapq.heappop(entries)[1] for _ in range(count)], self._open_stream(engine))
            if not entries:
                del self._queued[key]
        if self._max_running is not None:  # otherwise they only wait for others' way to the stream that they will join
            self._most_queued = max(self._most_queued, sum(map(len, self._queued.values())) - self._without_engine())

    def _room(self, engine: int) -> int:
        """Return how many requests can be sent to an engine now."""
        calls = self._calls_of[engine]
        if self.limits.together or (self._max_running is None and len(calls) < STREAMS):
            return sys.maxsize
        joining = any(join.call.engine == engine for join in self._joins.values())  # what comes meanwhile goes together
        if len(calls) >= STREAMS and (joining or (len(calls) >= MAX_STREAMS and self._open_stream(engine) is None)):
            return 0
        running = sum(len(call.expected) for call in calls)
        return sys.maxsize if self._max_running is None else max(0, self._max_running - running)

    def _open_stream(self, engine: int) -> _EngineCall | None:
        """Return the stream of an engine that further requests join; None: they get a stream of their own."""
        calls = self._calls_of[engine]
        if self.limits.together or len(calls) < STREAMS:
            return None
        return max((c for c in calls if c.expected and not c.closed), key=lambda call: len(call.expected), default=None)

    def _close_group(self, uid: str) -> Group:
        group = self._forget_group(uid)
        assert group is not None
        finished = [(c.sample, c.score, c.ended_at) for c in group.conversations if c.sample and c.score]
        samples, scores, ended_at = zip(*finished, strict=True)
        return Group(group.prompt, samples, scores, ended_at)

    def _send(
        self,
        engine: int,
        step: int,
        sampling: Sampling,
        requests: list[GenerationRequest],
        joined: _EngineCall | None = None,
    ) -> None:
        """Send requests to an engine, in a stream of their own or to an open one, `joined`."""
        if engine in self.engines.lost:
            self._queue(engine, step, sampling, requests)
            return
        worker, purpose = self.engines.slots[engine].worker, f"{len(requests)} samples of step {step}"
        expected = {(request.uid, request.generation_index): request for request in requests}
        if joined is not None:
            answer = remote_call(worker, EngineWorker.join, purpose=purpose)(joined.name, requests, sampling)
            joined.expected |= expected
            self._joins[id(answer)] = _Join(self._calls_made, joined, answer, expected)
            return
        self._calls_made += 1
        name = f"{self._name}-{self._calls_made}"
        stream = remote_stream(worker, EngineWorker.generate_refs, purpose=purpose)(requests, sampling, name)
        if not self._calls_of[engine]:
            self._faults.mark_active(engine)
        call = self._calls[id(stream)] = _EngineCall(
            self._calls_made, engine, name, step, stream, expected, worker, self.cluster.clock.now()
        )  # fmt: skip
        self._calls_of[engine].append(call)

    def _handle_failure(
        self, engine: int, error: WorkerFailed | DeadlineExceeded, failed: _EngineCall | _Join | None = None
    ) -> None:
        """Repeat what a failed call, or a lost engine with all its calls, did not finish. May raise `error`."""
        name, lost = self.engines.slots[engine].worker.name, False
        if not self._is_counted(engine, error, failed):
            lost = self._faults.handle(error, engine)
            self._failed_at[engine] = self._calls_made
        target = self._faults.next_engine(engine)
        calls = [call for call in self._calls_of[engine] if lost or call is failed]
        joins = [join for join in self._joins.values() if join.call in calls or (lost and join.call.engine == engine)]
        unfinished: dict[tuple[str, int], GenerationRequest] = {}
        for join in [*joins, *([failed] if isinstance(failed, _Join) else [])]:
            self._joins.pop(id(join.answer), None)
            unfinished |= {key: request for key, request in join.requests.items() if join.call.expected.pop(key, None)}
        for call in calls:
            self._end_call(call)
            unfinished |= call.expected
        self._repeat(list(unfinished.values()), target, f"{name}: {cause(error)}", error)
        if lost:
            self._aborts = {key: abort for key, abort in self._aborts.items() if abort[1] != engine}
            self._move_groups(engine, target)

    def _is_counted(self, engine: int, error: Exception, failed: _EngineCall | _Join | None) -> bool:
        """Whether the failure was counted before: a step of an engine that fails ends all its calls, one by one. So
        does the end of an engine that a refit has found dead, and replaced."""
        if failed is None:
            return False
        call = failed.call if isinstance(failed, _Join) else failed
        if call.worker is not self.engines.slots[engine].worker:
            return True
        if isinstance(error, WorkerDied | DeadlineExceeded):
            return False
        return failed.number <= self._failed_at.get(engine, 0) and not isinstance(error.__cause__, ValueError)

    def _repeat(self, requests: list[GenerationRequest], engine: int, reason: str, error: Exception) -> None:
        """Generate samples of a failed call again: the turn under way, or, if the turns before are lost, all of
        them."""
        for uid in dict.fromkeys(request.uid for request in requests):
            self._hooks.on_retry(uid, reason)
        if _has_lost_objects(error):
            requests = [self._start_again(request) for request in requests]
        by_step: dict[tuple[int, Sampling], list[GenerationRequest]] = defaultdict(list)
        for request in requests:
            group = self._groups[request.uid]
            by_step[group.step, group.sampling].append(request)
        for (step, sampling), few in by_step.items():
            self._send(engine, step, sampling, few)

    def _start_again(self, request: GenerationRequest) -> GenerationRequest:
        group, index = self._groups[request.uid], request.generation_index
        group.conversations[index] = self._new_conversation(group.prompt)
        return self._first_request(group.prompt, group.step, index, _prompt_turns(group.prompt))

    def _move_groups(self, lost: int, target: int) -> None:
        """Let engine `target` generate the later turns of a lost engine's groups; it gets their trajectories so far."""
        for group in self._groups.values():
            group.engine = target if group.engine == lost else group.engine
        moved = self._load.pop(lost, 0)
        self._load[target] += moved
        for key in [key for key in self._queued if key[0] == lost and lost != target]:
            entries = self._queued[target, *key[1:]]
            entries += self._queued.pop(key)
            heapq.heapify(entries)


def _prompt_turns(prompt: DatumSpec) -> tuple[Turn, ...]:
    return tuple(
        Turn(role=message["role"], token_ids=message["token_ids"], text=message["content"])
        for message in prompt["message_log"]
    )


def _has_lost_objects(error: BaseException | None) -> bool:
    """Return whether the store has lost something that a call needed."""
    while error is not None:
        if isinstance(error, ObjectLost):
            return True
        error = error.__cause__
    return False
