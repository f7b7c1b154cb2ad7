"""Prompts out, scored groups back: drives the engines and the environments for the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_mcore.algorithms.engine_group import EngineGroup
from grpo_mcore.cluster import Cluster, ObjectStore, Pending, Stream, Worker
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.seeds import sample_seed
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Score, TrajectoryRef, Turn


@dataclass
class _Open:
    """A prompt under way."""

    prompt: Any
    generations: int
    samples: dict[int, TrajectoryRef] = field(default_factory=dict)


class Rollouts:
    """Several prompts in flight; groups come back in the order in which they finish.

    Waits for: samples of the engines' streams, and verdicts of the environments. Unblocked by whichever is first. A
    group's verdict is asked for as soon as its last sample is there, while the engines go on with the others.
    """

    def __init__(self, engines: EngineGroup, environments: Mapping[str, Worker], *, seed: int) -> None:
        """`environments`: task name -> environment."""
        self.engines, self.environments, self.seed = engines, environments, seed
        self.cluster: Cluster = engines.cluster
        self._open: dict[str, _Open] = {}
        self._streams: list[Stream] = []
        self._verdicts: dict[int, tuple[str, Pending]] = {}

    @property
    def generating(self) -> bool:
        """Whether an engine still generates; otherwise only verdicts are waited for."""
        return bool(self._streams)

    def dispatch(self, prompts: Sequence[Any], sampling: Sampling, *, generations: int, step: int) -> None:
        """Sends `generations` requests for each prompt (a DatumSpec) to the engines. Does not wait."""
        workers = self.engines.workers
        shares: list[list[GenerationRequest]] = [[] for _ in workers]
        load = [0] * len(workers)
        for prompt in prompts:
            if prompt["task_name"] not in self.environments:
                raise ValueError(f"{prompt['uid']}: no environment for task {prompt['task_name']!r}")
            self._open[prompt["uid"]] = _Open(prompt, generations)
            engine = load.index(min(load))  # a whole group to one engine: its prompt is prefilled once
            load[engine] += generations * (prompt["length"] + sampling.max_new_tokens)
            shares[engine] += self._requests(prompt, generations, step)
        for worker, requests in zip(workers, shares, strict=True):
            if requests:
                what = f"samples of step {step}"
                self._streams.append(worker.stream("generate_refs", requests, sampling, what=what))

    def _requests(self, prompt: Any, generations: int, step: int) -> list[GenerationRequest]:
        turns = tuple(
            Turn(role=message["role"], token_ids=message["token_ids"], text=message["content"])
            for message in prompt["message_log"]
        )
        stop = tuple(prompt.get("stop_strings") or ())
        uid = prompt["uid"]
        return [
            GenerationRequest(uid, index, turns, sample_seed(self.seed, step, uid, index), stop)
            for index in range(generations)
        ]

    def next_group(self, on_sample: Callable[[], None] = lambda: None) -> Group:
        """Waits for the next group whose samples are all generated and scored. `on_sample`: called for each sample.

        Raises WorkerFailed and DeadlineExceeded of engines and environments.
        """
        while True:
            things: list[Any] = [pending for _, pending in self._verdicts.values()] + self._streams
            ready = self.cluster.next_ready(things, self.cluster.call_timeout_s, "samples and verdicts")
            if id(ready) in self._verdicts:
                uid, pending = self._verdicts.pop(id(ready))
                return self._close(uid, pending.result())
            parcel = next(ready, None)
            if parcel is None:
                self._streams.remove(ready)
                continue
            on_sample()
            self._take(replace(parcel.label, ref=parcel.content))

    def _take(self, sample: TrajectoryRef) -> None:
        group = self._open[sample.uid]
        group.samples[sample.generation_index] = sample
        if len(group.samples) < group.generations:
            return
        metadata = [group.prompt["extra_env_info"]] * group.generations
        references = [group.samples[i].ref for i in range(group.generations)]
        environment = self.environments[group.prompt["task_name"]]
        pending = environment.call("score", metadata, *references, what=f"the verdict on {sample.uid}")
        self._verdicts[id(pending)] = (sample.uid, pending)

    def _close(self, uid: str, scores: Sequence[Score]) -> Group:
        group = self._open.pop(uid)
        if not self._open:  # every sample is there: the streams have nothing left but their end
            for stream in self._streams:
                next(stream, None)
            self._streams.clear()
        samples = tuple(group.samples[i] for i in range(group.generations))
        checked = (_checked(sample, score) for sample, score in zip(samples, scores, strict=True))
        return Group(group.prompt, samples, tuple(checked))


def _checked(sample: TrajectoryRef, score: Score) -> Score:
    """The score, without a reward where that of an aborted sample or one that is no number would be trained on."""
    if sample.finish_reason == "abort":
        return replace(score, reward=None, reason="the engine aborted the sample")
    if score.reward is not None and not math.isfinite(score.reward):
        return replace(score, reward=None, reason=f"the environment's reward is {score.reward}")
    return score


def sampling_of(generation: Any, eos_token_id: int, *, validation: bool = False) -> Sampling:
    """How tokens are drawn, from the recipe's policy.generation."""
    stop_ids = generation.stop_token_ids
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.val_temperature if validation else generation.temperature,
        top_p=generation.val_top_p if validation else generation.top_p,
        top_k=generation.val_top_k if validation else generation.top_k,
        stop_token_ids=tuple([eos_token_id] if stop_ids is None else stop_ids),
        stop_strings=tuple(generation.stop_strings or ()),
    )


class _InProcess:
    """An environment object of the driver's own, as a script may pass one, in place of a worker."""

    def __init__(self, environment: Any, store: ObjectStore) -> None:
        self.environment, self.store = environment, store

    def score(self, metadata: Sequence[dict[str, Any]], *references: Any) -> list[Score]:
        return self.environment.score(metadata, *self.store.fetch_many(references))


def as_workers(environments: Mapping[str, Any], cluster: Cluster) -> dict[str, Worker]:
    """Environments by task, each as a worker: those that are objects of this process are wrapped."""
    return {
        task: env if hasattr(env, "call") else LocalWorker(task, _InProcess(env, cluster.store))
        for task, env in environments.items()
    }
