"""The function that test_shared_prefixes.py runs on the ranks: the same rows with and without shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows, share_prefixes
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.tools.parity.rank import LayoutCase, compared_loss, make_policy
from tests.distributed.adapter_cases import adapted_policy


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


def gradients(policy: Policy, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
    """Return the gradient of the loss, over all rows, by parameter of this rank; change no weight."""

    def stop() -> None:
        raise _GradientsTaken

    policy.before_update = stop
    try:
        policy.train_step(batches, compared_loss(), global_valid_seqs=20, global_valid_toks=300)
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
