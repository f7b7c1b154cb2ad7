"""Which policy rank brings which block to which node: pure, the same on every side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_mcore.refit.plan import Block, RefitError, RefitPlan


def engine_ranks(plan: RefitPlan) -> int:
    """Of one engine: each of them reads something."""
    return 1 + max((read.rank for block in plan.blocks() for read in block.reads), default=0)


def bytes_to(plan: RefitPlan, ranks: Iterable[int]) -> int:
    """Of the blocks that one of these engine ranks reads."""
    wanted = frozenset(ranks)
    return sum(block.nbytes for block in plan.blocks() if any(read.rank in wanted for read in block.reads))


def readers_by_node(engines: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """The engine ranks on each node: what they read is what the node needs.

    `engines`: of each engine the numbers of its nodes, with as many of its `ranks` on each, in their order. Raises
    RefitError where the ranks do not divide, or a number between two nodes has no engine.
    """
    found: dict[int, set[int]] = {}
    for nodes in engines:
        each, rest = divmod(ranks, len(nodes))
        if rest:
            raise RefitError(f"the {ranks} ranks of an engine do not divide over its {len(nodes)} nodes")
        for place, node in enumerate(nodes):
            found.setdefault(node, set()).update(range(place * each, (place + 1) * each))
    if sorted(found) != list(range(len(found))):
        raise RefitError(f"the nodes with engines are to be numbered from 0 on, not {sorted(found)}")
    return [sorted(found[node]) for node in range(len(found))]


class Deliveries:
    """Every node gets the blocks that an engine rank there reads, each once.

    `homes`: the node of each policy rank among those with engines, or -1; empty: none is on one. `readers`: the engine
    ranks on each node; empty: there is one node, with all engine and policy ranks.
    """

    def __init__(self, plan: RefitPlan, homes: Sequence[int] = (), readers: Sequence[Sequence[int]] = ()) -> None:
        self._holders, self._homes = plan.holders, homes
        self._readers = [frozenset(ranks) for ranks in readers]
        self._found: dict[tuple[int, int, frozenset[int]], list[tuple[int, int]]] = {}  # most blocks are alike

    def of(self, block: Block) -> list[tuple[int, int]]:
        """(node, the policy rank that brings the block there): one of its holders on the node, where there is one, else
        the nodes take turns with all of them."""
        if not self._readers:
            return [(0, block.source)]
        key = block.holders, block.source, frozenset(read.rank for read in block.reads)
        if key not in self._found:
            needed = [node for node, ranks in enumerate(self._readers) if not ranks.isdisjoint(key[-1])]
            self._found[key] = [(node, self._sender(block, node, turn)) for turn, node in enumerate(needed)]
        return self._found[key]

    def _sender(self, block: Block, node: int, turn: int) -> int:
        holders = self._holders[block.holders]
        near = [rank for rank in holders if self._homes and self._homes[rank] == node]
        ranks = near or holders
        return ranks[(holders.index(block.source) + turn) % len(ranks)]
