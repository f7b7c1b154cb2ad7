"""What every cluster promises: `LocalCluster`, `VirtualCluster` and `RayCluster` pass the same tests.

Each function of CONTRACT takes a cluster and a name for its workers.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_mcore.cluster import Cluster, Parcel, Worker, WorkerFailed, call_all, gather, remote_call, remote_stream


class Abacus:
    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, value: int) -> int:
        self.total += value
        return self.total

    def length(self, *lists: list[int]) -> int:
        return sum(map(len, lists))

    def fail(self) -> None:
        raise ValueError("beads are gone")

    def leave(self) -> None:
        sys.exit("no beads")

    def count_then_fail(self) -> Iterator[int]:
        yield 0
        yield 1
        raise KeyError("beads")

    def parcels(self) -> Iterator[Any]:
        yield Parcel("three", [0, 1, 2])
        yield [Parcel("one", [5]), Parcel("none", [])]


def _abacus(cluster: Cluster, name: str, start: int = 0) -> Worker:
    return cluster.spawn(name, Abacus, start, cpus=0.01)


def calls_run_in_order_on_one_object(cluster: Cluster, name: str) -> None:
    worker = _abacus(cluster, name, 10)
    assert worker.ready().result() is None
    answers = [remote_call(worker, Abacus.add)(value) for value in (1, 2, 3)]
    assert [answer.result() for answer in reversed(answers)] == [16, 13, 11]
    assert answers[0].result() == 11, "a result can be read again"
    assert answers[0].whom == name and answers[0].purpose == "add" and worker.place().node


def calls_at_a_time_are_answered_one_by_one(cluster: Cluster, name: str) -> None:
    worker = cluster.spawn(name, Abacus, 10, cpus=0.01, concurrency=2)
    answers = [remote_call(worker, Abacus.length)([0] * size) for size in (1, 2)]
    failed = remote_call(worker, Abacus.fail, purpose="counting")()
    assert [answer.result() for answer in answers] == [1, 2] and answers[0].purpose == "length"
    with pytest.raises(WorkerFailed, match=f"{name}: counting failed: ValueError: beads are gone") as caught:
        failed.result()
    assert isinstance(caught.value.__cause__, ValueError) and cluster.ready([failed], 9, "it") == [failed]


def an_error_waits_for_result_and_has_its_cause(cluster: Cluster, name: str) -> None:
    worker = _abacus(cluster, name)
    answer = remote_call(worker, Abacus.fail, purpose="counting")()
    with pytest.raises(WorkerFailed, match=f"{name}: counting failed: ValueError: beads are gone") as caught:
        answer.result()
    assert isinstance(caught.value.__cause__, ValueError) and remote_call(worker, Abacus.add)(1).result() == 1


def a_method_that_exits_is_an_error(cluster: Cluster, name: str) -> None:
    worker = _abacus(cluster, name)
    with pytest.raises(
        WorkerFailed, match=rf"{name}: leave failed: RuntimeError: it called sys.exit\('no beads'\) \(.*py:"
    ):
        remote_call(worker, Abacus.leave)().result()
    assert remote_call(worker, Abacus.add)(1).result() == 1


def a_stream_gives_its_items_before_its_error(cluster: Cluster, name: str) -> None:
    stream = remote_stream(_abacus(cluster, name), Abacus.count_then_fail)()
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(WorkerFailed, match=f"{name}: count_then_fail failed: KeyError: 'beads'"):
        next(stream)


def contents_of_parcels_stay_in_the_store(cluster: Cluster, name: str) -> None:
    worker = _abacus(cluster, name)
    first, others = remote_stream(worker, Abacus.parcels)()
    assert first.label == "three" and [parcel.label for parcel in others] == ["one", "none"]
    assert cluster.store.fetch(first.content) == [0, 1, 2]
    contents = [first.content, *(parcel.content for parcel in others)]
    assert cluster.store.fetch_many(contents) == [[0, 1, 2], [5], []]
    assert remote_call(worker, Abacus.length)(*contents, cluster.store.put([7, 8])).result() == 6


def what_is_ready_is_returned(cluster: Cluster, name: str) -> None:
    worker = _abacus(cluster, name)
    things: list[Any] = [remote_call(worker, Abacus.add)(1), remote_stream(worker, Abacus.count_then_fail)()]
    looked: list[int] = []
    ready = cluster.ready(things, 60.0, "beads", lambda: looked.append(1))
    assert ready and set(map(id, ready)) <= set(map(id, things)) and looked
    with pytest.raises(ValueError, match="nothing to wait for"):
        cluster.ready([], 1.0, "beads")


def answers_are_gathered_by_worker(cluster: Cluster, name: str) -> None:
    workers = [_abacus(cluster, f"{name}-{number}", number) for number in range(3)]
    assert call_all(cluster, workers, Abacus.add)(10) == [10, 11, 12]
    failing = [remote_call(workers[0], Abacus.add)(0), remote_call(workers[1], Abacus.fail)()]
    with pytest.raises(WorkerFailed, match="beads are gone"):
        gather(cluster, failing, timeout_s=60.0, purpose="counting")


def a_stopped_worker_frees_its_name(cluster: Cluster, name: str) -> None:
    cluster.stop([_abacus(cluster, name)])
    assert remote_call(_abacus(cluster, name, 5), Abacus.add)(1).result() == 6


CONTRACT = [
    calls_run_in_order_on_one_object,
    calls_at_a_time_are_answered_one_by_one,
    an_error_waits_for_result_and_has_its_cause,
    a_method_that_exits_is_an_error,
    a_stream_gives_its_items_before_its_error,
    contents_of_parcels_stay_in_the_store,
    what_is_ready_is_returned,
    answers_are_gathered_by_worker,
    a_stopped_worker_frees_its_name,
]
