"""RayCluster on real actors. One Ray for the whole file, and workers of one test for the next: they take seconds to
start."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import ray

from grpo_mcore.base.orphan_reaper import MARKER, SOCKETS, marked
from grpo_mcore.cluster import (
    DeadlineExceeded,
    NotEnoughResources,
    Worker,
    WorkerFailed,
    call_all,
    gather,
    ray_cluster,
    remote_call,
)
from grpo_mcore.cluster.inspection import ask, driver_key
from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.cluster.ray_worker import RayWorker
from tests.cluster_contract import CONTRACT
from tests.distributed.conftest import WANTED
from tests.distributed.ray_workers import Abacus, BadStart, Rank, Record
from tests.processes_below import named
from tests.waiting import wait_until

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def cluster(ray_cluster: RayCluster) -> RayCluster:
    return ray_cluster


@pytest.fixture(scope="module")
def abacus(cluster: RayCluster) -> Iterator[Worker]:
    worker = cluster.spawn("abacus", Abacus, 10, cluster.store, cpus=0.1, env={"OMP_NUM_THREADS": "1"})
    yield worker
    cluster.stop([worker])


@pytest.fixture(scope="module")
def second(cluster: RayCluster) -> Iterator[Worker]:
    worker = cluster.spawn("second", Abacus, 0, cluster.store, cpus=0.1, env={"OMP_NUM_THREADS": "3"})
    yield worker
    cluster.stop([worker])


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """Yield the file for which workers wait; it is there at the end, so that a test that fails holds no other up."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


@pytest.fixture(scope="class")
def kept(cluster: RayCluster) -> Iterator[dict[str, RayWorker]]:
    """The contract's workers by name, stopped before other tests see them."""
    workers: dict[str, RayWorker] = {}
    yield workers
    cluster.stop(list(workers.values()))


class TestContract:
    @pytest.mark.parametrize("law", CONTRACT, ids=lambda law: law.__name__)
    def test_it_keeps_the_contract(self, law, cluster, kept, monkeypatch):
        """A worker of a name that an earlier law had starts no process: its object is constructed anew."""
        spawn, stop = cluster.spawn, cluster.stop

        def spawn_or_rebuild(name, cls, *args, **options):
            if name in kept:
                kept[name].build(cls, *args)
            else:
                kept[name] = spawn(name, cls, *args, **options)
            return kept[name]

        def forget(workers):
            stop([kept.pop(worker.name) for worker in workers])

        monkeypatch.setattr(cluster, "spawn", spawn_or_rebuild)
        monkeypatch.setattr(cluster, "stop", forget)
        law(cluster, "law")


def test_driver_keeps_its_environment_and_workers_get_the_allowed_part(abacus, second):
    assert os.environ["GRPO_TEST_SECRET"] == "hunter2"
    assert MARKER not in os.environ and SOCKETS not in os.environ
    for worker, threads in ((abacus, "1"), (second, "3")):
        seen = worker.call("environment").result()
        assert "GRPO_TEST_SECRET" not in seen
        assert seen["GRPO_TEST_WANTED"] == WANTED
        assert seen["OMP_NUM_THREADS"] == threads
        assert seen["PATH"] == os.environ["PATH"]
        assert seen["CUDA_VISIBLE_DEVICES"] == ""
        assert (Path(seen[SOCKETS]) / "r" / "session_latest").exists(), "the folder that goes with the run"
    assert "hunter2" not in abacus.call("kernel_environment").result()  # nor does /proc show it


def folder(cluster: RayCluster) -> Path:
    """Return the folder of Ray's own files."""
    return cluster._session.reaper.folder


