"""The function that test_shared_prefixes.py runs on the ranks: the same rows with and without shared prefixes."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows, share_prefixes
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.objective import ClippedPGLossFn
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.step.advantages import compute_targets
from grpo_mcore.step.step_batch import build_step_batch
from grpo_mcore.tools.parity.rank import LayoutCase, compared_loss, make_policy, policy_config
from tests.distributed.adapter_cases import adapted_policy
from tests.unit.driver.policy.long_samples import random_groups, recipe


class _GradientsTaken(Exception):
    """Ends a train step before its update."""


def group(draw: torch.Generator, prompt: int, answers: Sequence[int]) -> list[Tensor]:
    """Return samples with one prompt of this many tokens."""
    start = torch.randint(0, 90, (prompt,), generator=draw)
    return [torch.cat([start, torch.randint(0, 90, (n,), generator=draw)]) for n in answers]


def random_tree(draw: torch.Generator, depth: int) -> list[Tensor]:
    """Return the paths to all nodes of a tree with one to three children a node; a path may occur twice."""
    paths, level = [], [torch.randint(0, 90, (3,), generator=draw)]
    for _ in range(depth):
        level = [
            torch.cat([path, torch.randint(0, 90, (int(torch.randint(0, 6, (), generator=draw)),), generator=draw)])
            for path in level
            for _ in range(int(torch.randint(1, 4, (), generator=draw)))
        ][:6]
        paths += level
    return paths


def sample_rows() -> list[tuple[list[Tensor], int]]:
    """Return the samples of each row, and the size of the blocks that they share."""
    draw = torch.Generator().manual_seed(5)
    return [
        (group(draw, 17, (3, 40, 1, 7)) + group(draw, 9, (2, 2)), 4),
        (random_tree(draw, 4), 1),
        ([torch.randint(0, 90, (11,), generator=draw)], 4),
        (group(draw, 1, (4, 5, 6)), 1),
    ]


def make_rows(policy: Policy, rows: Sequence[tuple[list[Tensor], int]]) -> tuple[list[PackedBatch], list[PackedBatch]]:
    """Return this data-parallel rank's rows, without and with shared prefixes."""
    plain, shared = [], []
    for samples, block in rows[policy.here.data :: policy.layout.data]:
        columns = [
            {
                "token_mask": (torch.arange(len(ids)) >= 2).float(),
                "sample_mask": torch.tensor(1.0),
                "advantages": torch.tensor((-1.0) ** i * (0.5 + 0.1 * i)),
            }
            for i, ids in enumerate(samples)
        ]
        names = [str(i) for i in range(len(samples))]
        routes = [routes_of(policy, ids) for ids in samples] if policy.config.router_replay.enabled else None
        plain.append(pack_rows(samples, columns, policy.row_multiple, names=names, routes=routes))
        shared.append(share_prefixes(plain[-1], policy.row_multiple, block))
    return plain, shared


def routes_of(policy: Policy, ids: Tensor) -> Tensor:
    """Return experts for each token but the last, the same for equal tokens at equal places."""
    experts = policy.shape.experts
    assert experts is not None
    layers, each = torch.arange(policy.shape.num_layers), torch.arange(experts.active)
    first = (3 * ids[:-1] + torch.arange(len(ids) - 1))[:, None] + layers
    return ((first[..., None] + each) % experts.count).to(torch.int16)


def gradients(policy: Policy, batches: Sequence[PackedBatch], loss_fn: Any = None) -> dict[str, Tensor]:
    """Return the gradient of the loss, over all rows, by parameter of this rank; change no weight."""

    def stop() -> None:
        raise _GradientsTaken

    policy.before_update = stop
    try:
        policy.train_step(batches, loss_fn or compared_loss(), global_valid_seqs=20, global_valid_toks=300)
    except _GradientsTaken:
        pass
    for chunk in policy.chunks:  # each rank has the sum over the ranks of its own part only
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                parts = list(bucket.grad_data.chunk(ranks.size()))
                torch.distributed.all_gather(parts, parts[ranks.rank()].clone(), group=ranks)
    return {
        f"{i}.{name}": parameter.main_grad.clone()
        for i, chunk in enumerate(policy.chunks)
        for name, parameter in chunk.module.named_parameters()
        if parameter.requires_grad
    }


