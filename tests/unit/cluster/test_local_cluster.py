"""The cluster inside this process: the same interface, the same errors."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_mcore.cluster import (
    LocalCluster,
    Parcel,
    Rendezvous,
    WorkerFailed,
    open_cluster,
)
from grpo_mcore.driver.run.setup import wait_until_ready
from grpo_mcore.recipe import load_recipe


class Abacus:
    def __init__(self, start: int) -> None:
        self.total = start
        self.closed = False
        self.thread = threading.get_ident()

    def add(self, value: int) -> int:
        self.total += value
        return self.total

    def fail(self) -> None:
        raise ValueError("beads are gone")

    def count(self, upto: int) -> Iterator[int]:
        for value in range(upto):
            self.total += 1
            yield value

    def parcels(self) -> Iterator[Parcel]:
        yield Parcel("three", [0, 1, 2])

    def not_a_generator(self) -> None:
        return None

    def shutdown(self) -> None:
        self.closed = True


class Slow:
    def __init__(self) -> None:
        time.sleep(0.6)


class Rank:
    def __init__(self, rendezvous: Rendezvous, word: str) -> None:
        self.rendezvous, self.word = rendezvous, word


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


def test_a_call_runs_at_once_in_this_thread(cluster):
    worker = cluster.spawn("abacus", Abacus, 10)
    pending = worker.call("add", 1)
    assert worker.target.total == 11 and worker.target.thread == threading.get_ident()
    assert pending.result() == pending.result() == 11
    assert worker.ready().result() is None and worker.place().pid == os.getpid()


def test_a_debugger_finds_the_frame_that_raised(cluster):
    with pytest.raises(WorkerFailed, match="beads are gone") as caught:
        cluster.spawn("abacus", Abacus, 10).call("fail").result()
    frames = caught.value.__cause__.__traceback__
    while frames.tb_next:
        frames = frames.tb_next
    assert frames.tb_frame.f_code.co_name == "fail"


def test_a_failing_constructor_raises_from_spawn(cluster):
    with pytest.raises(WorkerFailed, match="bad: its constructor failed: TypeError"):
        cluster.spawn("bad", Abacus)


def test_a_constructor_that_exits_ends_nothing(cluster):
    with pytest.raises(
        WorkerFailed, match=r"bad: its constructor failed: RuntimeError: it called sys.exit\(2\) \(.*py:"
    ):
        cluster.spawn("bad", sys.exit, 2)


def test_a_stream_runs_when_it_is_read(cluster):
    worker = cluster.spawn("abacus", Abacus, 0)
    stream = worker.stream("count", 3)
    assert worker.target.total == 0
    assert next(stream) == 0 and worker.target.total == 1
    assert list(stream) == [1, 2]


def test_a_method_that_streams_nothing_is_an_error_of_the_worker(cluster):
    with pytest.raises(WorkerFailed, match="not_a_generator failed: TypeError"):
        next(cluster.spawn("abacus", Abacus, 0).stream("not_a_generator"))


def test_references_are_the_objects(cluster):
    content = [1, 2]
    assert cluster.store.fetch(cluster.store.put(content)) is content
    assert cluster.store.fetch_many([cluster.store.put(content)])[0] is content
    [parcel] = cluster.spawn("abacus", Abacus, 0).stream("parcels")
    assert parcel.label == "three" and cluster.store.fetch(parcel.content) == [0, 1, 2]


def test_only_the_first_is_ready(cluster):
    worker = cluster.spawn("abacus", Abacus, 0)
    things = [worker.call("add", 1), worker.call("add", 1)]
    assert cluster.ready(things, 0.0, "both") == things[:1]


def test_a_group_of_one_meets_itself_and_more_are_refused(cluster):
    [worker] = cluster.spawn_group("rank", Rank, [("a",)])
    assert worker.name == "rank-0" and worker.target.word == "a"
    there = worker.target.rendezvous
    assert (there.rank, there.world_size, there.local_rank, there.master_addr) == (0, 1, 0, "127.0.0.1")
    assert there.master_port > 0
    with pytest.raises(ValueError, match="runs one rank in this process, not 2; .*cluster.backend=ray"):
        cluster.spawn_group("rank", Rank, [("a",), ("b",)])


def test_env_is_set_until_shutdown(monkeypatch):
    monkeypatch.setenv("GRPO_TEST_OLD", "before")
    monkeypatch.delenv("GRPO_TEST_NEW", raising=False)
    with LocalCluster() as cluster:
        cluster.spawn("one", Abacus, 0, env={"GRPO_TEST_OLD": "1", "GRPO_TEST_NEW": "1"})
        cluster.spawn("two", Abacus, 0, env={"GRPO_TEST_OLD": "2"})
        assert (os.environ["GRPO_TEST_OLD"], os.environ["GRPO_TEST_NEW"]) == ("2", "1")
    assert os.environ["GRPO_TEST_OLD"] == "before" and "GRPO_TEST_NEW" not in os.environ


def test_the_end_closes_the_workers_once(cluster):
    first, second = cluster.spawn("first", Abacus, 0), cluster.spawn("second", Abacus, 0)
    cluster.stop([first])
    assert (first.target.closed, second.target.closed) == (True, False)
    first.target.closed = False
    cluster.shutdown()
    cluster.shutdown()
    assert (first.target.closed, second.target.closed) == (False, True)


def test_the_recipe_chooses(tmp_path: Path):
    cluster = open_cluster(SimpleNamespace(backend="local", step_timeout_s=7.0, env_vars={}), tmp_path)
    assert isinstance(cluster, LocalCluster) and cluster.call_timeout_s == 7.0


def test_the_start_up_tells_the_seconds_of_a_constructor(caplog: pytest.LogCaptureFixture) -> None:
    config = load_recipe("grpo-arithmetic-cpu").config
    with LocalCluster() as cluster, caplog.at_level(logging.INFO):
        workers = [cluster.spawn("policy-0", Slow), cluster.spawn("engine-0", Abacus, 1)]
        wait_until_ready(config, cluster, workers)
    assert [line.strip() for line in caplog.messages] == ["policy: ready after 1 s", "engine: ready after 0 s"]
