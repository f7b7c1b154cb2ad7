"""Samples that an environment generates itself by running agents, as a NeMo Gym does."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from grpo_mcore.cluster import DeadlineExceeded, Future, Parcel, Stream, WorkerFailed, remote_stream
from grpo_mcore.driver.interfaces import GenerationInterface
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.environments.gym.nemo_gym import GymOutcome, GymRequest
from grpo_mcore.rollout.life import OpenSample, RunAgent
from grpo_mcore.rollout.trajectory import Sampling, Score, TrajectoryRef

_MAX_FAILURES = 3
"""Consecutive failures of an environment that are tolerated; the next one ends the run."""


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


class AgentRollouts:
    """The queue of one environment that runs agents, see `rollouts.py`. A Gym cannot be told to stop: dropped samples
    still come, and are ignored."""

    def __init__(
        self,
        worker: EnvironmentWorker,
        engines: GenerationInterface,
        resume: Callable[[OpenSample, tuple[TrajectoryRef, Score]], None],
        on_outcome: Callable[[GymOutcome], None] | None = None,
    ) -> None:
        """`resume`: gets every sample with its trajectory and score. `on_outcome`: gets every outcome; if given, the
        environment is asked to send the agents' results with it. Raises ValueError without an endpoint."""
        if engines.endpoint is None:
            raise ValueError(
                f"{worker.name} runs agents, which ask the engines through the policy's endpoint: set "
                "policy.generation.vllm_cfg.expose_http_server"
            )
        self._worker, self._endpoint, self._engines = worker, engines.endpoint, engines
        self._resume, self._on_outcome = resume, on_outcome
        self._waiting: dict[Sampling, list[OpenSample]] = {}
        self._running: dict[Stream, dict[tuple[str, int], OpenSample]] = {}  # samples still to come, by uid and index
        self._failures = 0

    def add(self, samples: Sequence[OpenSample]) -> None:
        """Let samples wait. Raises ValueError for one without a task of the Gym."""
        for sample in samples:
            prompt = sample.group.prompt
            if prompt["extra_env_info"].get("gym_task") is None:
                raise ValueError(
                    f"{prompt['uid']}: the environment of task {prompt['task_name']!r} runs agents on the tasks of a "
                    "Gym, which dataset_name: NemoGymDataset reads"
                )
            self._waiting.setdefault(sample.group.sampling, []).append(sample)

    def send(self, *, hold: bool = True) -> None:
        for sampling, samples in self._waiting.items():
            purpose = f"{len(samples)} samples of the agents of {self._worker.name}"
            run = remote_stream(self._worker, AgentWorker.run_agents, timeout_s=self._worker.timeout_s, purpose=purpose)
            stream = run(
                list(map(_gym_request, samples)), sampling, self._endpoint.address, self._on_outcome is not None
            )
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
                raise WorkerFailed(self._worker.name, ready.purpose, f"it ended without {len(expected)} samples")
        except (WorkerFailed, DeadlineExceeded):
            self._failures += 1
            if self._failures > _MAX_FAILURES:
                raise
            self._restart()
            return True
        self._failures = 0
        if isinstance(item, Parcel):
            label, outcome = item.label
            trajectory = replace(label, ref=item.content)
        else:  # a sample without a trajectory
            outcome, version = item, self._engines.weight_version
            trajectory = TrajectoryRef(item.uid, item.generation_index, 0, 0, 0, version, False, "abort", None, turns=0)
        sample = expected.pop((outcome.uid, outcome.generation_index), None)
        if not expected:
            del self._running[ready]
            with suppress(WorkerFailed, DeadlineExceeded):  # nothing is missing; the next call finds out
                next(ready, None)  # its end
        if sample is not None and sample.wait is not None:
            if self._on_outcome is not None:
                self._on_outcome(outcome)
            self._resume(sample, (trajectory, outcome.score))
        return True

    def _restart(self) -> None:
        """Restart the environment, and ask again for the samples that did not come."""
        unfinished = [sample for expected in self._running.values() for sample in expected.values()]
        self._running.clear()
        self._worker.restart()
        self.add([sample for sample in unfinished if sample.wait is not None])
        self.send()


def _gym_request(sample: OpenSample) -> GymRequest:
    prompt, wait, limits = sample.group.prompt, sample.wait, sample.group.rules.limits
    assert isinstance(wait, RunAgent)
    task = prompt["extra_env_info"]["gym_task"]
    return GymRequest(prompt["uid"], sample.index, task, prompt["idx"], wait.seed, limits.max_tokens)