def test_no_file_has_a_secret_and_only_their_owner_can_read_rays(cluster, abacus, tmp_path):
    """Neither the values of `env_vars` nor Ray's token; the files that workers write have the user's permissions."""
    assert abacus.call("environment").result()["GRPO_TEST_WANTED"] == WANTED
    token = folder(cluster) / "token"
    assert abacus.call("environment").result()["RAY_AUTH_TOKEN_PATH"] == str(token)
    copied = tmp_path / "ray"
    cluster._session.copy_logs(copied, [WANTED])
    files = [path for place in (folder(cluster), copied, cluster.log_dir) for path in place.rglob("*")]
    files = [path for path in files if path.is_file() and not path.is_symlink() and path != token]
    assert any(path.name == "runtime_env_agent.log" for path in files) and len(files) > 20
    for path in files:
        content = path.read_bytes()
        assert not any(secret in content for secret in (WANTED.encode(), b"hunter2", token.read_bytes())), path
    for place in (folder(cluster), copied):  # Ray lets everybody read its folders below it
        assert place.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in copied.rglob("*") if path.is_file())
    assert token.stat().st_mode & 0o077 == 0
    umask = os.umask(0o077)
    os.umask(umask)
    assert (cluster.log_dir / "abacus.log").stat().st_mode & 0o777 == 0o644 & ~umask


def test_copied_logs_are_redacted(cluster, tmp_path, package_log):
    log = folder(cluster) / "r" / "session_latest" / "logs" / "chatty.log"
    log.write_text(f"token={WANTED}; on=1")
    cluster._session.copy_logs(tmp_path / "ray", [WANTED, "1"])
    assert (tmp_path / "ray" / "chatty.log").read_text() == "token=(hidden); on=1"
    cluster._session.copy_logs(log / "ray", [])  # such a folder cannot be made; the run goes on
    assert "Ray's logs cannot be copied" in package_log.text
    log.unlink()


def test_a_worker_stores_an_object_and_hands_over_the_reference(cluster, abacus, second):
    records = [abacus.call("stored_list", size).result() for size in (3, 100_000)]
    assert cluster.store.fetch(records[0].ref) == [0, 1, 2]
    assert second.call("sum_fetched", records).result() == 3 + sum(range(100_000))


def test_parcels_of_a_stream_go_from_worker_to_worker_and_none_is_lost(cluster, abacus, second):
    sizes = [3, *[30_000] * 100]
    for _ in range(3):
        parcels = list(abacus.stream("lists", sizes))
        assert [parcel.label for parcel in parcels] == sizes
        assert cluster.store.fetch(parcels[0].content) == [0, 1, 2]
        records = [Record(parcel.label, parcel.content) for parcel in parcels]
        assert second.call("sum_fetched", records).result() == 3 + 100 * sum(range(30_000))


@pytest.mark.parametrize("fails", [False, True])
def test_lists_of_parcels_that_are_there_come_as_one(cluster, abacus, second, gate, fails):
    """None is lost where the stream fails behind them: the error comes with the next call."""
    sizes = [*range(1, 40), *([0] if fails else [])]
    stream = abacus.stream("lists_together", sizes, str(gate))
    parcels, calls = next(stream), 1
    assert [parcel.label for parcel in parcels] == [(1, 0), (1, 1)]
    gate.touch()
    abacus.call("add", 0).result()  # by then all of them have been sent
    with pytest.raises(WorkerFailed, match="KeyError: 'beads'") if fails else contextlib.nullcontext():
        while cluster.ready([stream], 30.0, "lists") and (more := next(stream, None)) is not None:
            parcels, calls = parcels + more, calls + 1
    assert [parcel.label for parcel in parcels] == [(size, half) for size in range(1, 40) for half in range(2)]
    assert calls < 20
    contents = [list(range(half, size, 2)) for size in range(1, 40) for half in range(2)]
    assert cluster.store.fetch_many([parcel.content for parcel in parcels]) == contents
    one, other = parcels[77].content, parcels[4].content
    assert second.call("sum_of", one, 1000, other, one).result() == 2 * sum(contents[77]) + sum(contents[4]) + 1000


