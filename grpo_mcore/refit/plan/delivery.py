"""Decide which policy rank brings which block to which node. Pure: every process computes the same answer."""

from collections.abc import Iterable, Sequence

from grpo_mcore.refit.plan.plan import Block, RefitError, RefitPlan


def engine_ranks(plan: RefitPlan) -> int:
    """Return the number of ranks of one engine. Each rank reads something."""
    return 1 + max((read.rank for block in plan.blocks() for read in block.reads), default=0)


def bytes_to(plan: RefitPlan, ranks: Iterable[int]) -> int:
    """Return the bytes of all blocks that at least one of these engine ranks reads."""
    members = frozenset(ranks)
    return sum(block.nbytes for block in plan.blocks() if any(read.rank in members for read in block.reads))


def readers_by_node(engines: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Return the engine ranks on each node. The node needs what these ranks read.

    `engines`: the node numbers of each engine; its `ranks` are spread over them evenly and in order. Raises RefitError
    if the ranks do not divide evenly, or the node numbers have a gap.
    """
    readers: dict[int, set[int]] = {}
    for nodes in engines:
        count, rest = divmod(ranks, len(nodes))
        if rest:
            raise RefitError(f"the {ranks} ranks of an engine do not divide over its {len(nodes)} nodes")
        for index, node in enumerate(nodes):
            readers.setdefault(node, set()).update(range(index * count, (index + 1) * count))
    if sorted(readers) != list(range(len(readers))):
        raise RefitError(f"the nodes with engines must be numbered 0, 1, 2, ..., not {sorted(readers)}")
    return [sorted(readers[node]) for node in range(len(readers))]


class Deliveries:
    """Assigns senders so that each node gets every block that an engine rank there reads exactly once.

    `node_of_rank`: the node of each policy rank, -1 if it has no engines; empty: no policy rank shares a node with an
    engine. `readers`: the engine ranks on each node; empty: all engine and policy ranks are on one node.
    """

    def __init__(
        self, plan: RefitPlan, node_of_rank: Sequence[int] = (), readers: Sequence[Sequence[int]] = ()
    ) -> None:
        self._holders, self._node_of_rank = plan.holders, node_of_rank
        self._readers = [frozenset(ranks) for ranks in readers]
        self._found: dict[tuple[int, int, frozenset[int]], list[tuple[int, int]]] = {}  # most blocks are alike

    def of(self, block: Block) -> list[tuple[int, int]]:
        """Return (node, the policy rank that brings the block there) for each node that needs it.

        The sender is a holder on that node if there is one; otherwise the nodes share all holders round-robin."""
        if not self._readers:
            return [(0, block.source)]
        key = block.holders, block.source, frozenset(read.rank for read in block.reads)
        if key not in self._found:
            needed = [node for node, ranks in enumerate(self._readers) if not ranks.isdisjoint(key[-1])]
            self._found[key] = [(node, self._sender(block, node, turn)) for turn, node in enumerate(needed)]
        return self._found[key]

    def _sender(self, block: Block, node: int, turn: int) -> int:
        holders = self._holders[block.holders]
        near = [rank for rank in holders if self._node_of_rank and self._node_of_rank[rank] == node]
        ranks = near or holders
        return ranks[(holders.index(block.source) + turn) % len(ranks)]
