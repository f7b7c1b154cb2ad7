"""Ranks on two machines, one of them stuck: an inspection names it, and only it."""

import time
from pathlib import Path

import pytest

from grpo_mcore.cluster.diagnostics import wait_graph
from grpo_mcore.cluster.inspection import odd_ones
from tests.functional.two_nodes import ADDRESSES, nodes, why_not, workers

REASON = why_not()
PORT = 29410
LONG_S = 240.0
"""Seconds that starting and standing still may take on a busy machine."""


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.timeout(2 * LONG_S + 60)
@pytest.mark.parametrize("size", [4, pytest.param(16, marks=pytest.mark.every_state)])
def test_of_ranks_on_two_machines_the_stuck_one_is_named_and_only_it(tmp_path: Path, size: int) -> None:
    stuck, here = size // 2 + 1, "tests.functional.inspected_ranks:"
    with nodes() as names:
        node = [names[2 * rank // size] for rank in range(size)]
        makers = {f"policy-{rank}": (node[rank], here + "Rank") for rank in range(size)}
        with workers(tmp_path, makers | {name: (name, here + "Collector") for name in names}) as started:
            ranks = {name: started[name] for name in makers}
            starts = {
                name: rank.call("start", index, size, ADDRESSES[0], PORT, str(tmp_path / f"{name}.log"))
                for index, (name, rank) in enumerate(ranks.items())
            }
            places = {name: start.result(timeout=LONG_S) for name, start in starts.items()}
            by_node = {name: {f"policy-{r}": places[f"policy-{r}"] for r in range(size) if node[r] == name}
                       for name in names}  # fmt: skip
            for rank in ranks.values():
                rank.call("train", stuck, 10)
            deadline, before, reports = time.monotonic() + LONG_S, {}, {}
            waiting = 0
            while (waiting < size - 1 or reports != before) and time.monotonic() < deadline:  # until all stand still
                asked = [started[name].call("reports", by_node[name]) for name in names]
                before, reports = reports, {}
                for answer in asked:
                    reports |= answer.result(timeout=LONG_S)
                waiting = sum(any(one.waits for one in report.collectives) for report in reports.values())
                time.sleep(0.5)
            told = wait_graph([], reports, list(places))
            assert odd_ones(reports) == [f"policy-{stuck}"], told
            assert "in wait_for_a_disk" in told.splitlines()[1] and f"policy-{stuck} is at" in told.splitlines()[1]
            assert "waits for its group in all_reduce, number 4 of PAIR" in told  # its pair
            assert "waits for its group in all_reduce, number 4 of default_pg" in told  # all others
            one_machine = {name: reports[name] for name in by_node[names[0]]}  # the other one does not answer
            assert odd_ones(one_machine) == []