def test_parcels_outlive_their_worker(cluster, second):
    mortal = cluster.spawn("mortal", Abacus, cpus=0.1)
    parcels = list(mortal.stream("lists", [3, 50_000]))
    cluster.stop([mortal])
    records = [Record(parcel.label, parcel.content) for parcel in parcels]
    assert second.call("sum_fetched", records).result() == 3 + sum(range(50_000))


@pytest.mark.parametrize(("how", "error"), [("fails", "cannot be sent"), ("dies", "ActorDiedError")])
@pytest.mark.parametrize("part", ["label", "content"])
def test_a_worker_that_dies_in_the_middle_of_a_parcel_is_reported(cluster, abacus, part, how, error):
    """Its error must not pass for the parcel's content, nor for the end of the stream."""
    worker = abacus if how == "fails" else cluster.spawn("mortal", Abacus, cpus=0.1)
    stream = worker.stream("last_parcel_is_fatal", part, how)
    assert cluster.store.fetch(next(stream).content) == [0, 1, 2]
    with pytest.raises(WorkerFailed, match=error):
        next(stream)
    assert next(stream, "ended") == "ended"
    if how == "dies":
        cluster.stop([worker])


def test_a_reference_in_a_stream_is_rejected_because_ray_may_lose_it(abacus):
    with pytest.raises(WorkerFailed, match="yield Parcel"):
        next(abacus.stream("put_in_stream"))
    assert abacus.call("stored_list", 1).result().size == 1  # a call may return a reference


def test_items_of_a_stream_come_while_it_runs(abacus, gate):
    stream = abacus.stream("count_behind", 4, str(gate))
    assert next(stream) == 0
    gate.touch()
    assert list(stream) == [1, 2, 3]
    with pytest.raises(StopIteration):
        next(stream)


def test_those_that_have_something_are_ready(cluster, abacus, second, gate):
    slow, stream = abacus.call("nap_in_the_middle", str(gate)), second.stream("count", 3)
    waiting, got = [slow, stream], []
    while waiting:
        thing = cluster.ready(waiting, 20, "the race")[0]
        if thing is slow:
            got.append(slow.result())
            waiting.remove(slow)
            continue
        try:
            got.append(next(stream))
        except StopIteration:
            waiting.remove(stream)
            gate.touch()
    assert got == [0, 1, 2, "awake"]


def test_an_exception_comes_with_its_cause_and_the_log(abacus, cluster):
    with pytest.raises(WorkerFailed) as caught:
        abacus.call("fail", "beads are gone").result()
    assert (caught.value.worker, caught.value.purpose) == ("abacus", "fail")
    assert caught.value.cause == "ValueError: beads are gone"
    assert isinstance(caught.value.__cause__, ValueError)
    text = str(caught.value)
    assert "in fail\n" in text and "ray_actor.py" not in text
    assert "about to fail" in text and str(cluster.log_dir / "abacus.log") in text
    assert abacus.call("add", 0).result() == 10  # and the worker goes on


def test_an_exception_that_cannot_travel_comes_as_text(abacus):
    with pytest.raises(WorkerFailed, match="Awkward: awkward") as caught:
        abacus.call("fail_unpicklably").result()
    assert caught.value.__cause__ is None


def test_an_exceeded_deadline_names_the_worker_the_call_and_the_line(abacus, gate):
    pending = abacus.call("nap_in_the_middle", str(gate), timeout_s=0.5, purpose="the nap")
    with pytest.raises(DeadlineExceeded) as caught:
        pending.result()
    assert (caught.value.purpose, caught.value.whom, caught.value.seconds) == ("the nap", "abacus", 0.5)
    assert re.search(r'ray_workers.py", line \d+ in nap_in_the_middle', str(caught.value))
    gate.touch()
    assert abacus.call("add", 0).result() == 10  # the late call did not harm the worker


def test_an_answer_in_time_can_be_asked_for_later(abacus, cluster):
    pending = abacus.call("add", 0, timeout_s=1.0)
    cluster.ready([pending], 20, "the answer")
    time.sleep(1.1)
    assert pending.result() == 10


