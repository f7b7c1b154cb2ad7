"""Send prompts to the engines and the environments; return scored groups.

    life_of(sample) ---- what it waits for ---> its queue ---- calls ---> engines, environments
          ^                                       |
          +-------------- its result -------------+

`rollout/life.py` says what a sample does, one step after the other. `Rollouts` gives what each sample waits for to a
queue: `EngineQueues` for a turn of its engine, the `EnvQueue` of its environment for a score, or `AgentRollouts` where
agents of the environment take all turns. The queues make calls of what waits, and ask again where a call failed. Each
has `add` and `send`, `awaited` and `take`, `drop`, and `seconds_left` until `send` must be called again or a call is
late.
"""

import json
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from grpo_mcore.cluster import Cluster, DeadlineExceeded, Future, Stream
from grpo_mcore.data import DatumSpec, TurnTemplate
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.interfaces import GenerationInterface
from grpo_mcore.driver.rollouts.agent_rollouts import AgentRollouts
from grpo_mcore.driver.rollouts.engine_queues import EngineQueues
from grpo_mcore.driver.rollouts.hooks import NO_HOOKS, RolloutHooks
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker, EnvQueue
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.images import take_images
from grpo_mcore.rollout.life import OpenGroup, OpenSample, Rules, ScoreTurn, TurnLimits, Wait
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Score, TrajectoryRef, Turn


class _TurnBarrier:
    """Holds samples that take their turns together: before they are scored, until the turn of all unfinished samples
    of their group is generated; before their next turn, until all unfinished samples of their step on their engine have
    come."""

    def __init__(self) -> None:
        self.generated: dict[str, list[OpenSample]] = defaultdict(list)  # by uid
        self.scored: list[OpenSample] = []

    def to_score(self, sample: OpenSample) -> list[OpenSample]:
        """Add a sample whose turn is generated. Return those that are scored now, in order."""
        group = sample.group
        self.generated[group.uid].append(sample)
        if len(self.generated[group.uid]) < group.unfinished:
            return []
        return sorted(self.generated.pop(group.uid), key=lambda sample: sample.index)

    def next_turns(self, groups: Iterable[OpenGroup]) -> list[OpenSample]:
        """Return those of `scored` whose next turn is generated now. `groups`: all that are open."""
        if not self.scored:
            return []
        missing: Counter[tuple[int, int]] = Counter()
        for group in groups:
            missing[group.engine, group.step] += group.unfinished
        missing.subtract((sample.group.engine, sample.group.step) for sample in self.scored)
        held, released = list[OpenSample](), list[OpenSample]()
        for sample in self.scored:
            (held if missing[sample.group.engine, sample.group.step] else released).append(sample)
        self.scored = held
        return released

    def drop(self) -> None:
        """Forget dropped samples."""
        for held in (self.scored, *self.generated.values()):
            held[:] = [sample for sample in held if sample.wait is not None]


