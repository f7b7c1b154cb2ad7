"""The part of a plan that each process gets, against the deliveries of every block."""

import pytest

from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.delivery import Deliveries, readers_by_node
from grpo_mcore.refit.plan.parts import Arrival, Fill, Load, Part, parts_of
from grpo_mcore.refit.plan.plan import GIB, RefitPlan, plan_refit
from tests.unit.refit.whole_split import make_shape, plan_of, random_case, random_nodes, with_experts


@pytest.mark.parametrize("seed", range(30))
def test_each_process_gets_its_part(seed: int) -> None:
    case = random_case(seed)
    plan, ranks = plan_of(case, 4096), case.trainer.world_size
    engines, node_of_rank = random_nodes(case, seed)
    readers = readers_by_node(engines, case.engine.ranks)
    if not set(range(len(readers))) <= set(node_of_rank):
        node_of_rank = []  # a node without a policy rank has a receiver of its own
    nodes = range(len(readers))
    receivers = [node_of_rank.index(node) if node_of_rank else ranks + node for node in nodes]
    parts = parts_of(plan, ranks, tuple(node_of_rank), tuple(map(tuple, readers)), tuple(receivers))
    deliveries = Deliveries(plan, node_of_rank, readers)

    def fills(rank: int) -> tuple[tuple[Fill, ...], ...]:
        return tuple(
            tuple(
                Fill(number, block.param, block.box, block.offset, block.nbytes, block.dtype, block.negative_exp, to)
                for number, block in enumerate(bucket.blocks)
                if (to := tuple(node for node, sender in deliveries.of(block) if sender == rank))
            )
            for bucket in plan.buckets
        )

    def arrivals(node: int) -> tuple[tuple[Arrival, ...], ...]:
        return tuple(
            tuple(
                Arrival(block.offset, block.nbytes, sender)
                for block in bucket.blocks
                for there, sender in deliveries.of(block)
                if there == node and not (node_of_rank and node_of_rank[sender] == node)
            )
            for bucket in plan.buckets
        )

    for rank in range(ranks):
        part = Part.unpacked(parts.senders[rank])
        assert (part.digest, part.buckets, part.fills) == (plan.digest, len(plan.buckets), fills(rank))
        assert part.arrivals == (arrivals(receivers.index(rank)) if rank in receivers else ())
        assert parts.sent[rank] == sum(fill.nbytes * len(fill.to) for rows in part.fills for fill in rows)
    for node, packed in enumerate(parts.receivers):
        assert Part.unpacked(packed).arrivals == arrivals(node)
    for rank in range(case.engine.ranks):
        assert Part.unpacked(parts.readers[rank]).loads == tuple(
            tuple(
                Load(number, copy, read.param, read.box, block.offset, block.dtype)
                for number, block in enumerate(bucket.blocks)
                for copy, read in enumerate(block.reads)
                if read.rank == rank
            )
            for bucket in plan.buckets
        )


def large(replicas: int, nodes: int) -> RefitPlan:
    """A plan of a model with experts on `replicas` x 16 ranks for engines on this many nodes."""
    shape = make_shape(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=64, ffn_hidden_size=1024)
    trainer = PolicyLayout(4, 2, 2 * replicas, expert=8, expert_tensor=1)
    return plan_refit(
        with_experts(shape, experts=16, ffn=256), shape, trainer, EngineLayout(8, 1, True), dtype="bfloat16",
        buffer_bytes=GIB // 256, deliveries=nodes,
    )  # fmt: skip


def test_a_larger_cluster_needs_no_larger_plan() -> None:
    """Twice the cluster: as many blocks, twice the text for all, and equal work for all policy ranks."""
    blocks, sent_text = [], []
    for replicas, nodes in ((8, 32), (16, 64)):
        plan, ranks = large(replicas, nodes), 16 * replicas
        parts = parts_of(plan, ranks, (), (tuple(range(8)),) * nodes, tuple(range(ranks, ranks + nodes)))
        blocks.append(sum(1 for _ in plan.blocks()))
        sent_text.append(sum(map(len, (*parts.senders, *parts.receivers))))
        assert max(parts.sent) < 1.1 * sum(parts.sent) / ranks
    assert blocks[1] <= 1.1 * blocks[0] and sent_text[1] <= 2.2 * sent_text[0], (blocks, sent_text)
