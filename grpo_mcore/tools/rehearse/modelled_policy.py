"""Modelled ranks of the policy: they meet in collectives; what they train, save, load and send is a list of samples.
Those of a teacher meet in collectives of their own, and only score."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.base.files import Digest, first_changed, leave_digests
from grpo_mcore.cluster.virtual_cluster import Condition, sleep
from grpo_mcore.parallel.policy import TrainReport
from grpo_mcore.recipe import PolicyConfig, compares_distributions, policy_layout
from grpo_mcore.rollout.trajectory import Trajectory
from grpo_mcore.rollout.workers import Ref, Rendezvous
from grpo_mcore.step.step_batch import RankStep, TrainTargets
from grpo_mcore.tools.rehearse.world import Modelled, ModelledWeights, TrainedSample, Transfer, World

WEIGHTS = "weights.json"


class Mesh:
    """The ranks of one policy or teacher, and what they share: the weights, and the samples of the step under way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weights = ModelledWeights()
        self.broken: str | None = None
        self.ranks = set[int]()
        self._waiting, self._all_here = 0, Condition()
        self._steps: dict[int, _Step] = {}

    async def meet(self, size: int) -> None:
        """Wait for all ranks, as a collective does. Raises as torch does when a peer has ended."""
        if self.broken is None:
            self._waiting += 1
            if self._waiting == size:
                self._waiting = 0
                self._all_here.notify()
            else:
                await self._all_here.wait()
        if self.broken is not None:
            raise RuntimeError(f"gloo/transport: connection closed by peer ({self.broken})")

    def lose(self, name: str) -> None:
        self.broken = name
        self._all_here.notify()
        if self.weights is self.world.weights:
            self.world.transfer.end(broken=name)

    def step(self, step: RankStep, store: Any) -> _Step:
        """Return what a data-parallel rank does with its samples; all of its ranks share it."""
        if (known := self._steps.get(id(step))) is None:
            samples = dict(zip(step.trajectories, store.fetch_many(list(step.trajectories.values())), strict=True))
            known = self._steps[id(step)] = _Step(step, samples)
        return known


class _Step:
    """The samples of a data-parallel rank. It keeps `step`, so that no other object gets its id."""

    def __init__(self, step: RankStep, samples: Mapping[int, Trajectory]) -> None:
        self.step, self.samples = step, samples
        self.batches = [[index for bin in bins for index in bin] for bins in step.batches]
        self._lengths = {index: sample.length for index, sample in samples.items()}

    def lengths(self, batch: list[int]) -> list[int]:
        return [self._lengths[index] for index in batch]