class Rollouts:
    """Generates and scores groups. Several prompts are in flight; groups come back in the order in which they finish.

    Consumes: the prompts given to `dispatch`.
    Waits for: samples from the engines' streams, rewards from the environments, samples from environments that run
        agents, and the engines' answers to aborts.
    Unblocked by: whichever of these comes first. A deadline also unblocks it: an environment or an engine that exceeds
        it is restarted, and what it was asked is asked again.

    A sample is scored as soon as its turn is generated, and its engine takes its next turn into the running batch as
    soon as its environment has answered; if turns are taken together (`TurnLimits.together`), with the others behind
    the `_TurnBarrier`. All of this goes on while the driver waits for something else, if that wait is given this object
    as `BackgroundWork`.
    """

    def __init__(
        self,
        engines: GenerationInterface,
        environments: Mapping[str, EnvironmentWorker],
        tokenizer: Any,
        limits: TurnLimits,
        *,
        seed: int,
        retries: Retries | None = None,
        enough_samples: int | None = None,
        max_running: int | None = None,
        hooks: RolloutHooks = NO_HOOKS,
    ) -> None:
        """`environments`: by task name. `retries`: limit for calls that fail while their engine is alive.
        `enough_samples`: a group is complete with this many samples and its other samples are aborted; None: with all
        of them. If turns are taken together, only for samples of one turn. `max_running`: samples that an engine
        generates at a time, unless turns are taken together; None: all of them.

        Raises DataError if samples may have several turns and the tokenizer's chat template cannot hold them.
        """
        self.engines, self.environments, self.limits = engines, environments, limits
        self.cluster: Cluster = engines.cluster
        self._hooks, self._enough_samples = hooks, enough_samples
        # One for each `chat_template_kwargs` of rows, as JSON text.
        self._template = lru_cache(64)(lambda chosen: TurnTemplate(tokenizer, engines.images, json.loads(chosen)))
        if limits.max_turns > 1:
            self._template("{}")
        self._rules = Rules(limits, seed, self._as_turn if limits.max_turns > 1 else None)
        self._barrier = _TurnBarrier() if limits.together else None
        self._open: dict[str, OpenGroup] = {}  # those under way, by uid
        self._finished: deque[Group] = deque()
        self._engine_queues = EngineQueues(
            engines, retries or Retries(0, 0.0), hooks, self._resume, self._open,
            together=limits.together, max_running=max_running,
        )  # fmt: skip
        queue_of = {environment: self._queue_of(environment) for environment in dict.fromkeys(environments.values())}
        self._queue_of_task = {task: queue_of[environment] for task, environment in environments.items()}
        self._agents = [queue for queue in queue_of.values() if isinstance(queue, AgentRollouts)]
        self._queues = (*queue_of.values(), self._engine_queues)

    def _queue_of(self, environment: EnvironmentWorker) -> EnvQueue | AgentRollouts:
        if environment.runs_agents:
            return AgentRollouts(environment, self.engines, self._resume, self._hooks.on_outcome)
        return EnvQueue(environment, self._resume, self._hooks, joins=not self.limits.together)

    def dispatch(self, prompts: Sequence[DatumSpec], sampling: Sampling, *, generations: int, step: int) -> None:
        """Send `generations` requests for each prompt to the engines. Does not wait for samples."""
        self._engine_queues.confirm_aborts()
        for prompt in prompts:
            if prompt["task_name"] not in self.environments:
                raise ValueError(
                    f"{prompt['uid']}: no environment for task {prompt['task_name']!r}. Environments are given by the "
                    f"datasets' task names; known are {', '.join(map(repr, self.environments)) or 'none'}"
                )
        groups = [self._open_group(prompt, sampling, generations, step) for prompt in prompts]
        self._engine_queues.assign(group for group in groups if not group.has_agents)
        for group in groups:
            self._open[group.uid] = group
            for sample in group.samples:
                self._let_wait(sample)
        self._send()

    def _open_group(self, prompt: DatumSpec, sampling: Sampling, generations: int, step: int) -> OpenGroup:
        """Return a prompt's group. Its images go into the object store, once, and no further with the prompt."""
        files = prompt.get("images", {})
        images = {digest: self.cluster.store.put(file) for digest, file in files.items()}
        kept = cast(DatumSpec, {key: value for key, value in prompt.items() if key != "images"})
        has_agents = self._queue_of_task[prompt["task_name"]] in self._agents
        return OpenGroup(kept if images else prompt, step, sampling, self._rules, generations, images, has_agents)

    def _as_turn(
        self, prompt: DatumSpec, content: Any, role: str, stop_token: int | None
    ) -> tuple[Turn, dict[str, Any]]:
        """Return an environment's message as a turn, with references to its images by digest."""
        template = self._template(json.dumps(prompt["extra_env_info"].get("chat_template_kwargs") or {}))
        turn, files = template.turn(content, role, stop_token), dict[str, bytes]()
        if turn.images and self.engines.images is not None:
            files = self.engines.images.by_digest(take_images([{"role": role, "content": content}])[1])
        return turn, {digest: self.cluster.store.put(file) for digest, file in files.items()}

    def _let_wait(self, sample: OpenSample) -> None:
        """Give what a sample waits for to the queue that brings it."""
        wait, barrier = sample.wait, self._barrier
        if isinstance(wait, GenerationRequest):
            if barrier is None or wait.continues is None:
                self._engine_queues.add((sample,))
            else:
                barrier.scored.append(sample)
            return
        ready: Sequence[OpenSample] = (sample,)
        if isinstance(wait, ScoreTurn):
            if _is_last(wait):
                self._record_last_turn(sample, wait.trajectory)
            ready = ready if barrier is None else barrier.to_score(sample)
        self._queue_of_task[sample.group.prompt["task_name"]].add(ready)

    def _resume(self, sample: OpenSample, result: Any) -> None:
        """Let a sample's life go on, with what it has waited for, until it waits again or ends."""
        try:
            sample.wait = sample.life.send(result)
        except StopIteration as end:
            self._finish(sample, *end.value)
        else:
            self._let_wait(sample)

    def _finish(self, sample: OpenSample, trajectory: TrajectoryRef, score: Score) -> None:
        group, waited, sample.wait = sample.group, sample.wait, None
        sample.result = trajectory, score, self.cluster.clock.now()
        if not _is_last(waited):
            self._record_last_turn(sample, trajectory)
        group.unfinished -= 1
        if not group.unfinished:
            finished = [other.result for other in self._open.pop(group.uid).close() if other.result is not None]
            self._finished.append(Group(group.prompt, *zip(*finished, strict=True)))

    def _record_last_turn(self, sample: OpenSample, trajectory: TrajectoryRef) -> None:
        """Record that a sample's last turn is generated. If its group has enough samples now, drop the others."""
        group = sample.group
        self._hooks.on_sample()
        self._engine_queues.remember_length(trajectory)
        if self._enough_samples is not None:
            others = [other for other in group.samples if other.wait is not None and not _is_last(other.wait)]
            if others and group.size - len(others) == self._enough_samples:
                group.unfinished -= len(others)
                self._drop(others, close=False)

    def drop(self, uids: Collection[str]) -> None:
        """Drop these prompts and abort their samples. They may be dispatched again."""
        self._finished = deque(group for group in self._finished if group.uid not in uids)
        self._drop([sample for uid in uids if uid in self._open for sample in self._open.pop(uid).close()], close=True)
        self._engine_queues.confirm_aborts()
        self._send()

    def _drop(self, samples: Collection[OpenSample], *, close: bool) -> None:
        for sample in samples:
            sample.drop()
        if self._barrier:
            self._barrier.drop()
        for queue in self._queues:
            queue.drop(samples, close=close)

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

    @property
    def generating(self) -> bool:
        """Whether samples are still being generated; otherwise only rewards are waited for."""
        return self._engine_queues.generating or any(queue.awaited() for queue in self._agents)

    def most_queued(self) -> int:
        """Return the largest number of samples that waited for room on their engines since the last call; 0 if there is
        no limit."""
        return self._engine_queues.most_queued()

    def _progress(self) -> None:
        """Wait for what comes next, and process it: some of `awaited`, or that an environment or an engine has exceeded
        its deadline."""
        if self.engines.deaths:
            self._engine_queues.take_deaths()
            self._send()
        if self.generating and (self._engine_queues.without_engine() or not self.engines.reachable()):
            self._engine_queues.restore()
            self._send()
        if not self.awaited():
            self._send(hold=False)  # nothing is under way that could join what is held back
        timeout_s = self.cluster.call_timeout_s
        left_s = min(queue.seconds_left() for queue in self._queues)
        try:
            ready = self.cluster.ready(self.awaited(), min(left_s, timeout_s), "samples and scores")
        except DeadlineExceeded as error:
            if not self._engine_queues.take_late(error.detail) and left_s >= timeout_s:
                raise
            ready = ()
        self.take(ready)

    def awaited(self) -> list[Future | Stream]:
        """Return all calls and streams under way."""
        return [thing for queue in self._queues for thing in queue.awaited()]

    def take(self, ready: Sequence[Future | Stream]) -> None:
        """Process those of `awaited` that are ready; nothing of one that is not awaited any more. Raises what they
        raise. What came together goes to its environment and its engine together: a call costs the driver as much as
        many samples in it."""
        for thing in ready:
            any(queue.take(thing) for queue in self._queues)
        self._send()

    def _send(self, *, hold: bool = True) -> None:
        if self._barrier:
            self._engine_queues.add(self._barrier.next_turns(self._open.values()))
        for queue in reversed(self._queues):  # the engines before the environments: they have more to do
            queue.send(hold=hold)


def _is_last(wait: Wait | None) -> bool:
    """Whether a sample that waits for this has no more turns to generate."""
    return isinstance(wait, ScoreTurn) and wait.is_last