def test_spawn_does_not_wait_and_streams_and_calls_run_concurrently(cluster, gate, tmp_path):
    """A call waits for the constructor, and that for the gate."""
    host = cluster.spawn("host", Abacus, 5, None, str(gate), cpus=0.1, streams=2)
    early = host.call("add", 0)
    gate.touch()
    assert early.result() == 5
    gates = [tmp_path / name for name in "abc"]
    first, second, third = (host.stream("count_behind", 3, str(gate)) for gate in gates)
    assert next(first) == next(second) == 0, "both have begun, neither can end"
    assert host.call("add", 1).result() == 6
    for gate in gates[1:]:
        gate.touch()
    assert list(second) == [1, 2] and list(third) == [0, 1, 2], "the third in the thread of the second"
    assert host.call("add", 1).result() == 7
    gates[0].touch()
    assert list(first) == [1, 2]
    cluster.stop([host])


def test_what_workers_do_is_told_on_demand_and_kept_when_a_call_is_late(
    cluster, abacus, second, gate, monkeypatch, package_log
):
    monkeypatch.setattr(ray_cluster, "INSPECT_S", 0.5)
    monkeypatch.setattr(ray_cluster, "INSPECT_AT", 0.0)
    cluster._next_inspection = 0.0
    second.place()  # its process is up
    kept = cluster.log_dir / "inspection_0.txt"
    nap = abacus.call("nap_in_the_middle", str(gate), purpose="a nap")
    deadline = time.monotonic() + 60
    while not kept.exists() and time.monotonic() < deadline:
        with contextlib.suppress(DeadlineExceeded):
            cluster.ready([nap], 1.0, "a nap")
    asked = ask(driver_key(cluster.log_dir), 60.0)
    for told in (asked, kept.read_text()):
        assert told is not None and f"the driver (process {os.getpid()}) is at" in told
        assert "the driver waits for abacus: a nap, for " in told
        assert re.search(r"(?m)^  abacus is at \S+:\d+ in \w+$", told) and " in wait_at\n" in told, told
        assert re.search(r"(?m)^  second runs no Python of its own$", told), told
    assert "inspection.py" not in kept.read_text()
    assert "abacus: a nap has taken" in kept.read_text()
    gate.touch()
    assert nap.result() == "awake"
    cluster._inspection.join(60)
    assert f"what each process does: {kept}" in package_log.text


def test_a_late_item_and_a_late_group_are_named(cluster, abacus, second, gate):
    stream = abacus.stream("count_behind", 2, str(gate), timeout_s=1.0)
    assert next(stream) == 0
    with pytest.raises(DeadlineExceeded, match="count_behind: no answer from abacus within 1 s"):
        next(stream)
    things = [abacus.call("nap_in_the_middle", str(gate)), second.call("nap_in_the_middle", str(gate))]
    with pytest.raises(DeadlineExceeded, match="the crowd: no answer from abacus, second within 0.2 s"):
        cluster.ready(things, 0.2, "the crowd")
    gate.touch()
    gather(cluster, things, timeout_s=20, purpose="the crowd")


def test_a_dead_worker_is_named_with_the_end_of_its_log(cluster):
    doomed = cluster.spawn("doomed", Abacus, cpus=0.1)
    doomed.ready().result()  # otherwise its start-up report would be lost with it
    doomed.place()
    with pytest.raises(WorkerFailed, match="doomed: die failed: ActorDiedError") as caught:
        doomed.call("die").result()
    assert "about to die" in str(caught.value)
    with pytest.raises(WorkerFailed, match="doomed: add failed"):
        doomed.call("add", 1).result()
    cluster.stop([doomed])


def test_a_failing_constructor_fails_ready_and_every_call(cluster):
    bad = cluster.spawn("bad", BadStart, cpus=0.1)
    with pytest.raises(WorkerFailed, match="bad: its constructor failed: FileNotFoundError: no beads"):
        bad.ready().result()
    with pytest.raises(WorkerFailed, match="its constructor failed before: FileNotFoundError: no beads"):
        bad.call("add", 1).result()
    cluster.stop([bad])