class ModelledRank(Modelled):
    """Stands for `PolicyWorker`."""

    def __init__(self, mesh: Mesh, address: Rendezvous, config: PolicyConfig, store: Any) -> None:
        super().__init__(mesh.world, f"policy-{address.rank}")
        self.mesh, self._store = mesh, store
        self.rank, self.size = address.rank, address.world_size
        mesh.ranks.add(self.rank)
        self.layout = policy_layout(config.megatron_cfg, self.size)
        self._move_s = self.world.durations.offload
        self._step: _Step | None = None
        self._version = 0
        self._saving: tuple[Path, float] | None = None  # (folder, when it will be written)
        self._copy = ""  # what is being written

    async def starting(self) -> None:
        await super().starting()
        await self.mesh.meet(self.size)

    build = memory = host_network = close_refit = load_teacher_head = Modelled.nothing

    def died(self) -> None:
        self.mesh.lose(self.name)

    async def _compute(self, seconds: float) -> None:
        if self.world.cores is None:
            await sleep(self._seconds(seconds))
        else:
            await self.world.cores.compute(self._seconds(seconds))

    async def _together(self, seconds: float) -> None:
        """Compute, then wait for the others."""
        await self._compute(seconds)
        await self.mesh.meet(self.size)

    async def receive(self, step: RankStep, weight_version: int) -> None:
        self._step, self._version = self.mesh.step(step, self._store), weight_version
        await self._compute(self.world.durations.receive(len(self._step.samples)))

    async def infer_logprobs(
        self, prev: bool, reference: bool, kl_kind: Any, dropout: bool = False
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        step = self._its_step()
        indices = [index for batch in step.batches for index in batch]
        await self._together((prev + reference) * self.world.durations.logprobs(step.lengths(indices)))
        if not self.layout.is_reporting_rank(self.rank):
            return None
        ones = torch.ones(len(indices), dtype=torch.float64)
        tokens = torch.tensor([step.samples[index].generated_length for index in indices], dtype=torch.float64)
        stats = {"tokens": tokens, "mult_error": ones}
        if kl_kind is not None:
            stats |= {name: 0 * ones for name in ("kl_sum", "kl_to_go_sum", "kl_to_go_square")}
        if step.step.teacher and not compares_distributions(self.world.config):
            stats |= {name: 0 * ones for name in ("gap_sum", "gap_square")}
        return torch.tensor(indices), stats

    async def infer_values(self, *_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        step = self._its_step()
        indices = [index for batch in step.batches for index in batch]
        await self._together(self.world.durations.critic(step.lengths(indices), 0))
        if not self.layout.is_reporting_rank(self.rank):
            return None
        tokens = torch.tensor([step.samples[index].generated_length for index in indices], dtype=torch.float64)
        return torch.tensor(indices), {"tokens": tokens, "gae_sum": 0 * tokens, "gae_square": 0 * tokens}

    async def train_critic(self, loss_fn: Any, targets: TrainTargets) -> list[TrainReport]:
        step, start = self._its_step(), self.world.clock.unix()
        indices = [index for batch in step.batches for index in batch]
        await self._together(self.world.durations.critic(step.lengths(indices), targets.critic_epochs))
        if self.mesh.weights.version != self._version - 1:
            self.world.flaws.append(f"{self.name} trained its critic after its policy")
        metrics = dict.fromkeys(("returns_mean", "returns_square", "value_error_mean", "value_error_square"), 0.0)
        reported: Any = metrics if self.layout.is_reporting_rank(self.rank) else {}
        return [TrainReport(reported, 1.0, 1e-6, (start, start, self.world.clock.unix()))]

    async def train(self, loss_fn: Any, targets: TrainTargets) -> list[TrainReport]:
        step, reports = self._its_step(), []
        if self.world.config.on_policy_distillation.enabled and step.step.teacher.keys() != step.samples.keys():
            self.world.flaws.append(f"{self.name} trained on samples that no teacher had scored")
        for batch, toks in zip(step.batches, targets.valid_toks, strict=True):
            if not toks:
                continue
            start = self.world.clock.unix()
            await self._together(self.world.durations.train(step.lengths(batch)))
            weights = targets.weights[batch]
            tokens = torch.tensor([step.samples[index].generated_length for index in batch])
            metrics: dict[str, Any] = {
                "loss": 0.0,
                "num_valid_samples": float(weights.sum()),
                "num_valid_tokens": float((weights * tokens).sum()),
                "token_mult_prob_error": float((weights * tokens).sum()) / toks,
            }
            reporting = self.layout.is_reporting_rank(self.rank)
            reports.append(
                TrainReport(metrics if reporting else {}, 1.0, 1e-6, (start, start, self.world.clock.unix()))
            )
        if self.layout.is_reporting_rank(self.rank):
            for batch in step.batches:
                self.mesh.weights.history += [self._trained(step.samples[index]) for index in batch]
        await self._end_step()
        return reports

    def _trained(self, sample: Trajectory) -> TrainedSample:
        real = min(int(turn.text.removeprefix("weights ")) for turn in sample.turns if turn.loss_mask)
        return TrainedSample(sample.uid, sample.generation_index, self._version, sample.weight_version, real)

    async def skip(self) -> None:
        await self._end_step()

    async def _end_step(self) -> None:
        await self.mesh.meet(self.size)
        self._step = None
        if self.rank == 0:
            self.mesh.weights.version += 1
            self.mesh._steps.clear()

    def _its_step(self) -> _Step:
        if self._step is None:
            raise RuntimeError(f"{self.name} has received no samples")
        return self._step

    def token_logprobs(self) -> list[Any]:
        return []

    async def offload(self) -> None:
        await self._move(away=True, seconds=self._move_s)

    async def onload(self) -> None:
        await self._move(away=False, seconds=self._move_s)

    async def start_save(self, folder: str, optimizer: bool) -> None:
        self._refuse_full_disk()
        if self.rank == 0:  # fields as they lie: `astuple` copies each
            history = [tuple(vars(sample).values()) for sample in self.mesh.weights.history]
            self._copy = json.dumps({"version": self.mesh.weights.version, "history": history})
        self._saving = Path(folder), self.world.clock.now() + self._seconds(self.world.durations.save)

    async def is_saved(self, wait: bool) -> bool:
        assert self._saving is not None
        folder, end = self._saving
        if wait and (left := end - self.world.clock.now()) > 0:
            await sleep(left)
        self._refuse_full_disk()
        saved = self.world.clock.now() >= end
        if saved and self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / WEIGHTS).write_text(self._copy, encoding="utf-8")
            leave_digests(folder, "rank-0", [WEIGHTS])
        return saved

    def _refuse_full_disk(self) -> None:
        if self.world.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def damage(self, folder: str, digests: Mapping[str, Digest]) -> str | None:
        return first_changed(Path(folder), digests) if digests else None

    async def load(self, folder: str) -> bool:
        await self._together(self.world.durations.load)
        if self.rank == 0:
            saved = json.loads((Path(folder) / WEIGHTS).read_text(encoding="utf-8"))
            self.mesh.weights.history = [TrainedSample(*values) for values in saved["history"]]
            self.mesh.weights.version = saved["version"]
        return True

    def open_refit(self, part: bytes, seat: Any, transport: Any = None, network: Any = None) -> dict[str, Any]:
        if self.rank == 0:
            self.world.transfer = Transfer()
        digest, nbytes = self.world.part(part)
        return {"digest": digest, "bytes": nbytes, "transport": {}}

    async def send_refit(self, *checked: Any) -> dict[str, Any]:
        await self._together(self.world.durations.refit)
        if self.rank == 0:
            self.world.transfer.version = self.mesh.weights.version
            self.world.transfer.end()
        return {"bytes": 0, "seconds": self.world.durations.refit, "sums": {}}

    def score(self, step: RankStep, hidden: bool = False) -> dict[int, Ref]:
        raise NotImplementedError("the policy teaches nobody")


class ModelledTeacher(ModelledRank):
    """Stands for `PolicyWorker` where it does not train."""

    def __init__(self, mesh: Mesh, address: Rendezvous, config: PolicyConfig, store: Any) -> None:
        super().__init__(mesh, address, config, store)
        alias, self._durations = self.world.teacher(config)
        self._move_s = self._durations.move
        self.name = f"teacher-{alias}-{self.rank}"

    async def score(self, step: RankStep, hidden: bool = False) -> dict[int, Ref]:  # type: ignore[override]
        if self._is_away:
            self.world.flaws.append(f"{self.name} scored without its weights")
        samples = self.mesh.step(step, self._store)
        await self._together(self._durations.score(samples.lengths(list(samples.samples))))
        self.mesh._steps.clear()
        if not self.layout.is_reporting_rank(self.rank):
            return {}
        return {index: self._store.put(torch.zeros(0)) for index in samples.samples}
