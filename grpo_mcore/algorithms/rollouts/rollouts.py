"""Send prompts to the engines and the environments; return scored groups.

The life of a sample, turn by turn:

    queued --> generating --> scoring --> done      the environment ended it, or no turn or room is left
      ^             |            |
      |             |            +------> failed    no reward: the environment failed, or the engine aborted it
      |             |            |
      +-------------+            +------> queued    the environment has answered: the next turn
       its engine failed: the same request again

queued: its request waits for its engine. generating: it is in a stream of its engine. scoring: its turn waits for its
environment, or is with it. A sample of a dropped prompt leaves from any state. With `grpo.turns: free` no sample waits
for another one; with `together` those of one step on one engine take their turns in step, and groups are scored whole.
"""

from __future__ import annotations

import copy
import heapq
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_mcore.algorithms.engines.engine_faults import EngineFaults, cause
from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.algorithms.engines.retries import Retries
from grpo_mcore.algorithms.rollouts.agent_rollouts import AgentRollouts
from grpo_mcore.algorithms.rollouts.scoring import EnvironmentWorker, RewardScorer
from grpo_mcore.cluster import Cluster, DeadlineExceeded, Future, ObjectLost, Stream, Worker, WorkerDied, WorkerFailed
from grpo_mcore.data import DatumSpec, TurnTemplate
from grpo_mcore.environments.nemo_gym import GymOutcome
from grpo_mcore.rollout.conversation import Conversation, TurnLimits
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Sampling, TrajectoryRef, Turn, sample_seed

MAX_CALLS = 48
"""Maximum number of generation calls of one engine under way. Each holds a thread of it; the requests of further turns
wait until one has ended, and are then sent in one call."""


@dataclass
class _OpenGroup:
    """A group under way. `engine`: number of the engine that generates its samples. `unfinished`: how many of its
    samples are not over; if they take their turns together, how many are still to be generated in this turn. `ended`:
    generation indexes of samples whose last turn is generated."""

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


