"""The sender of each block to each node, against the plan carried out on arrays with a buffer for each node."""

import numpy as np
import pytest

from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.delivery import Deliveries, bytes_to, engine_ranks, readers_by_node
from grpo_mcore.refit.plan.plan import RefitError
from tests.unit.refit.whole_split import (
    PADDING,
    in_the_engine,
    index,
    on_the_policy,
    plan_of,
    random_case,
    random_nodes,
)


@pytest.mark.parametrize("seed", range(60))
def test_every_rank_finds_what_it_reads_in_the_buffer_of_its_node(seed: int) -> None:
    case = random_case(seed)
    plan = plan_of(case)
    engines, node_of_rank = random_nodes(case, seed)
    readers = readers_by_node(engines, case.engine.ranks)
    deliveries = Deliveries(plan, node_of_rank, readers)
    policy = [on_the_policy(case, rank) for rank in range(case.trainer.world_size)]
    ranks = [(nodes, rank) for nodes in engines for rank in range(case.engine.ranks)]
    found = [
        {name: np.full_like(array, PADDING) for name, array in in_the_engine(case, rank).items()} for _, rank in ranks
    ]
    moved = 0
    for block in plan.blocks():
        buffers = {}
        holders = plan.holders[block.holders]
        for node, sender in deliveries.of(block):
            assert node not in buffers, "a block comes once to a node"
            assert sender in holders
            near = [rank for rank in holders if node_of_rank and node_of_rank[rank] == node]
            assert not near or sender in near, "what is on the node does not travel"
            buffers[node] = policy[sender][block.param][index(block.box)]
            moved += block.nbytes
        read = set()
        for (nodes, rank), held in zip(ranks, found, strict=True):
            node = nodes[rank * len(nodes) // case.engine.ranks]
            for copy in block.reads:
                if copy.rank == rank:
                    target = held[copy.param][index(copy.box)]
                    target[...] = buffers[node].reshape(target.shape)
                    read.add(node)
        assert read == set(buffers), "no node gets what nobody there reads"
    for (_, rank), held in zip(ranks, found, strict=True):
        for name, array in in_the_engine(case, rank).items():
            assert np.array_equal(held[name], array), (rank, name)
    assert moved == sum(bytes_to(plan, here) for here in readers)
    assert engine_ranks(plan) == case.engine.ranks


def test_engines_over_nodes_share_the_work_of_the_replicas() -> None:
    """Slices that one part of each engine reads come to the engines from one replica after the other."""
    case = next(
        case for case in map(random_case, range(500)) if case.trainer == PolicyLayout(4, data=4)
        and case.engine == EngineLayout(4) and not case.experts
    )  # fmt: skip
    plan = plan_of(case)
    readers = readers_by_node([[0, 1, 2, 3], [4, 5, 6, 7]], 4)
    deliveries = Deliveries(plan, (), readers)
    slices = [block for block in plan.blocks() if len({read.rank for read in block.reads}) == 1]
    assert slices and all(len({sender for _, sender in deliveries.of(block)}) == 2 for block in slices)


def test_without_nodes_there_is_one_with_everything() -> None:
    plan = plan_of(random_case(1))
    assert all(Deliveries(plan).of(block) == [(0, block.source)] for block in plan.blocks())


def test_readers_by_node() -> None:
    assert readers_by_node([[0], [0], [1]], 2) == [[0, 1], [0, 1]]
    assert readers_by_node([[1, 0], [2, 3]], 4) == [[2, 3], [0, 1], [0, 1], [2, 3]]
    assert readers_by_node([[0, 0]], 2) == [[0, 1]]
    with pytest.raises(RefitError, match="3 ranks of an engine do not divide over its 2 nodes"):
        readers_by_node([[0, 1]], 3)
    with pytest.raises(RefitError, match="must be numbered 0, 1, 2"):
        readers_by_node([[0, 2]], 2)