def test_concurrent_calls_share_one_object(cluster, gate):
    pair = cluster.spawn("pair", Abacus, 5, None, cpus=0.1, concurrency=2)
    pair.ready().result()  # an actor's start has its own, long deadline
    nap, count = pair.call("nap_in_the_middle", str(gate)), pair.call("add", 1)
    assert cluster.ready([nap, count], 60, "the quick one") == [count]
    assert cluster.ready([count, nap], 60, "both", patient=True) == [count]
    gate.touch()
    assert (count.result(), nap.result()) == (6, "awake")
    cluster.stop([pair])


@pytest.fixture(scope="module")
def ranks(cluster: RayCluster) -> Iterator[Sequence[Worker]]:
    workers = cluster.spawn_group("rank", Rank, [("a",), ("b",)], cpus=0.1)
    yield workers
    cluster.stop(workers)


def test_the_ranks_of_a_group_can_meet(cluster, ranks):
    """(functional/test_async_ray.py: they form torch's process group.)"""
    facts = call_all(cluster, ranks, Rank.facts)()
    assert [worker.name for worker in ranks] == ["rank-0", "rank-1"]
    assert [word for _, word in facts] == ["a", "b"]
    rendezvous = [fact for fact, _ in facts]
    assert [(r.rank, r.world_size, r.local_rank) for r in rendezvous] == [(0, 2, 0), (1, 2, 1)]
    assert len({(r.master_addr, r.master_port) for r in rendezvous}) == 1
    assert call_all(cluster, ranks, Rank.meet)() == [1, 0]


def test_the_failing_rank_is_named_and_the_others_are_not_waited_for(cluster, ranks, gate):
    with pytest.raises(WorkerFailed, match="rank-1: act failed: .* rank 1 has had enough") as caught:
        call_all(cluster, ranks, Rank.act, grace_s=0.3)(1, str(gate))
    assert caught.value.__notes__ == ["rank-0 was still at work on act 0.3 s later"]
    gate.touch()
    assert call_all(cluster, ranks, Rank.act)(9) == [0, 1]


def test_a_deadline_names_the_rank_that_is_missing(cluster, ranks, gate):
    act = [remote_call(rank, Rank.act, purpose="the act") for rank in ranks]
    calls = [act[0](9, str(gate)), act[1](9)]
    with pytest.raises(DeadlineExceeded, match="the act: no answer from rank-0 within 1 s"):
        gather(cluster, calls, timeout_s=1.0, purpose="the act")
    gate.touch()
    assert call_all(cluster, ranks, Rank.act)(9) == [0, 1]


def test_gpus_are_visible_to_their_rank_and_to_colocated_workers(cluster):
    group = cluster.spawn_group("gpu", Rank, [("a",), ("b",)], cpus=0.1, gpus=1)
    places = [worker.place() for worker in group]
    assert sorted(gpu for place in places for gpu in place.gpus) == ["0", "1"]
    assert [fact.local_rank for fact, _ in call_all(cluster, group, Rank.facts)()] == [0, 0]
    engine = cluster.spawn("beside", Abacus, cpus=0.1, colocate_with=group)
    assert engine.place().node == places[0].node
    assert engine.place().gpus == places[0].gpus + places[1].gpus
    parts = cluster.spawn_group(
        "parts", Rank, [("a",), ("b",)], cpus=0.1, colocate_with=[group[:1], group[1:]], concurrency=2
    )
    assert [part.place().gpus for part in parts] == [place.gpus for place in places]
    assert [fact.rank for fact, _ in call_all(cluster, parts, Rank.facts)()] == [0, 1]
    cluster.stop([*group, engine, *parts])


def test_a_request_that_cannot_be_met_fails_at_once(cluster):
    with pytest.raises(NotEnoughResources, match=r"big: too few GPUs: 3 x \(0.1 CPU, 1 GPU\) asked .* 4 CPU, 2 GPU"):
        cluster.spawn_group("big", Rank, [()] * 3, cpus=0.1, gpus=1)
    with pytest.raises(NotEnoughResources, match="huge: too few CPUs: 1 x"):
        cluster.spawn("huge", Abacus, cpus=64)


