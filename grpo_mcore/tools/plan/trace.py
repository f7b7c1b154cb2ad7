"""`plan --trace`: one rank of a recipe at full size runs its own log-probs and training step, without a GPU.

The rank is a real `Policy` with the GPU's branches (`Platform("gpu", traced=True)`). Its tensors have shapes and no
values (torch's FakeTensorMode), and its process group answers at once, as if all ranks held the same. Experts are given
equally many tokens. The bytes are those of torch's allocations, without the allocator's fragmentation.
"""

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from grpo_mcore.batching.packed_batch import PackedBatch, join_rows, pack_rows
from grpo_mcore.objective import ClippedPGLossFn, NLLLossFn
from grpo_mcore.parallel.memory import free_gradients, host_tensors, optimizer_tensors
from grpo_mcore.parallel.mesh import Address, prepare_megatron
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.plan.counting import Counter, PhaseCounts
from grpo_mcore.tools.plan.run_plan import Plan
from grpo_mcore.tools.plan.workload import Workload

GPU = Platform("gpu", grouped_products=True, traced=True)

NOT_TRACED = (
    "reserved",
    "engine weights",
    "engine adapters",
    "sampler state",
    "KV cache",
    "engine overhead",
    "refit buffer",
)
"""Parts of the plan that are taken over: they belong to the driver, to the engine or to the refit."""


@dataclass(frozen=True)
class TracedPhase:
    """A phase of a rank of one pipeline stage.

    `peak_bytes` is traced, with the parts of the plan that are NOT_TRACED; `planned_bytes` is the plan's. `launches`,
    `syncs` (of the host with the device) and `sent` (bytes by collective) are counted per micro-batch (in log-probs
    several of these are one), in the phases optimizer and refit per step. `places` has the synchronisations by place in
    the code.
    """

    stage: int
    name: str
    peak_bytes: int
    planned_bytes: int
    launches: int
    syncs: int
    places: dict[str, float]
    sent: dict[str, float]


def trace(config: MasterConfig, plan: Plan, hf_config: dict[str, Any]) -> list[TracedPhase]:
    """Trace a rank of the first pipeline stage and, if there are several, one of the last. `plan` is the recipe's with
    the kernels "torch", `hf_config` the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config), encoding="utf-8")
        policy = config.policy.model_copy(update={"model_name": folder}, deep=True)
        policy.megatron_cfg.optimizer.use_precision_aware_optimizer = False  # see `_trace_stage`
        compared = []
        for stage in sorted({0, plan.load.layout.pipeline - 1}):
            rows = _rows(plan.load)
            phases = _trace_stage(config.model_copy(update={"policy": policy}), plan.load, stage, rows)
            compared += [_compared(phase, plan, stage, len(rows)) for phase in phases]
        return compared


def _trace_stage(config: MasterConfig, load: Workload, stage: int, rows: list[PackedBatch]) -> list[PhaseCounts]:
    """Return what a rank of this stage does: its phases in the order of `plan`."""
    counter = Counter()
    address = Address(stage * load.layout.stage_size, load.world, 0, "", 0)
    loss_fn: Any = NLLLossFn()
    if load.grpo:
        loss_fn = ClippedPGLossFn(
            config.loss_fn, prev_equals_curr=not load.prev, max_age=config.grpo.async_grpo.max_age
        )
    prepare_megatron(GPU)
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True), counter:
        policy = _TracedPolicy(config.policy, address, seed=0, timeout_s=60, reference=load.reference, platform=GPU)
        try:
            for group in policy.optimizer.param_groups:
                group["foreach"] = not group.get("fused")  # torch's choice on a GPU
            for layer in (layer for chunk in policy.chunks for layer in chunk.module.decoder.layers):
                layer.forward = counter.seen(layer.forward)
            policy.optimizer.step()  # what it creates is there from the second step on
            free_gradients(policy.optimizer)
            counter.on_host(host_tensors(policy.optimizer))
            if load.prev or load.reference:
                counter.begin("log-probs")
                joined = [join_rows(rows[:1] * load.logprob_bins, policy.row_multiple)] * len(rows)
                counter.message = _message(load, joined[0])
                (policy.reference_logprobs if load.reference else policy.logprobs)(joined)
            policy.before_update = lambda: counter.begin("optimizer")
            if load.precision_aware and not load.host_share:
                # TransformerEngine's kernel, which is not here, updates in place and from the gradients as they are.
                policy.optimizer.step = lambda: (True, 0.0, None)
            counter.begin("training")
            counter.message = _message(load, rows[0])
            policy.train_step(rows, loss_fn, global_valid_seqs=1, global_valid_toks=1)
            if load.grpo and load.colocated and load.engines_sleep:
                policy.offload()
                if not load.keeps_optimizer:
                    counter.on_host(optimizer_tensors(policy.optimizer, policy.chunks))
                counter.begin("refit")
        finally:
            policy.shutdown()
    return counter.phases


class _TracedPolicy(Policy):
    """A policy whose ranks exchange the keys of their parameter groups for real: the bytes of Python objects must have
    values. The optimizer's tensors are made from the weights, and have none."""

    def build_optimizer(self) -> Any:
        with unset_fake_temporarily():
            return super().build_optimizer()


def _rows(load: Workload) -> list[PackedBatch]:
    """Return full micro-batches of samples of the mean length, as many as are in flight at a time."""
    count = max(1, load.bin_tokens // load.mean_length)
    logprobs = ("generation_logprobs", "prev_logprobs", "reference_policy_logprobs")
    columns = {"token_mask": torch.ones(load.mean_length), "sample_mask": torch.tensor(1.0)} | {
        name: torch.zeros(load.mean_length) for name in ("advantages", *logprobs, "rewards", "covariance_marks")
    }
    tokens = [torch.zeros(load.mean_length, dtype=torch.int64)] * count
    layout = load.layout
    multiple = layout.tensor if layout.sequence_parallel else 1
    row = pack_rows(tokens, [columns] * count, multiple, names=[str(index) for index in range(count)])
    in_flight = layout.pipeline * (2 if layout.virtual > 1 else 1)
    return [row] * (min(load.micro_batches, in_flight) if layout.pipeline > 1 else 1)


def _message(load: Workload, row: PackedBatch) -> list[int]:
    """Return the shape of the hidden states that pipeline stages send each other."""
    shared = load.layout.context * (load.layout.tensor if load.layout.sequence_parallel else 1)
    return [row.tokens.size(1) // shared, 1, load.shape.hidden_size]


def _compared(phase: PhaseCounts, plan: Plan, stage: int, micro_batches: int) -> TracedPhase:
    """Set a phase beside the plan's, per micro-batch."""
    planned = next(planned for planned in plan.stages[stage].phases if planned.name == phase.name)
    times = micro_batches if phase.name in ("log-probs", "training") else 1
    return TracedPhase(
        stage=stage,
        name=phase.name,
        peak_bytes=phase.peak + sum(planned.parts.get(part, 0) for part in NOT_TRACED),
        planned_bytes=planned.total,
        launches=round(phase.launches / times),
        syncs=round(sum(phase.syncs.values()) / times),
        places={position: count / times for position, count in phase.syncs.most_common()},
        sent={name: nbytes / times for name, nbytes in phase.sent.most_common()},
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what Megatron-Core says about its fallbacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
