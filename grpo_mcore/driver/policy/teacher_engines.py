"""A teacher as vLLM engines, which score sampled tokens as they read them. They start, sleep and wake as the policy's
engines do; no refit brings them weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mcore.batching.packing import spread
from grpo_mcore.cluster import (
    BackgroundWork,
    Cluster,
    ObjectStore,
    Worker,
    WorkerDied,
    WorkerFailed,
    gather,
    is_fault,
    remote_call,
)
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.families import ModelShape
from grpo_mcore.generation import Engine, EngineConfig
from grpo_mcore.rollout.trajectory import TrajectoryRef
from grpo_mcore.rollout.workers import Ref


class TeacherEngineWorker(Engine):
    """An engine of a teacher. It fetches samples from the cluster's store, and leaves their scores there."""

    def __init__(self, config: EngineConfig, store: ObjectStore) -> None:
        super().__init__(config)
        self._store = store

    def score(self, samples: Mapping[int, Ref], prompts: Mapping[int, Tensor]) -> dict[int, Ref]:
        """Return references to the log-probs of the samples' trained tokens, float32 [trained tokens], by index.
        `prompts`: prompts that take the place of samples' own, by index. Raises ValueError for a sample that is too
        long."""
        trajectories = dict(zip(samples, self._store.fetch_many(list(samples.values())), strict=True))
        trajectories |= {index: trajectories[index].with_prompt(prompt) for index, prompt in prompts.items()}
        for trajectory in trajectories.values():
            if (longest := max(trajectory.sequences)) >= self._max_model_len:
                raise ValueError(
                    f"sample {trajectory.name}: the teacher reads {longest} tokens, and its engine has room for "
                    f"{self._max_model_len - 1}; set on_policy_distillation.non_colocated_teachers.default_teacher_cfg."
                    f"vllm_kwargs: {{max_model_len: {longest + 1}}}, or more"
                )
        parts = {index: it.token_ids().split(list(it.sequences)) for index, it in trajectories.items()}
        scores = iter(self.score_tokens([part for parts_of_sample in parts.values() for part in parts_of_sample]))
        scored = {}
        for index, trajectory in trajectories.items():
            of_tokens = [next(scores) for _ in parts[index]]
            scored[index] = self._store.put(torch.cat(of_tokens)[trajectory.loss_mask()])
        return scored


@dataclass
class TeacherEngines:
    """The engines of a teacher as the driver sees them. `offloads`: they share the policy's devices, and sleep on GPUs
    while they do not score."""

    engines: EngineGroup
    shape: ModelShape
    offloads: bool

    @property
    def cluster(self) -> Cluster:
        return self.engines.cluster

    @property
    def workers(self) -> Sequence[Worker]:
        return self.engines.all_hosts()

    def score(
        self,
        samples: Mapping[int, TrajectoryRef],
        prompts: Mapping[int, Tensor],
        background: BackgroundWork | None = None,
    ) -> dict[int, Ref]:
        """Return references to the log-probs of each sample's trained tokens, by index in the step. `prompts`: prompts
        that take the place of samples' own, by index. Raises WorkerDied if an engine has lost a rank."""
        purpose, indices = "the teacher's pass", list(samples)
        lengths = [samples[index].length for index in indices]
        order = sorted(range(len(indices)), key=lambda position: -lengths[position])
        shares = [[indices[position] for position in share] for share in spread(order, lengths, len(self.workers))]
        self.engines.prepare()
        calls = [
            remote_call(worker, TeacherEngineWorker.score, purpose=purpose)(
                {index: samples[index].ref for index in share},
                {index: prompts[index] for index in share if index in prompts},
            )
            for worker, share in zip(self.workers, shares, strict=True)
            if share
        ]
        try:
            parts = gather(
                self.cluster, calls, timeout_s=self.cluster.call_timeout_s, purpose=purpose, background=background
            )
        except WorkerFailed as error:
            if not is_fault(error) and (dead := self.engines.find_dead()):
                raise WorkerDied(self.workers[dead[0]].name, purpose, error.cause) from error
            raise
        self.engines.release()
        return {index: ref for part in parts for index, ref in part.items()}
