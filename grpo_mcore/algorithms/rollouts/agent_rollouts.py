"""Samples that an environment plays by itself, as a NeMo Gym does: the driver asks for groups and takes what comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.cluster import DeadlineExceeded, Parcel, Stream, WorkerDied
from grpo_mcore.environments.nemo_gym import GymOutcome, GymSample
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.seeds import sample_seed
from grpo_mcore.rollout.trajectory import Sampling, TrajectoryRef

_FAILURES = 3  # of an environment in a row, without any sample between them: more end the run


class PlayerWorker:
    """An environment that plays, whose trajectories stay in the cluster's store."""

    def __init__(self, cls: type, section: Mapping[str, Any]) -> None:
        self._environment = cls(section)

    def play_refs(
        self, samples: Sequence[GymSample], sampling: Sampling, endpoint: Any, keep_results: bool
    ) -> Iterator[Any]:
        """Of each sample Parcel((TrajectoryRef without its ref, GymOutcome without its trajectory), trajectory), or the
        GymOutcome alone where there is no trajectory."""
        for outcome in self._environment.play(samples, sampling, endpoint, keep_results):
            if outcome.trajectory is None:
                yield outcome
            else:
                sample = replace(TrajectoryRef.of(outcome.trajectory, None), cut_turns=outcome.cut_turns)
                yield Parcel((sample, replace(outcome, trajectory=None)), outcome.trajectory)

    def shutdown(self) -> None:
        self._environment.shutdown()


@dataclass(eq=False)
class AgentBatch:
    """The samples of a dispatch that an environment plays. `left`: those that are still to come; `unwanted`: how many
    more come that were given up."""

    worker: Any
    sampling: Sampling
    left: dict[tuple[str, int], GymSample]
    unwanted: int = 0
    stream: Stream | None = None


@dataclass
class _OpenGroup:
    prompt: Any
    samples: dict[int, TrajectoryRef]
    outcomes: dict[int, GymOutcome]
    generations: int


class AgentRollouts:
    """`environments`: task name -> EnvironmentWorker of those that play. `on_outcome`: gets every outcome, and with
    it what the environment sent."""

    def __init__(
        self,
        environments: Mapping[str, Any],
        engines: EngineGroup,
        *,
        seed: int,
        on_sample: Callable[[], None],
        on_outcome: Callable[[GymOutcome], None] | None = None,
    ) -> None:
        if environments and engines.endpoint is None:
            raise ValueError(
                f"the environments of {', '.join(environments)} play samples themselves, which needs the policy's "
                "endpoint: set policy.generation.vllm_cfg.expose_http_server"
            )
        self._environments, self._engines, self._seed = environments, engines, seed
        self._on_sample, self._on_outcome = on_sample, on_outcome
        self._open: dict[str, _OpenGroup] = {}
        self._games: dict[int, AgentBatch] = {}  # by id of the stream
        self._failures = 0
        self._finished: deque[Group] = deque()

    def plays(self, prompt: Any) -> bool:
        return prompt["task_name"] in self._environments

    def awaited(self) -> list[Stream]:
        return [game.stream for game in self._games.values() if game.stream is not None]

    def dispatch(self, prompts: Sequence[Any], sampling: Sampling, *, generations: int, step: int) -> None:
        """Asks for `generations` samples of each prompt. Does not wait."""
        by_worker: dict[int, tuple[Any, list[GymSample]]] = {}
        for prompt in prompts:
            uid, task = prompt["uid"], prompt["extra_env_info"].get("gym_task")
            if task is None:
                raise ValueError(
                    f"{uid}: the environment of task {prompt['task_name']!r} plays the tasks of a Gym, "
                    "which dataset_name: NemoGymDataset reads"
                )
            self._open[uid] = _OpenGroup(prompt, {}, {}, generations)
            worker = self._environments[prompt["task_name"]]
            by_worker.setdefault(id(worker), (worker, []))[1].extend(
                GymSample(uid, index, task, prompt["idx"], sample_seed(self._seed, step, uid, index))
                for index in range(generations)
            )
        for worker, samples in by_worker.values():
            self._start(AgentBatch(worker, sampling, {(s.uid, s.generation_index): s for s in samples}))

    def _start(self, game: AgentBatch) -> None:
        assert self._engines.endpoint is not None
        samples = list(game.left.values())
        arguments = (samples, game.sampling, self._engines.endpoint.address, self._on_outcome is not None)
        what = f"{len(samples)} samples that {game.worker.name} plays"
        game.stream = game.worker.stream("play_refs", *arguments, timeout_s=game.worker.timeout_s, what=what)
        self._games[id(game.stream)] = game

    def take(self, ready: Any) -> bool:
        """Takes what a stream of ours has, if it is one. Raises what it raises; an environment that has died, or that
        hangs, is started anew and asked again."""
        game = self._games.get(id(ready))
        if game is None:
            return False
        try:
            item = next(ready)
        except (WorkerDied, DeadlineExceeded):
            self._failures += 1
            if self._failures > _FAILURES:
                raise
            self._start_anew(game.worker)
            return True
        self._failures = 0
        if isinstance(item, Parcel):
            sample, outcome = item.label
            self._note(game, replace(sample, ref=item.content), outcome)
        else:
            self._note(game, self._nothing(item), item)
        if not game.left and not game.unwanted:
            del self._games[id(ready)]
            next(ready, None)  # nothing is left but its end
        return True

    def forget(self, uids: Collection[str]) -> None:
        """Nobody wants the samples of these prompts any more. They are played to their end, as a Gym cannot be told."""
        for uid in uids:
            self._open.pop(uid, None)
        for game in self._games.values():
            wanted = {key: sample for key, sample in game.left.items() if key[0] not in uids}
            game.unwanted += len(game.left) - len(wanted)
            game.left = wanted
        self._finished = deque(group for group in self._finished if group.uid not in uids)

    def _start_anew(self, worker: Any) -> None:
        games = [game for game in self._games.values() if game.worker is worker]
        for game in games:
            del self._games[id(game.stream)]
        worker.restart()
        for game in games:
            game.unwanted = 0
            if game.left:
                self._start(game)

    def _nothing(self, outcome: GymOutcome) -> TrajectoryRef:
        """Stands for a sample of which there is no trajectory."""
        return TrajectoryRef(
            outcome.uid, outcome.generation_index, 0, 0, 0, self._engines.weight_version, False, "abort", None, turns=0
        )

    def _note(self, game: AgentBatch, sample: TrajectoryRef, outcome: GymOutcome) -> None:
        if game.left.pop((outcome.uid, outcome.generation_index), None) is None:
            game.unwanted -= 1
            return
        self._on_sample()
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        group = self._open[outcome.uid]
        group.samples[outcome.generation_index] = sample
        group.outcomes[outcome.generation_index] = outcome
        if len(group.samples) == group.generations:
            del self._open[outcome.uid]
            order = range(group.generations)
            scores = tuple(group.outcomes[index].score for index in order)
            self._finished.append(Group(group.prompt, tuple(group.samples[index] for index in order), scores))

    def finished(self) -> Iterator[Group]:
        """Takes the groups that are whole."""
        while self._finished:
            yield self._finished.popleft()