def test_rays_memory_monitor_is_off_and_no_worker_starts_in_advance(cluster):
    """As in the job scripts: it would kill workers that hold a model."""
    (raylet,) = named("raylet")
    for name in ("RAY_memory_monitor_refresh_ms", "RAY_prestart_worker_first_driver"):
        assert raylet.environ()[name] == "0" and name not in os.environ


def test_waiting_for_occupied_resources_has_a_deadline(cluster, monkeypatch):
    left_to_us = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}  # Ray sets none
    holder = cluster.spawn("holder", Abacus, cpus=0.1, gpus=2, env=left_to_us)  # the GPUs of earlier tests are free
    assert holder.place().gpus == ("0", "1")
    monkeypatch.setattr(cluster, "_start_timeout_s", 1.0)
    monkeypatch.setattr(ray_cluster, "CLOSE_S", 0.3)  # a worker without a process answers nothing
    late = cluster.spawn("late", Abacus, cpus=0.1, gpus=1)
    with pytest.raises(DeadlineExceeded, match="late has no process yet: asks for .*1 GPU.* free:.* 0 GPU") as caught:
        late.ready().result()
    assert "its constructor: no answer from late within 1 s" in str(caught.value)
    with pytest.raises(DeadlineExceeded, match="room for group: .* within 1 s\nasked for: 2 x .* 0 GPU of"):
        cluster.spawn_group("group", Rank, [(), ()], cpus=0.1, gpus=1)
    cluster.stop([holder, late])


def test_names_are_unique(cluster, abacus):
    with pytest.raises(ValueError, match="a worker called abacus already"):
        cluster.spawn("abacus", Abacus, cpus=0.1)


def started(program: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a program as a driver of its own, with a folder as its argument, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        start_new_session=True,
    )


def told(program: str, folder: Path, **environment: str) -> list[str]:
    """Run the program to its end, and return the lines that it prints after "> "."""
    driver = started(program, folder, **environment)
    try:
        out, err = driver.communicate(timeout=300)
    finally:
        driver.kill()
    assert driver.returncode == 0, out + err
    return [line.removeprefix("> ") for line in out.split("\n") if line.startswith("> ")]


GUEST = """
    import pathlib, sys
    import ray
    from grpo_mcore.cluster.ray_session import BadRayAddress
    from grpo_mcore.cluster.ray_cluster import RayCluster
    from tests.distributed.ray_workers import Abacus

    version, ray.__version__ = ray.__version__, "2.0.0"
    try:
        RayCluster(pathlib.Path(sys.argv[1]))
    except BadRayAddress as error:
        assert "cannot be joined: Version mismatch" in str(error) and version in str(error)
    else:
        raise AssertionError("another version of Ray joined")
    ray.shutdown()
    ray.__version__ = version
    with RayCluster(pathlib.Path(sys.argv[1])) as cluster:
        assert not cluster._session.started_here
        guest = cluster.spawn("guest", Abacus, cpus=0.1, env={"GRPO_TEST_GIVEN": "given"})
        seen = guest.call("environment").result()
        print(">", {key: value for key, value in seen.items() if key.startswith("GRPO_TEST")})
"""


def test_a_second_driver_attaches_and_leaves_the_rest_alone(cluster, abacus, tmp_path):
    address = ray.get_runtime_context().gcs_address
    names = {
        "RAY_ADDRESS": address,
        "RAY_AUTH_TOKEN_PATH": str(folder(cluster) / "token"),
        "GRPO_TEST_SECRET": "hunter3",
    }
    # not GRPO_TEST_WANTED: the guest's recipe does not allow it
    assert abacus.call("add", 3).result() == 13
    assert told(GUEST, tmp_path, **names) == ["{'GRPO_TEST_GIVEN': 'given'}"]
    assert (tmp_path / "guest.log").exists()
    assert abacus.call("add", -3).result() == 10, "the first driver's worker is the same object"