def compare_with_unshared(address: Address, model: str, case: LayoutCase, how: str) -> dict[str, Any]:
    """Return the largest differences of log-probs (last stage) and of gradients, relative to each parameter's norm,
    and the share of tokens that is computed. `how`: "lora" with adapters, "replay" with given experts."""
    if how == "lora":
        policy = adapted_policy(address, model, case, {})
    else:
        policy = make_policy(address, model, case, router_replay={"enabled": how == "replay"})
    rows = sample_rows()
    plain, shared = make_rows(policy, rows)
    pairs = zip(policy.logprobs(plain) or (), policy.logprobs(shared) or (), strict=True)
    difference = max(((a - b).abs().max().item() for a, b in pairs), default=0.0)
    expected, found = gradients(policy, plain), gradients(policy, shared)
    errors = {
        name: ((found[name] - value).norm() / value.norm().clamp(min=1e-8)).item() for name, value in expected.items()
    }
    computed = sum(len(row.shared.source) if row.shared else sum(row.lengths) for row in shared)
    return {
        "logprobs": difference,
        "gradients": max((error, name) for name, error in errors.items()),
        "norm": max(value.norm().item() for value in expected.values()),
        "computed": computed / sum(sum(row.lengths) for row in plain),
    }


def compare_branches(address: Address, model: str, case: LayoutCase) -> dict[str, float]:
    """Return the largest differences of log-probs (last stage) and, relative to the norm, of a gradient, between two
    samples with branches and the same branches as samples of their own: "apart", and "shared" with shared prefixes."""
    policy, draw = make_policy(address, model, case), torch.Generator().manual_seed(6)
    branches = group(draw, 17, (3, 40)) + group(draw, 9, (2, 2, 5))
    masks = [(torch.arange(len(ids)) >= 8).float() for ids in branches]
    counts, sizes = (2, 3), [len(ids) for ids in branches]
    owners = [i for i, count in enumerate(counts) for _ in range(count)]

    def columns(masks: Sequence[Tensor], owners: Sequence[int]) -> list[dict[str, Tensor]]:
        return [
            {"token_mask": mask, "sample_mask": torch.tensor(1.0), "advantages": torch.tensor(1.0 - 1.5 * owner)}
            for mask, owner in zip(masks, owners, strict=True)
        ]

    def whole(parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat([part for part, of in zip(parts, owners, strict=True) if of == i]) for i in range(2)]

    names = [str(i) for i in range(len(branches))]
    apart = pack_rows(branches, columns(masks, owners), policy.row_multiple, names=names)
    row = pack_rows(
        whole(branches), columns(whole(masks), range(2)), policy.row_multiple, names=names[:2],
        branches=[sizes[:2], sizes[2:]],
    )  # fmt: skip
    expected, logprobs = gradients(policy, [apart]), policy.logprobs([apart])
    found = {}
    for name, other in (("apart", row), ("shared", share_prefixes(row, policy.row_multiple, 4))):
        assert (other.shared is not None) == (name == "shared")
        for one, two in zip(logprobs or (), policy.logprobs([other]) or (), strict=True):
            found[f"{name} log-probs"] = (one - two).abs().max().item()
        theirs = gradients(policy, [other])
        found[f"{name} gradients"] = max(
            ((theirs[key] - value).norm() / value.norm().clamp(min=1e-8)).item() for key, value in expected.items()
        )
    return found


