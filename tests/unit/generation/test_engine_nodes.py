"""Connections between the nodes of an engine, on real sockets."""

import queue
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from grpo_mcore.base.processes import free_port
from grpo_mcore.generation.config import EngineConfig, EngineNode, engine_arguments
from grpo_mcore.generation.engine_nodes import NodeLost, await_followers, deaths, join_first

HOST = "127.0.0.1"


def nodes(count: int, token: str = "secret") -> list[EngineConfig]:
    port = free_port(HOST)
    whole = EngineConfig("model", tensor_parallel_size=2 * count)
    return [replace(whole, node=EngineNode(rank, count, HOST, port, token)) for rank in range(count)]


def connect(configs: list[EngineConfig]) -> tuple[list[Any], list[queue.Queue[str]]]:
    """Connect the nodes. Return (each node's result, the reports that each one received)."""
    reports: list[queue.Queue[str]] = [queue.Queue() for _ in configs]
    found: list[Any] = [None] * len(configs)

    def follow(rank: int) -> None:
        found[rank] = join_first(configs[rank], reports[rank].put, 60.0)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, len(configs))]
    for thread in threads:
        thread.start()
    found[0] = await_followers(configs[0], reports[0].put, 60.0)
    for thread in threads:
        thread.join()
    for line in [*found[0][0], *(line for line, _ in found[1:])]:
        line.watch()
    return found, reports


def test_nodes_connect_and_report_deaths() -> None:
    (first, second, third), reports = connect(nodes(3))
    assert first[1] == second[1] == third[1] > 0, "one port for the ranks of all"
    second[0].tell("rank 2 of 6 has died")
    assert reports[0].get(timeout=60) == "rank 2 of 6 has died"
    third[0].close()
    assert reports[0].get(timeout=60) == "its node 2 of 3 (ranks 4 to 5, at 127.0.0.1) is gone"
    for line in first[0]:
        line.close()
        line.close()
    assert reports[1].get(timeout=60) == "its node 0 of 3 (ranks 0 to 1, at 127.0.0.1) is gone"
    second[0].tell("nobody is there any more")
    assert reports[2].empty(), "a node that closes a connection gets no report"


def test_a_node_that_does_not_come_is_named() -> None:
    with pytest.raises(NodeLost, match=r"engine-0: of its 3 nodes number 1, 2 did not come to 127.* within 0.2 s"):
        await_followers(nodes(3)[0], print, 0.2)
    with pytest.raises(NodeLost, match=r"engine-0: its node 1 of 2 did not reach the first at 127.* within 0.3 s"):
        join_first(nodes(2)[1], print, 0.3)


def test_a_node_without_the_token_is_rejected() -> None:
    first, second = nodes(2)
    stranger = replace(second, node=replace(second.node, token="guess"))
    failures: list[Exception] = []

    def intrude() -> None:
        try:
            join_first(stranger, print, 0.5)
        except NodeLost as error:
            failures.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    with pytest.raises(NodeLost, match="number 1 did not come"):
        await_followers(first, print, 1.5)
    thread.join()
    assert len(failures) == 1


def test_the_description_of_dead_ranks() -> None:
    assert deaths({2: None, 3: -9}, 4) == "rank 3 of 4 has died (exit code -9)"
    assert deaths({0: -signal.SIGTERM, 1: 1}, 2) == "rank 1 of 2 has died (exit code 1)"
    assert deaths({0: 0}, 1) == "rank 0 of 1 has died (exit code 0)"


def test_vllm_arguments_of_several_nodes() -> None:
    second = nodes(2)[1]
    found = engine_arguments(second, 1234)
    assert {key: found[key] for key in ("nnodes", "node_rank", "master_addr", "master_port")} == {
        "nnodes": 2, "node_rank": 1, "master_addr": HOST, "master_port": 1234,
    }  # fmt: skip
    assert found["distributed_executor_backend"] == "mp"
    assert "nnodes" not in engine_arguments(replace(second, node=EngineNode()))
    with pytest.raises(ValueError, match="its 4 ranks do not divide over 3 nodes"):
        EngineConfig("model", tensor_parallel_size=4, node=EngineNode(0, 3))