STOPPED = """
    import os, pathlib, signal, sys, time
    from grpo_mcore.cluster import ray_session
    from grpo_mcore.base.orphan_reaper import marked
    from grpo_mcore.cluster.ray_cluster import RayCluster
    from tests.distributed.ray_workers import Abacus
    from tests.processes_below import named

    ray_session.SHUTDOWN_S = 2.0
    with RayCluster(pathlib.Path(sys.argv[1]), address="local", num_cpus=2, start_timeout_s=150) as cluster:
        abacus = cluster.spawn("abacus", Abacus, 1, cpus=0.1)
        abacus.place()
        mark = cluster._session.reaper.mark
        for process in named("raylet"):
            process.suspend()
        print("> works on:", abacus.call("add", 1).result())
    print("> left:", marked(mark))
"""


VANISHED = """
    import pathlib, sys, threading, time
    from grpo_mcore.base.stopping import StopRequest
    from grpo_mcore.cluster import NodeLost, is_fault
    from grpo_mcore.cluster.ray_cluster import RayCluster
    from tests.distributed.ray_workers import Abacus

    with RayCluster(pathlib.Path(sys.argv[1]), address="local", num_cpus=2, start_timeout_s=150) as cluster:
        abacus = cluster.spawn("abacus", Abacus, 1, cpus=0.1)
        print("> adds:", abacus.call("add", 1).result())
        stop = StopRequest()
        cluster.watch = stop.check
        threading.Timer(1.0, stop.ask, ["SIGTERM asked the run to stop"], {"at_once": True}).start()
        began = time.monotonic()
        call = abacus.call("nap_in_the_middle", sys.argv[1] + "/gate")
        waited = stop.interruptible(lambda: (call.result(), "it was not interrupted"))
        print("> heard:", waited, time.monotonic() - began < 30)
        (cluster._session.reaper.folder / "token").unlink()
        began = time.monotonic()
        try:
            cluster.spawn("successor", Abacus, 1, cpus=0.1)
        except NodeLost as error:
            print("> lost:", "/token); let nothing clean that folder up (tmpreaper" in str(error), is_fault(error))
        print("> at once:", time.monotonic() - began < 60)
"""


@pytest.mark.every_state  # it starts and ends a Ray of its own
def test_a_wait_hears_a_request_to_stop_and_vanished_files_are_a_loss(tmp_path):
    """Without Ray's token no worker can start: the successor of a dead engine was waited for, for many minutes."""
    expected = ["adds: 2", "heard: None True", "lost: True True", "at once: True"]
    assert told(VANISHED, tmp_path) == expected


@pytest.mark.every_state  # it starts and ends a Ray of its own
def test_a_raylet_that_stands_still_does_not_hold_up_the_end(tmp_path):
    """What its workers do needs it no more, so nothing is noticed before the end."""
    assert told(STOPPED, tmp_path) == ["works on: 2", "left: []"]


