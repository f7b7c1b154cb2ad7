"""The policy's ranks as the driver sees them: each call goes to all of them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from grpo_mcore.base.files import Digest
from grpo_mcore.cluster import BackgroundWork, Cluster, Future, Worker, call_all, gather, remote_call
from grpo_mcore.driver.interfaces import TokenScorers
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.driver.policy.refit_settings import RefitSettings
from grpo_mcore.families import ModelShape
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.objective import combine_metrics, critic_metrics, stats_by_sample, step_metrics
from grpo_mcore.parallel.policy import LossFn, TrainReport
from grpo_mcore.recipe import GAEConfig, KLType
from grpo_mcore.rollout.workers import Ref
from grpo_mcore.step.step_batch import RankStep, TrainTargets

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

OF_ENGINE = ("token_mult_prob_error", "sequence_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence")
"""Beginnings of the metrics that compare the engine's log-probs with those before the step's first update."""


@dataclass
class PolicyGroup:
    """All ranks of the policy.

    `updates`: steps trained since the run began; the next weight version is `updates` + 1. `background`: work that goes
    on while the driver waits for the ranks. `refit`: how its weights reach the engines. `shares_prefixes`: its samples
    may share prefixes. `offloads`: the optimizer is on the host between training passes, since engines share the ranks'
    devices or the recipe asks for it. `offloads_for_logprobs`: it is there during log-prob passes, too. `train_times`:
    `TrainReport.times` of each optimizer step of the last step, by rank. `teachers`: models that score its samples
    token by token.
    """

    cluster: Cluster
    workers: Sequence[Worker]
    layout: PolicyLayout
    shape: ModelShape
    model_folder: str
    precision: str
    refit: RefitSettings
    offloads: bool = True
    offloads_for_logprobs: bool = False
    shares_prefixes: bool = False
    updates: int = 0
    train_times: list[list[tuple[float, ...]]] = field(default_factory=list)
    background: BackgroundWork | None = None
    teachers: TokenScorers | None = None
    connected: tuple[tuple[str, int], ...] = ()  # (node, pid) of the workers to which the ranks have a network group

    def build(self, timeout_s: float) -> None:
        """Let ranks that were spawned with `build_later` build the model and load its weights."""
        call_all(self.cluster, self.workers, PolicyWorker.build, timeout_s=timeout_s, purpose="start of the policy")()

    @contextmanager
    def run_alongside(self, other: BackgroundWork | None) -> Iterator[None]:
        """Let `other` go on whenever the driver waits for the ranks, inside the context."""
        self.background = other
        try:
            yield
        finally:
            self.background = None

    def score(self, steps: Sequence[RankStep], hidden: bool = False) -> dict[int, Ref]:
        """Return references to what `PolicyWorker.score` says of each sample, by index in the step. `steps`: one of
        each data-parallel rank."""
        parts = self._wait(
            remote_call(worker, PolicyWorker.score, purpose="the teacher's pass")(
                steps[self.layout.coordinates(rank).data], hidden
            )
            for rank, worker in enumerate(self.workers)
        )
        return {index: ref for part in parts for index, ref in part.items()}

    def receive(self, steps: Sequence[RankStep]) -> None:
        """Give every rank the samples of its data-parallel rank. `steps`: one of each data-parallel rank."""
        version, put = self.updates + 1, [self.cluster.store.put(step) for step in steps]
        purpose = "receiving the step's samples"
        self._wait(
            remote_call(worker, PolicyWorker.receive, purpose=purpose)(put[self.layout.coordinates(rank).data], version)
            for rank, worker in enumerate(self.workers)
        )

    def infer_logprobs(
        self, samples: int, *, prev: bool, reference: bool, kl_kind: KLType | None, dropout: bool = False
    ) -> dict[str, Tensor]:
        """Compute log-probs of the step received; the ranks keep them. `dropout`: the current weights act as they do in
        training. Return the objective.sample_stats of the step's `samples`: float64 [samples] each, 0 for samples that
        no rank has. Raises RuntimeError if ranks report different statistics."""
        parts = self._all(PolicyWorker.infer_logprobs, "log-probs")(prev, reference, kl_kind, dropout)
        return self._by_sample(parts, samples)

    def infer_values(
        self, rewards: Tensor, cfg: GAEConfig, kl_kind: KLType | None, kl_penalty: float
    ) -> dict[str, Tensor]:
        """Compute the critic's values of the step received, and advantages and returns by token; the ranks keep them.
        `rewards`: float64 [samples]; the others as in `critic_columns`. Return the objective.gae_stats of the samples,
        float64 [samples] each."""
        parts = self._all(PolicyWorker.infer_values, "the critic's values")(rewards, cfg, kl_kind, kl_penalty)
        return self._by_sample(parts, len(rewards))

    def _by_sample(self, parts: Sequence[tuple[Tensor, dict[str, Tensor]] | None], samples: int) -> dict[str, Tensor]:
        reported = list(filter(None, parts))
        if len({frozenset(values) for _, values in reported}) > 1:
            found = "; ".join(", ".join(sorted(values)) for _, values in reported)
            raise RuntimeError(f"data-parallel ranks report different statistics of the step's samples: {found}")
        index = torch.cat([of_rank for of_rank, _ in reported])
        stats = {name: torch.cat([values[name] for _, values in reported]) for name in reported[0][1]}
        return stats_by_sample(index, stats, samples)

    def train(
        self, loss_fn: LossFn, targets: TrainTargets, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Run every optimizer step of the step received. Return metrics over all ranks and optimizer steps.
        `meanwhile`: called by the driver while the ranks train."""
        sent = self.cluster.store.put(replace(targets, estimate=None))
        calls = [remote_call(worker, PolicyWorker.train, purpose="training")(loss_fn, sent) for worker in self.workers]
        meanwhile()
        reports = self._wait(calls)
        self.updates += 1
        self.train_times = [[report.times for report in of_rank] for of_rank in reports]
        metrics = self._of_update(reports)
        if len(reports[0]) > 1 and getattr(getattr(loss_fn, "cfg", None), "ratio_to_engine", False):
            first = self._combined([of_rank[:1] for of_rank in reports])  # no pass came before: later ones have moved
            metrics |= {name: value for name, value in first.items() if name.startswith(OF_ENGINE)}
        return metrics

    def train_critic(self, loss_fn: LossFn, targets: TrainTargets) -> dict[str, float]:
        """Run the critic's optimizer steps on the step received, which the policy trains on afterwards. Return its
        metrics over all ranks and optimizer steps, as `critic/NAME`."""
        sent = self.cluster.store.put(replace(targets, estimate=None))
        reports = self._all(PolicyWorker.train_critic, "training of the critic")(loss_fn, sent)
        return critic_metrics(self._of_update(reports))

    def compare_losses(
        self, losses: Sequence[LossFn], parts: Sequence[LossFn], targets: TrainTargets, kinds: Tensor
    ) -> tuple[list[Tensor], list[list[float]]]:
        """Return (products, tokens), each by optimizer step of the step received: `gradient_products`, and the number
        of tokens of each part. Each optimizer step begins with the weights that the first loss leaves."""
        sent = self.cluster.store.put(replace(targets, estimate=None))
        answers = self._all(PolicyWorker.compare_losses, "comparing losses")(losses, parts, sent, kinds)
        reporting = [answer for rank, answer in enumerate(answers) if self.layout.is_reporting_rank(rank)]
        self.updates += 1
        tokens = [
            [sum(float(rank[1][part]["num_valid_tokens"]) for rank in ranks) for part in range(len(parts))]
            for ranks in zip(*reporting, strict=True)
        ]
        return [products for products, _ in answers[0]], tokens

    def token_logprobs(self) -> list[Future]:
        """Ask the ranks for `PolicyWorker.token_logprobs` of the last `train`. Does not wait for the answers."""
        ranks = [rank for rank in range(self.layout.world_size) if self.layout.is_reporting_rank(rank)]
        purpose = "log-probs of the samples"
        return [remote_call(self.workers[rank], PolicyWorker.token_logprobs, purpose=purpose)() for rank in ranks]

    def load_teacher_head(self, folder: str) -> None:
        """Have each rank load its rows of the output layer of a teacher, a Hugging Face folder."""
        self._all(PolicyWorker.load_teacher_head, f"the output layer of {folder}")(folder)

    def trace_layers(self) -> dict[int, dict[int, Tensor]]:
        """Return what comes out of each layer, as parallel/probes.py describes it, for the samples
        received: sample index -> layer -> float64 [2, length]."""
        traces: dict[int, dict[int, dict[int, Tensor]]] = {}  # the last key: first token of a part of the sample
        for part in self._all(PolicyWorker.trace_layers, "the layers' outputs")():
            for (index, start), layers in part.items():
                for number, rows in layers.items():
                    traces.setdefault(index, {}).setdefault(number, {})[start] = rows
        return {
            index: {number: torch.cat([rows[start] for start in sorted(rows)], 1) for number, rows in layers.items()}
            for index, layers in traces.items()
        }

    def skip(self) -> None:
        """Count a step that trains nothing: the weights stay."""
        self._all(PolicyWorker.skip, "leaving out a step")()
        self.train_times = []
        self.updates += 1

    def evaluate(self, loss_fn: LossFn, targets: TrainTargets) -> dict[str, float]:
        """Return the metrics of the step received under the current weights, without training."""
        return self._combined(self._all(PolicyWorker.evaluate, "evaluation")(loss_fn, self.cluster.store.put(targets)))

    def _of_update(self, reports: Sequence[Sequence[TrainReport]]) -> dict[str, float]:
        """Return the combined metrics of optimizer steps, with the mean norm of their gradients and the last rate."""
        norm = sum(report.grad_norm for report in reports[0]) / len(reports[0])
        return self._combined(reports) | {"grad_norm": norm, "lr": reports[0][-1].learning_rate}

    def _combined(self, reports: Sequence[Sequence[TrainReport]]) -> dict[str, float]:
        """Combine over data-parallel ranks, then over optimizer steps. One rank reports for all with its samples."""
        reporting = [ranks for rank, ranks in enumerate(reports) if self.layout.is_reporting_rank(rank)]
        by_optimizer_step = zip(*reporting, strict=True)
        return step_metrics([combine_metrics([report.metrics for report in ranks]) for ranks in by_optimizer_step])

    def node_of_rank(self, hosts: Sequence[Worker]) -> list[int]:
        """Return, for each rank, which of the nodes with these workers it is on; -1: on another one."""
        numbers = {host.place().node: number for number, host in enumerate(hosts)}
        return [numbers.get(worker.place().node, -1) for worker in self.workers]

    def shares_process(self, hosts: Sequence[Worker]) -> bool:
        """Return whether a rank runs in the process of one of these workers."""
        return not set(_processes(self.workers)).isdisjoint(_processes(hosts))

    def connect_to(self, receivers: Sequence[Worker]) -> None:
        """Prepare a refit over the network: leave the network group of the last one if it had other receivers, such as
        an engine that was replaced since."""
        receiving = _processes(receivers)
        if self.connected and self.connected != receiving:
            self._all(PolicyWorker.close_refit, "leaving the network to the engines")()
        self.connected = receiving

    def memory(self) -> list[dict[str, Any]]:
        """Return what each rank held while it trained: see `Policy.memory`."""
        return self._all(PolicyWorker.memory, "what the policy's ranks hold")()

    def offload(self) -> None:
        """Make room for the engines and the log-prob passes, if the group `offloads`."""
        if self.offloads:
            self._all(PolicyWorker.offload, "moving the weights to the host")()

    def onload(self) -> None:
        """Undo `offload`."""
        if self.offloads:
            self._all(PolicyWorker.onload, "moving the weights back to the accelerator")()

    @contextmanager
    def ready_for(self, work: Literal["teachers", "logprobs", "training"]) -> Iterator[None]:
        """Have on the ranks' devices what the work inside needs: everything for training, no optimizer for log-probs
        if `offloads_for_logprobs`, and nothing that can be moved for teachers which score on the same devices."""
        if work == "training" or (work == "logprobs" and not self.offloads_for_logprobs):
            self.onload()
        elif work == "logprobs" or (self.teachers is not None and self.teachers.colocated):
            self.offload()
        yield

    def start_profile(self) -> None:
        """Have every rank trace what it does with torch's profiler."""
        self._all(PolicyWorker.start_profile, "start of the profiler")()

    def stop_profile(self, folder: Path) -> None:
        """End the traces, and write them to `folder`."""
        self._all(PolicyWorker.stop_profile, f"writing the profile to {folder}")(folder)

    def start_save(self, folder: str, optimizer: bool) -> None:
        """Start to save in the background. It must be finished, see `is_saved`, before the next one. `optimizer`: save
        its state too."""
        self._all(PolicyWorker.start_save, f"copying the policy for {folder}")(folder, optimizer)

    def is_saved(self, wait: bool) -> bool:
        """Return whether every rank has finished what `start_save` began. `wait`: wait until it has."""
        return all(self._all(PolicyWorker.is_saved, "writing the policy's checkpoint")(wait))

    def damage(self, folder: str, digests: Mapping[str, Digest]) -> str | None:
        """Return what is wrong with a saved policy; None if its files are what was saved. `digests`: digest of each of
        its files; one rank reads a file."""
        names, purpose = list(digests), f"comparing {folder} with its digests"
        problems = self._wait(
            remote_call(worker, PolicyWorker.damage, purpose=purpose)(
                folder, {name: digests[name] for name in names[rank :: len(self.workers)]}
            )
            for rank, worker in enumerate(self.workers)
        )
        return next(filter(None, problems), None)

    def load(self, folder: str) -> None:
        if not all(self._all(PolicyWorker.load, f"loading the policy from {folder}")(folder)):
            logger.warning("%s holds no optimizer (checkpointing.save_optimizer): its moments start at 0", folder)

    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder."""
        self._all(PolicyWorker.export_hf, f"exporting the policy to {folder}")(folder)

    def _wait(self, calls: Iterable[Future]) -> list[Any]:
        """Wait for a call of each rank."""
        futures, timeout_s = list(calls), self.cluster.call_timeout_s
        return gather(
            self.cluster, futures, timeout_s=timeout_s, purpose=futures[0].purpose, background=self.background
        )

    def _all(self, method: Callable[Concatenate[PolicyWorker, P], R], purpose: str) -> Callable[P, list[R]]:
        return call_all(self.cluster, self.workers, method, purpose=purpose, background=self.background)


def logprobs_by_sample(answers: Sequence[Future]) -> dict[int, dict[str, np.ndarray]]:
    """Wait for what `token_logprobs` asked for. Return it by index in the step: name -> float32 [length]."""
    by_sample: dict[int, dict[int, dict[str, np.ndarray]]] = {}  # the inner key: first token of a part of the sample
    for answer in answers:
        for bin in answer.result():
            rows = {name: np.split(row, np.cumsum(bin.lengths)) for name, row in bin.rows.items()}
            for i, (index, start) in enumerate(zip(bin.samples, bin.starts, strict=True)):
                by_sample.setdefault(index, {})[start] = {name: rows[name][i] for name in rows}
    return {
        index: {name: np.concatenate([parts[start][name] for start in sorted(parts)]) for name in parts[0]}
        if len(parts) > 1
        else parts[0]
        for index, parts in by_sample.items()
    }


def _processes(workers: Sequence[Worker]) -> tuple[tuple[str, int], ...]:
    """Return the (node, pid) of each worker."""
    return tuple((process.node, process.pid) for process in (worker.place() for worker in workers))