@dataclass
class _EngineCall:
    """A generation call under way. `expected`: (prompt uid, generation index) -> request, of samples still to come.
    `number`: calls are numbered in the order in which they were made."""

    number: int
    engine: int
    step: int
    sampling: Sampling
    stream: Stream
    expected: dict[tuple[str, int], GenerationRequest]
    since: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class RolloutHooks:
    """Functions that `Rollouts` calls while it samples."""

    on_sample: Callable[[], None] = lambda: None
    """Called for each sample when its last turn is generated."""
    on_retry: Callable[[str, str], None] = lambda uid, why: None
    """Gets the uid of each prompt of which something is generated again, and the reason."""
    on_restart: Callable[[str, str], None] = lambda worker, why: None
    """Gets the name of each worker that is restarted, and the reason."""
    on_outcome: Callable[[GymOutcome], None] | None = None
    """Gets every outcome of environments that run agents."""
    on_span: Callable[[str, str, float, float], None] = lambda worker, what, start, end: None
    """Gets (worker, what it did, start, end) of each call that has ended, by time.perf_counter."""
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
        engines: EngineGroup,
        environments: Mapping[str, Worker],
        tokenizer: Any,
        limits: TurnLimits,
        *,
        seed: int,
        retries: Retries | None = None,
        enough_samples: int | None = None,
        hooks: RolloutHooks = RolloutHooks(),
    ) -> None:
        """`environments`: by task name. `retries`: limit for calls that fail while their engine is alive.
        `enough_samples`: a group is complete with this many samples and its other samples are aborted; None: with all
        of them. If turns are taken together, only for samples of one turn.

        Raises DataError if samples may have several turns and the tokenizer's chat template cannot hold them.
        """
        self.engines, self.environments, self.limits, self.seed = engines, environments, limits, seed
        self.cluster: Cluster = engines.cluster
        self._hooks, self._enough_samples = hooks, enough_samples
        self._faults = EngineFaults(engines, retries or Retries(0, 0.0), hooks.restore_engines, hooks.on_restart)
        self._template = TurnTemplate(tokenizer) if limits.max_turns > 1 else None
        agents = {
            task: worker
            for task, worker in environments.items()
            if isinstance(worker, EnvironmentWorker) and worker.runs_agents
        }
        self._finished: deque[Group] = deque()
        self._agents = AgentRollouts(
            agents,
            engines,
            seed,
            lambda group: self._finished.append(group),
            hooks.on_sample,
            hooks.on_outcome,
            limits.max_tokens,
        )
        scored = {task: worker for task, worker in environments.items() if task not in agents}
        self._scorer = RewardScorer(scored, self.cluster, hooks.on_restart, hooks.on_span, joins=not limits.together)
        self._groups: dict[str, _OpenGroup] = {}  # by uid
        self._calls: dict[int, _EngineCall] = {}  # by id of the stream
        self._calls_made = 0
        self._calls_of: Counter[int] = Counter()  # engine -> calls under way
        self._failed_at: dict[int, int] = {}  # engine -> calls that had been made when one of its calls last failed
        self._load: Counter[int] = Counter()  # engine -> sum of its groups' loads
        self._aborts: dict[int, tuple[Future, int]] = {}  # not answered yet, by id, with the number of the engine
        # (engine, step, sampling) -> requests not sent yet: of a next turn, or of a lost engine when there is no other
        self._queued: dict[tuple[int, int, Sampling], list[GenerationRequest]] = defaultdict(list)

    @property
    def generating(self) -> bool:
        """Whether samples are still being generated; otherwise only rewards are waited for."""
        return bool(self._calls or self._without_engine() or self._agents.awaited())

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
        candidates = self.engines.serving() or range(len(self.engines.workers))
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
                continue
            engine = by_load[0][1]  # a whole group to one engine: its prompt is prefilled once
            requests[engine] += self._open_group(prompt, sampling, generations, step, engine)
            heapq.heapreplace(by_load, (self._load[engine], engine))
        for engine in sorted(requests):
            self._send(engine, step, sampling, requests[engine], f"samples of step {step}")
        self._agents.dispatch(for_agents, sampling, generations=generations, step=step)

    def _open_group(
        self, prompt: DatumSpec, sampling: Sampling, generations: int, step: int, engine: int
    ) -> list[GenerationRequest]:
        turns = _prompt_turns(prompt)
        conversations = [self._new_conversation(prompt) for _ in range(generations)]
        group = _OpenGroup(prompt, step, sampling, engine, conversations, generations)
        self._groups[prompt["uid"]] = group
        self._load[engine] += group.load
        return [self._first_request(prompt, step, index, turns) for index in range(generations)]

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
        for requests in self._queued.values():
            requests[:] = [request for request in requests if request.uid not in uids]
        self._agents.drop(uids)
        engines = self._forget_expected(uids)
        for uid in uids:
            self._forget_group(uid)
        aborts = [(self._abort_on_engine(engine, uids), engine) for engine in sorted(engines)]
        for answer, engine in aborts:
            self._confirm_abort(answer, engine)

    def _forget_group(self, uid: str) -> _OpenGroup | None:
        if (group := self._groups.pop(uid, None)) is not None:
            self._load[group.engine] -= group.load
        return group

    def _forget_expected(self, uids: Collection[str]) -> set[int]:
        """Expect no more samples of these prompts. Return the engines that were generating some."""
        engines = set()
        for call in self._calls.values():
            if unwanted := [key for key in call.expected if key[0] in uids]:
                engines.add(call.engine)
                for key in unwanted:
                    del call.expected[key]
        return engines

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
        while True:
            generating = self.generating
            with self._hooks.phase("generate" if generating else "reward"):
                while not self._finished and self.generating == generating:
                    self._progress()
                if self._finished:
                    return self._finished.popleft()

    def _progress(self) -> None:
        """Wait for what comes next, and process it."""
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

    def _wait(self) -> Future | Stream | None:
        """Return the first of `awaited` that is ready; None if an environment or an engine exceeded its deadline."""
        timeout_s = self.cluster.call_timeout_s
        left_s = min(self._scorer.seconds_left(), self._faults.seconds_left())
        things = self.awaited()
        if not things:
            self._scorer.flush()
            things = self.awaited()
        try:
            return self.cluster.next_ready(things, min(left_s, timeout_s), "samples and verdicts", self._hooks.watch)
        except DeadlineExceeded as error:
            if (late := self._faults.late_engine()) is not None:
                name = self.engines.workers[late].name
                self._handle_failure(late, DeadlineExceeded("samples", name, timeout_s, error.detail))
            elif left_s == timeout_s:
                raise
            return None

    def awaited(self) -> list[Future | Stream]:
        """Return all calls and streams under way."""
        streams = [call.stream for call in self._calls.values()]
        aborts = [answer for answer, _ in self._aborts.values()]
        return [*self._scorer.awaited(), *streams, *aborts, *self._agents.awaited()]

    def take(self, ready: Future | Stream) -> None:
        """Process one of `awaited` that is ready. Raises what it raises."""
        if abort := self._aborts.pop(id(ready), None):
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
            missing = len(call.expected)
            if not missing:  # its last samples were aborted
                self._end_call(call)
                return
            name, why = self.engines.workers[call.engine].name, f"its stream ended without {missing} samples"
            self._handle_failure(call.engine, WorkerFailed(name, stream.what, why), call)
            return
        key = (parcel.label.uid, parcel.label.generation_index)
        if call.expected.pop(key, None) is None:  # the sample finished before its abort arrived
            return
        self._record_sample(replace(parcel.label, ref=parcel.content))
        if not call.expected:
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
        self._calls_of[call.engine] -= 1
        if not self._calls_of[call.engine]:
            self._faults.mark_idle(call.engine)
        self._hooks.on_span(self.engines.workers[call.engine].name, "generate", call.since, time.perf_counter())

    def _record_sample(self, sample: TrajectoryRef) -> None:
        """Add a generated turn to its group, and request its reward: at once, or when it is the group's last one."""
        group, index = self._groups[sample.uid], sample.generation_index
        group.conversations[index].sample = sample
        if sample.turns == self.limits.max_turns:
            self._record_end(group, index)
        if not self.limits.together:
            self._submit(group, [index])
            return
        group.unfinished -= 1
        if not group.unfinished:
            self._submit(group, [i for i, conversation in enumerate(group.conversations) if not conversation.over])

    def _submit(self, group: _OpenGroup, indices: Sequence[int]) -> None:
        """Request the rewards of the last turns of these samples."""
        live = [group.conversations[index] for index in indices]
        metadata = [conversation.metadata for conversation in live]
        references = [conversation.sample.ref for conversation in live if conversation.sample]
        self._scorer.submit(group.prompt["uid"], group.prompt["task_name"], metadata, references, indices)

    def _record_end(self, group: _OpenGroup, index: int) -> None:
        """Record that a sample's last turn is generated. If its group has enough samples now, drop the others."""
        group.ended.add(index)
        self._hooks.on_sample()
        if len(group.ended) == self._enough_samples and len(group.ended) < len(group.conversations):
            self._drop_unfinished(group, index)

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
        for requests in self._queued.values():
            requests[:] = [request for request in requests if request.uid != uid]
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
                said = self._template.turn(outcome.observation, outcome.role, sample.stop_token)
                seed = sample_seed(self.seed, group.step, sample.uid, sample.generation_index, sample.turns)
                request = conversation.next_request(said, seed, self.limits)
            if request is not None:
                self._queued[group.engine, group.step, group.sampling].append(request)
                group.unfinished += 1
            elif sample.turns < self.limits.max_turns:
                self._record_end(group, index)

    def _send_queued(self) -> None:
        """Send the queued requests of each engine that can take them. If turns are taken together: when nothing of
        that engine and step is being generated or scored."""
        if not self._queued:
            return
        if self.limits.together:
            busy = {(call.engine, call.step) for call in self._calls.values()}
            busy |= {(group.engine, group.step) for group in map(self._groups.__getitem__, self._scorer.uids())}
            ready = [key for key in self._queued if key[:2] not in busy]
        else:
            ready = [key for key in self._queued if self._calls_of[key[0]] < MAX_CALLS]
        for key in ready:
            if key[0] not in self.engines.lost and (requests := self._queued.pop(key)):
                self._send(*key, requests, f"{len(requests)} samples")

    def _close_group(self, uid: str) -> Group:
        group = self._forget_group(uid)
        assert group is not None
        finished = [(each.sample, each.score) for each in group.conversations if each.sample and each.score]
        return Group(group.prompt, tuple(sample for sample, _ in finished), tuple(score for _, score in finished))

    def _send(self, engine: int, step: int, sampling: Sampling, requests: list[GenerationRequest], what: str) -> None:
        if engine in self.engines.lost:
            self._queued[engine, step, sampling] += requests
            return
        stream = self.engines.workers[engine].stream("generate_refs", requests, sampling, what=what)
        expected = {(request.uid, request.generation_index): request for request in requests}
        if not self._calls_of[engine]:
            self._faults.mark_active(engine)
        self._calls_of[engine] += 1
        self._calls_made += 1
        self._calls[id(stream)] = _EngineCall(self._calls_made, engine, step, sampling, stream, expected)

    def _handle_failure(
        self, engine: int, error: WorkerFailed | DeadlineExceeded, failed_call: _EngineCall | None = None
    ) -> None:
        """Repeat what a failed call, or a lost engine with all its calls, did not finish. May raise `error`."""
        name, lost = self.engines.workers[engine].name, False
        if not self._is_counted(engine, error, failed_call):
            lost = self._faults.handle(error, engine)
            self._failed_at[engine] = self._calls_made
        target = self._faults.next_engine(engine)
        for call in [call for call in self._calls.values() if call.engine == engine and (lost or call is failed_call)]:
            self._end_call(call)
            self._repeat(call, target, f"{name}: {cause(error)}", error)
        if lost:
            self._aborts = {key: abort for key, abort in self._aborts.items() if abort[1] != engine}
            self._move_groups(engine, target)

    def _is_counted(self, engine: int, error: Exception, failed_call: _EngineCall | None) -> bool:
        """Whether the failure was counted before: a step of an engine that fails ends all its calls, one by one."""
        if failed_call is None or isinstance(error, WorkerDied | DeadlineExceeded):
            return False
        return failed_call.number <= self._failed_at.get(engine, 0) and not isinstance(error.__cause__, ValueError)

    def _repeat(self, failed: _EngineCall, engine: int, why: str, error: Exception) -> None:
        """Generate the unfinished samples of a failed call again: the turn under way, or, if the turns before are lost,
        all of them."""
        requests, from_start = list(failed.expected.values()), _has_lost_objects(error)
        for uid in dict.fromkeys(request.uid for request in requests):
            self._hooks.on_retry(uid, why)
        if from_start:
            requests = [self._start_again(request) for request in requests]
        if requests:
            self._send(engine, failed.step, failed.sampling, requests, f"{len(requests)} samples again")

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
            self._queued[target, *key[1:]] += self._queued.pop(key)


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