NODES = """
    import pathlib, sys, threading, time
    import ray
    from ray.cluster_utils import Cluster
    from grpo_mcore.cluster import NodeLost, NotEnoughResources, is_fault
    from grpo_mcore.cluster.ray_cluster import RayCluster
    from tests.distributed.ray_workers import Abacus

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = nodes.add_node(num_cpus=4)
    with RayCluster(pathlib.Path(sys.argv[1]), address=nodes.address, start_timeout_s=1.5) as cluster:
        first = cluster.spawn("first", Abacus, cpus=3)
        first.place()
        beside = cluster.spawn("beside", Abacus, cpus=0.5)
        assert beside.place().node != first.place().node, "one on each node"
        waiting = [worker.call("nap_in_the_middle", "/nowhere") for worker in (first, beside)]
        time.sleep(1.0)
        asked = cluster._reports(["first", "beside"])
        print("> asked on its node:", sorted(name for name, report in asked.items() if "in wait_at" in report.frames))
        try:
            cluster.spawn("huge", Abacus, cpus=64)
        except NotEnoughResources as error:
            print("> a mistake:", is_fault(error), error)
        nodes.remove_node(second, allow_graceful=False)
        while all(node["Alive"] for node in ray.nodes()):
            time.sleep(0.1)
        for start in (
            lambda: cluster.spawn("successor", Abacus, cpus=3),
            lambda: cluster.spawn_group("group", Abacus, [()] * 2, cpus=0.1, nodes=2),
        ):
            try:
                start()
            except NodeLost as error:
                print("> a loss:", is_fault(error), error)
        cluster._wait_for_nodes_s = cluster._start_timeout_s = 60.0
        spawned = []
        waiting = threading.Thread(target=lambda: spawned.append(cluster.spawn("again", Abacus, cpus=3)))
        waiting.start()
        nodes.add_node(num_cpus=4)
        waiting.join(60)
        print("> the successor runs on another node:", bool(spawned[0].place().node))
"""


@pytest.mark.every_state  # Ray takes half a minute to start and end three nodes
def test_a_lost_node_is_waited_for_and_is_no_mistake_of_the_recipe(tmp_path):
    asked, mistake, first, group, again = told(NODES, tmp_path)
    assert asked == "asked on its node: ['beside', 'first']"
    assert mistake.startswith("a mistake: False huge: too few CPUs: 1 x (64 CPU, 0 GPU) asked for")
    assert first.startswith("a loss: True successor: too few CPUs: 1 x (3 CPU, 0 GPU) asked for, the cluster has 1 CPU")
    assert first.endswith("1 of its nodes are lost, and none came in their place in 1.5 s")
    assert group.startswith("a loss: True group: 2 nodes asked for, the cluster has 1; 1 of its nodes are lost")
    assert again == "the successor runs on another node: True"


DRIVER = """
    import pathlib, subprocess, sys, threading, time
    from grpo_mcore.cluster.ray_cluster import RayCluster

    class Parent:
        def __init__(self):
            # A child in a session of its own, like a server's.
            self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            self.ended = threading.Event()
        def work(self):
            yield self.child.pid
            self.ended.wait()
            raise RuntimeError("it was shut down while it worked")
        def shutdown(self):
            self.ended.set()
            time.sleep(1.0)

    with RayCluster(pathlib.Path(sys.argv[1]), address="local", num_cpus=1) as cluster:
        worker = cluster.spawn("parent", Parent, cpus=0.1, concurrency=2)
        worker.ready().result()
        streams = [worker.stream("work", timeout_s=500)]
        try:
            next(streams[0])
            print(cluster._session.reaper.mark, cluster._session.reaper.folder, flush=True)
            time.sleep(500)
        finally:  # the last handle of its error goes while the worker ends
            threading.Timer(0.3, streams.clear).start()
"""


@pytest.mark.parametrize("kind", [pytest.param("SIGINT", marks=pytest.mark.every_state), "SIGKILL"])
def test_a_killed_run_leaves_nothing_behind(kind, tmp_path):
    driver = started(DRIVER, tmp_path)
    try:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line, driver.communicate()[1]
        mark, folder = line.split()
        names = [_command(pid) for pid in marked(mark)]
        assert b"sleep" in names and any(b"raylet" in name for name in names) and len(names) >= 6
        os.killpg(driver.pid, signal.Signals[kind])  # to the whole process group, as a terminal does
        _, errors = driver.communicate(timeout=60)
    finally:
        driver.kill()
    if kind == "SIGINT":  # also in functional/test_async_ray.py
        assert driver.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors
        assert "shut down while" not in errors  # errors of calls to stopped workers are not reported
        assert marked(mark) == [] and not Path(folder).exists()  # immediately, without waiting
    wait_until(lambda: not marked(mark) and not Path(folder).exists(), "the end of all", pause=0.2)


def _command(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return b""