def compare_long_samples(address: Address, model: str, case: LayoutCase, how: str) -> dict[str, Any]:
    """Compare the gradients of samples that are cut at their branches into bins, and dealt to the data-parallel ranks,
    with those of the same branches in rows of their own. `how`: "replay" with given experts. Return the largest error
    of each way, relative to the norm, the longest sample in bins, and the numbers of data-parallel ranks with parts and
    of rows that share prefixes."""
    room, draw, longest = 96, random.Random(11), 0.0
    torch.manual_seed(11)
    while longest <= 4:
        groups, trajectories = random_groups(draw, room, (1, 2, 16))
        scores = [score for group in groups for score in group.scores]
        longest = (
            max(it.length for it, score in zip(trajectories, scores, strict=True) if score.reward is not None) / room
        )
    config = recipe(room, token_level=False, turn_credit={"weight": 0.5})
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"train_global_batch_size": 8})})
    section = policy_config(model, case, router_replay={"enabled": how == "replay"})
    section.sequence_packing.shared_prefix = section.sequence_packing.shared_prefix.model_copy(update={"min_tokens": 4})
    store: Any = SimpleNamespace(fetch_many=lambda refs: [trajectories[ref] for ref in refs])
    worker = PolicyWorker(address, section, store, 1, 60.0, False, "cpu")
    branches = [it.token_ids().split(list(it.sequences)) for it in trajectories]
    if how == "replay":
        trajectories = [
            replace(it, routed_experts=_joined([routes_of(worker, ids) for ids in of_sample]))
            for it, of_sample in zip(trajectories, branches, strict=True)
        ]
    batch = build_step_batch(groups, config, worker.layout)
    targets, _ = compute_targets(batch, {}, config)
    assert targets.advantages is not None and targets.turn_credits is not None
    samples = []  # each branch by itself: tokens, columns, experts
    for i, it in enumerate(trajectories):
        masks, turns = (values.split(list(it.sequences)) for values in (it.loss_mask(), it.turn_of_tokens()))
        share = 300 / (20 * it.generated_length)  # a mean over samples as a sum over tokens
        for ids, mask, turn in zip(branches[i], masks, turns, strict=True):
            advantages = share * (targets.advantages[i] + targets.turn_credits[i][turn])
            columns = {"token_mask": mask.float(), "sample_mask": targets.weights[i], "advantages": advantages}
            samples.append((ids, columns, routes_of(worker, ids) if how == "replay" else None))
    alone = []
    for few in (samples[i : i + 8] for i in range(0, len(samples), 8)):
        ids_of, columns_of, routes = map(list, zip(*few, strict=True))
        alone.append(
            pack_rows(
                ids_of, columns_of, worker.row_multiple, names=["x"] * len(few),
                routes=routes if how == "replay" else None,
            )
        )  # fmt: skip
    data = worker.layout.data
    alone += [alone[0].empty_like(worker.row_multiple)] * (-len(alone) % data)
    by_token = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0}, prev_equals_curr=True)
    expected = gradients(worker, alone[worker.here.data :: data], by_token)
    loss_fn = ClippedPGLossFn(config.loss_fn, prev_equals_curr=True)
    errors: dict[str, tuple[float, str]] = {}
    shared = 0
    for way, shares in (("apart", False), ("shared", True)):
        worker.receive(replace(batch.ranks[worker.here.data], shares_prefixes=shares), 1)
        rows = worker._with_targets(worker._bins[0], targets)
        shared += sum(row.shared is not None for row in rows)
        assert shares or not shared
        found = gradients(worker, rows, loss_fn)
        errors[way] = max(
            (((found[key] - value).norm() / value.norm().clamp(min=1e-8)).item(), key)
            for key, value in expected.items()
        )
    norm = max(value.norm().item() for value in expected.values())
    ranks = sum(bool(rank.parts) for rank in batch.ranks)
    return {"errors": errors, "bins": longest, "ranks": ranks, "shared": shared, "norm": norm}


def _joined(routes: Sequence[Tensor]) -> Tensor:
    """Return the experts of a sample's tokens from those of its branches, whose last tokens have none."""
    last = torch.full_like(routes[0][:1], -1)
    return torch.cat([part for of_branch in routes for part in (of_branch, last)][:-1])


def try_random_trees(address: Address, model: str, case: LayoutCase) -> int:
    """Compare samples of two kinds of tokens, which share many prefixes, with the same ones computed whole. Return how
    many rows shared some."""
    policy, shares = make_policy(address, model, case), 0

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(
        samples=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=9),
        block=st.integers(1, 4),
    )
    def compare(samples: list[list[int]], block: int) -> None:
        nonlocal shares
        plain, shared = make_rows(policy, [([torch.tensor(ids) for ids in samples], block)])
        shares += shared[0].shared is not None
        before, after = policy.logprobs(plain), policy.logprobs(shared)
        assert before is not None and after is not None
        assert (before[0] - after[0]).abs().max() < 1e-5
        expected, found = gradients(policy, plain), gradients(policy, shared)
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-4 * value.norm(), name

    compare()
    return shares


def change_one_branch(address: Address, model: str, case: LayoutCase) -> list[bool] | None:
    """Return for each sample of a row whether its log-probs are the same bits after the second one's last token has
    changed."""
    policy = make_policy(address, model, case)
    rows = sample_rows()[:1]
    before = policy.logprobs(make_rows(policy, rows)[1])
    rows[0][0][1][-1] += 1
    batches = make_rows(policy, rows)[1]
    after = policy.logprobs(batches)
    if before is None or after is None:
        return None
    return [a.equal(b) for a, b in zip(batches[0].split(before[0]), batches[0].split(after[0]), strict=True)]
