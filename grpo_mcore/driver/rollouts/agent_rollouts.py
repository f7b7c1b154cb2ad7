"""Samples that an environment generates itself by running agents, as a NeMo Gym does."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from grpo_mcore.cluster import DeadlineExceeded, Future, Parcel, Stream, WorkerFailed, remote_stream
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.interfaces import GenerationInterface
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.environments.agents.samples import AgentOutcome
from grpo_mcore.rollout.life import OpenGroup, OpenSample
from grpo_mcore.rollout.trajectory import AgentRequest, Sampling, Score, TrajectoryRef

_MAX_FAILURES = 3
"""Consecutive failures of an environment that are tolerated; the next one ends the run."""


class AgentWorker:
    """An environment that runs agents; their trajectories stay in the cluster's store."""

    def __init__(self, cls: type, section: Mapping[str, Any]) -> None:
        self._environment = cls(section)

    def run_agents(
        self, samples: Sequence[AgentRequest], sampling: Sampling, endpoint: Any, keep_results: bool
    ) -> Iterator[Parcel | AgentOutcome]:
        """Yield one item a sample: Parcel((TrajectoryRef without its ref, AgentOutcome without its trajectory),
        trajectory), or the AgentOutcome if there is no trajectory."""
        for outcome in self._environment.play(samples, sampling, endpoint, keep_results):
            if outcome.trajectory is None:
                yield outcome
            else:
                sample = TrajectoryRef.of(outcome.trajectory, None)
                yield Parcel((sample, replace(outcome, trajectory=None)), outcome.trajectory)

    def shutdown(self) -> None:
        self._environment.shutdown()


class AgentRollouts:
    """The queue of one environment that runs agents, see `rollouts.py`. A Gym cannot be told to stop: dropped samples
    still come, and are ignored."""

    def __init__(
        self,
        environment: EnvironmentWorker,
        engines: GenerationInterface,
        resume: Callable[[OpenSample, tuple[TrajectoryRef, Score]], None],
        on_outcome: Callable[[AgentOutcome], None] | None = None,
    ) -> None:
        """`resume`: gets every sample with its trajectory and score. `on_outcome`: gets every outcome; if given, the
        environment is asked to send the agents' results with it. Raises ValueError without an endpoint."""
        if engines.endpoint is None:
            raise ValueError(
                f"{environment.worker.name} runs agents, which ask the engines through the policy's endpoint: set "
                "policy.generation.vllm_cfg.expose_http_server"
            )
        self._environment, self._endpoint, self._engines = environment, engines.endpoint, engines
        self._resume, self._on_outcome = resume, on_outcome
        self._waiting: dict[Sampling, list[OpenSample]] = {}
        self._running: dict[Stream, dict[tuple[str, int], OpenSample]] = {}  # samples still to come, by uid and index
        self._retries = Retries(_MAX_FAILURES, 0.0)

    def add(self, samples: Sequence[OpenSample]) -> None:
        """Let samples wait. Raises ValueError for one without a task for agents."""
        for sample in samples:
            prompt = sample.group.prompt
            if isinstance(wait := sample.wait, AgentRequest) and wait.task is None:
                raise ValueError(
                    f"{prompt['uid']}: the environment of task {prompt['task_name']!r} runs agents on their own "
                    "tasks, which dataset_name NemoGymDataset or Verifiers reads"
                )
            self._waiting.setdefault(sample.group.sampling, []).append(sample)

    def send(self, *, hold: bool = True) -> None:
        for sampling, samples in self._waiting.items():
            worker, timeout_s = self._environment.worker, self._environment.timeout_s
            purpose = f"{len(samples)} samples of the agents of {worker.name}"
            run = remote_stream(worker, AgentWorker.run_agents, timeout_s=timeout_s, purpose=purpose)
            requests: list[Any] = [sample.wait for sample in samples]
            stream = run(requests, sampling, self._endpoint.address, self._on_outcome is not None)
            self._running[stream] = {sample.key: sample for sample in samples}
        self._waiting.clear()

    def awaited(self) -> list[Future | Stream]:
        return list(self._running)

    def drop(self, samples: Collection[OpenSample], *, close: bool) -> None:
        """The agents finish dropped samples all the same."""

    def seconds_left(self) -> float:
        return math.inf

    def take(self, ready: Any) -> bool:
        """Take the next item of a stream. Raises what the stream raises, if that has happened too often: an environment
        that fails, dies or hangs is restarted and asked again for the samples that did not come."""
        if (expected := self._running.get(ready)) is None:
            return False
        try:
            if (item := next(ready, None)) is None:
                raise WorkerFailed(ready.whom, ready.purpose, f"it ended without {len(expected)} samples")
        except (WorkerFailed, DeadlineExceeded) as error:
            self._retries.failed(error)
            unfinished = [sample for expected in self._running.values() for sample in expected.values()]
            self._running.clear()
            self._environment.restart()
            self.add([sample for sample in unfinished if sample.wait is not None])
            self.send()
            return True
        self._retries.reset()
        label, outcome = item.label if isinstance(item, Parcel) else (None, item)
        sample = expected.pop((outcome.uid, outcome.generation_index), None)
        if not expected:
            del self._running[ready]
            with suppress(WorkerFailed, DeadlineExceeded):  # nothing is missing; the next call finds out
                next(ready, None)  # its end
        if sample is not None and sample.wait is not None:
            trajectory = None
            if label is not None:
                try:
                    trajectory = self._with_images(replace(label, ref=item.content), sample.group)
                except KeyError:
                    reason = "the policy's endpoint does not know an image of it any more"
                    outcome = replace(outcome, score=Score(None, None, reason, outcome.score.seconds))
            if trajectory is None:
                version = self._engines.weight_version
                trajectory = TrajectoryRef(*sample.key, 0, 0, 0, version, False, "abort", None, turns=0)
            if self._on_outcome is not None:
                self._on_outcome(outcome)
            self._resume(sample, (trajectory, outcome.score))
        return True

    def _with_images(self, sample: TrajectoryRef, group: OpenGroup) -> TrajectoryRef:
        """Return a sample with the images that its agent has sent to the endpoint, each stored once a group."""
        if self._engines.images is None:
            return sample
        store, token = self._engines.cluster.store, self._engines.images.vision.image_token
        trajectory, files = self._endpoint.record.with_images(store.fetch(sample.ref), token)
        if not files:
            return sample
        group.images |= {digest: store.put(file) for digest, file in files.items() if digest not in group.images}
        return TrajectoryRef.of(trajectory, store.put(trajectory), {digest: group.images[digest] for digest in files})
