"""Samples that an environment generates itself by running agents, as a NeMo Gym does: `Rollouts` asks for them here and
gets each as it comes, with its score; it has their groups as those of its own samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from grpo_mcore.cluster import DeadlineExceeded, Future, Parcel, Stream, WorkerFailed, remote_stream
from grpo_mcore.data import DatumSpec
from grpo_mcore.driver.interfaces import GenerationInterface
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.environments.gym.nemo_gym import GymOutcome, GymRequest
from grpo_mcore.rollout.trajectory import Sampling, Score, TrajectoryRef, sample_seed

_MAX_FAILURES = 3
"""Consecutive failures of the environments that are tolerated; the next one ends the run."""


class AgentWorker:
    """An environment that runs agents; their trajectories stay in the cluster's store."""

    def __init__(self, cls: type, section: Mapping[str, Any]) -> None:
        self._environment = cls(section)

    def run_agents(
        self, samples: Sequence[GymRequest], sampling: Sampling, endpoint: Any, keep_results: bool
    ) -> Iterator[Parcel | GymOutcome]:
        """Yield one item a sample: Parcel((TrajectoryRef without its ref, GymOutcome without its trajectory),
        trajectory), or the GymOutcome if there is no trajectory."""
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
    """The samples of one dispatch to one environment. `expected`: samples still to come, by (uid, generation index);
    `num_given_up`: further samples that come although they were given up."""

    worker: EnvironmentWorker
    sampling: Sampling
    stream: Stream
    expected: dict[tuple[str, int], GymRequest]
    num_given_up: int = 0


class AgentRollouts:
    """The calls of environments that run agents, and the samples that they send."""

    def __init__(
        self,
        environments: Mapping[str, EnvironmentWorker],
        engines: GenerationInterface,
        seed: int,
        on_sample: Callable[[TrajectoryRef, Score], None],
        on_outcome: Callable[[GymOutcome], None] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`environments`: environments that run agents, by task name. `on_sample`: gets every sample with its score.
        `on_outcome`: gets every outcome; if given, the environments are asked to send the agents' results with it.
        `max_tokens`: limit of each sample, see `TurnLimits`. Raises ValueError without an endpoint."""
        if environments and engines.endpoint is None:
            raise ValueError(
                f"the environments of {', '.join(environments)} play samples themselves, which needs the policy's "
                "endpoint: set policy.generation.vllm_cfg.expose_http_server"
            )
        self._environments, self._engines, self._seed = environments, engines, seed
        self._on_sample, self._on_outcome = on_sample, on_outcome
        self._max_tokens = max_tokens
        self._batches: dict[int, AgentBatch] = {}  # by id of the stream
        self._failures = 0

    def handles(self, prompt: DatumSpec) -> bool:
        """Return whether the prompt's environment runs agents."""
        return prompt["task_name"] in self._environments

    def awaited(self) -> list[Stream]:
        """Return the streams under way."""
        return [batch.stream for batch in self._batches.values()]

    def dispatch(self, prompts: Sequence[DatumSpec], sampling: Sampling, *, generations: int, step: int) -> None:
        """Ask for `generations` samples of each prompt. Does not wait. Raises ValueError for a prompt without a task
        of the Gym."""
        by_worker: dict[int, tuple[EnvironmentWorker, list[GymRequest]]] = {}
        for prompt in prompts:
            uid, task = prompt["uid"], prompt["extra_env_info"].get("gym_task")
            if task is None:
                raise ValueError(
                    f"{uid}: the environment of task {prompt['task_name']!r} plays the tasks of a Gym, "
                    "which dataset_name: NemoGymDataset reads"
                )
            worker = self._environments[prompt["task_name"]]
            by_worker.setdefault(id(worker), (worker, []))[1].extend(
                GymRequest(uid, index, task, prompt["idx"], sample_seed(self._seed, step, uid, index), self._max_tokens)
                for index in range(generations)
            )
        for worker, samples in by_worker.values():
            self._start(worker, sampling, samples)

    def _start(self, worker: EnvironmentWorker, sampling: Sampling, samples: list[GymRequest]) -> None:
        assert self._engines.endpoint is not None
        purpose = f"{len(samples)} samples that {worker.name} plays"
        run = remote_stream(worker, AgentWorker.run_agents, timeout_s=worker.timeout_s, purpose=purpose)
        stream = run(samples, sampling, self._engines.endpoint.address, self._on_outcome is not None)
        expected = {(sample.uid, sample.generation_index): sample for sample in samples}
        self._batches[id(stream)] = AgentBatch(worker, sampling, stream, expected)

    def take(self, ready: Future | Stream) -> bool:
        """Take the next item of a stream; return False if it is not one of `awaited`. Raises what the stream raises.

        An environment that fails, dies or hangs is restarted and asked again for the samples that did not come."""
        batch = self._batches.get(id(ready))
        if batch is None:
            return False
        try:
            item = next(batch.stream, None)
            if item is None:
                reason = f"it ended without {len(batch.expected)} samples"
                raise WorkerFailed(batch.worker.name, batch.stream.purpose, reason)
        except (WorkerFailed, DeadlineExceeded):
            self._failures += 1
            if self._failures > _MAX_FAILURES:
                raise
            self._restart(batch.worker)
            return True
        self._failures = 0
        if isinstance(item, Parcel):
            sample, outcome = item.label
            self._record(batch, replace(sample, ref=item.content), outcome)
        else:  # a sample without a trajectory
            version = self._engines.weight_version
            aborted = TrajectoryRef(item.uid, item.generation_index, 0, 0, 0, version, False, "abort", None, turns=0)
            self._record(batch, aborted, item)
        if not batch.expected and not batch.num_given_up:
            del self._batches[id(ready)]
            with suppress(WorkerFailed, DeadlineExceeded):  # nothing is missing; the next call finds out
                next(batch.stream, None)  # its end
        return True

    def drop(self, uids: Collection[str]) -> None:
        """Drop the samples of these prompts. The agents finish them all the same, as a Gym cannot be told to stop."""
        for batch in self._batches.values():
            expected = {key: sample for key, sample in batch.expected.items() if key[0] not in uids}
            batch.num_given_up += len(batch.expected) - len(expected)
            batch.expected = expected

    def _restart(self, worker: EnvironmentWorker) -> None:
        """Restart an environment and ask it again for the samples of all its batches that did not come."""
        batches = [batch for batch in self._batches.values() if batch.worker is worker]
        for batch in batches:
            del self._batches[id(batch.stream)]
        worker.restart()
        for batch in batches:
            if batch.expected:
                self._start(worker, batch.sampling, list(batch.expected.values()))

    def _record(self, batch: AgentBatch, sample: TrajectoryRef, outcome: GymOutcome) -> None:
        if batch.expected.pop((outcome.uid, outcome.generation_index), None) is None:
            batch.num_given_up -= 1
            return
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        self._on_sample(sample, outcome.score)
