"""Refits under Ray while the engine streams samples: several streams at once, two weight versions in one sample, and a
refit that fails halfway. `make test` has such refits in one process (test_engine_refit.py, test_refit_faults.py) and in
a run under Ray (test_async_ray.py)."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.algorithms.grpo import refit_policy_generation
from grpo_mcore.cluster import WorkerFailed
from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.driver.policy.refit_step import refit_once
from grpo_mcore.driver.run.checks import check_run
from grpo_mcore.driver.run.setup import start_engines, wait_until_ready
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.transport.shared_memory import PREFIX, SEGMENTS
from grpo_mcore.rollout.trajectory import Sampling, Trajectory
from tests.functional.engine_cases import CONTEXT, Policy, check_spans, make_model, request
from tests.functional.ray_policy import change, policy_group, recipe_of

pytestmark = pytest.mark.every_state

LONG = Sampling(max_new_tokens=120)
DEADLINE_S = 120.0


class Paced:
    """A worker of which some calls ("send_refit", "commit_refit") wait for a gate before they are made."""

    def __init__(self, worker: Any, gates: dict[str, Callable[[], None]]) -> None:
        self._worker, self._gates, self.name = worker, gates, worker.name

    def call(self, method: str, *args: Any, **how: Any) -> Any:
        gate = self._gates.get(method)
        if gate is not None:
            gate()
        return self._worker.call(method, *args, **how)

    def stream(self, *args: Any, **how: Any) -> Any:
        return self._worker.stream(*args, **how)

    def place(self) -> Any:
        return self._worker.place()


class Traffic:
    """Streams without end, `width` at a time, until `stop`; all samples are kept. One request of each stream has room
    for four tokens only: when its sample comes, the others of the stream are under way."""

    def __init__(self, cluster: RayCluster, engine: Any, width: int = 3) -> None:
        self._cluster, self._engine = cluster, engine
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self.samples: list[Trajectory] = []
        self.begun = 0  # streams whose first sample has come
        self._thread = threading.Thread(target=self._run, args=(width,))
        self._thread.start()

    def _run(self, width: int) -> None:
        try:
            streams, number = {}, itertools.count()
            while streams or not self._ended:
                while len(streams) < width and not self._ended:
                    asked = [request(6 * next(number) + k, 0 if k else CONTEXT - 4) for k in range(6)]
                    stream = self._engine.stream("generate_refs", asked, LONG, timeout_s=DEADLINE_S)
                    streams[id(stream)] = (stream, {one.uid for one in asked})
                waiting = [stream for stream, _ in streams.values()]
                ready = self._cluster.ready(waiting, DEADLINE_S, "samples")[0]
                open_uids = streams[id(ready)][1]
                parcels = next(ready, None)
                if parcels is None:
                    assert not open_uids, f"the stream ended without {open_uids}"
                    del streams[id(ready)]
                    continue
                for parcel in parcels:
                    open_uids.remove(parcel.label.uid)  # KeyError: another stream's sample
                    with self._changed:
                        self.samples.append(self._cluster.store.fetch(parcel.content))
                        self.begun += len(open_uids) == 5
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait until one more stream has begun."""
        with self._changed:
            target = self.begun + 1
            assert self._changed.wait_for(lambda: self.begun >= target or self._error, DEADLINE_S)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._ended = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("under_ray") / "model")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    logs = tmp_path_factory.mktemp("logs")
    with RayCluster(logs, address="local", num_cpus=4, start_timeout_s=150, call_timeout_s=DEADLINE_S) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def config(folder: Path) -> MasterConfig:
    return recipe_of(folder, {}, {})


@pytest.fixture(scope="module")
def policy(cluster: RayCluster, folder: Path) -> PolicyGroup:
    return policy_group(cluster, folder)


@pytest.fixture(scope="module")
def engines(cluster: RayCluster, config: MasterConfig, policy: PolicyGroup) -> EngineGroup:
    engines = start_engines(config, cluster, check_run(config), policy)
    wait_until_ready(config, cluster, [*policy.workers, *engines.workers])
    return engines


@pytest.fixture(scope="module")
def twin(folder: Path) -> Iterator[Policy]:
    """The policy's weights as the driver knows them."""
    twin = Policy(folder)
    yield twin
    twin.close()


def paced(group: Any, worker: int, gates: dict[str, Callable[[], None]], patch: pytest.MonkeyPatch) -> None:
    workers = list(group.workers)
    workers[worker] = Paced(workers[worker], gates)
    patch.setattr(group, "workers", workers)


def test_refits_beside_streams(
    cluster: RayCluster, policy: PolicyGroup, engines: EngineGroup, twin: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {1: change(policy, twin, 1)}
    refit_policy_generation(policy, engines)
    traffic = Traffic(cluster, engines.workers[0])
    # While the engine waits for buckets, and before the commit, a further stream must begin: staging holds no stream
    # up, and no stream staging.
    paced(policy, 0, {"send_refit": traffic.wait}, monkeypatch)
    monkeypatch.setattr(engines.slots[0], "worker", Paced(engines.workers[0], {"commit_refit": traffic.wait}))
    try:
        traffic.wait()
        for version in range(2, 12):
            weights[version] = change(policy, twin, version)
            report = refit_once(policy, engines, recompute_kv=True)
            assert (report.version, report.in_place) == (version, ()) and report.pause_seconds < report.seconds
            traffic.wait()
            health = engines.workers[0].call("health").result()
            assert health["weight_version"] == engines.weight_version == version
            mixed = [sample for sample in traffic.samples if len(sample.weight_versions) > 1]
            if len(mixed) > 2:  # a slow driver may commit when the streams it has seen are over
                break
    finally:
        traffic.stop()
    assert len(mixed) > 2, "no request was under way at any of the commits"
    check_spans(twin.reference, traffic.samples, weights)


def test_a_refit_that_fails_beside_streams_changes_nothing(
    cluster: RayCluster, policy: PolicyGroup, engines: EngineGroup, twin: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        traffic.wait()
        raise WorkerFailed("policy-1", "send_refit", "out of luck")

    weights = {20: change(policy, twin, 20)}
    refit_policy_generation(policy, engines)
    traffic = Traffic(cluster, engines.workers[0], width=2)
    try:
        traffic.wait()
        change(policy, twin, 21)
        with monkeypatch.context() as patch:
            paced(policy, 1, {"send_refit": fail}, patch)
            with pytest.raises(WorkerFailed, match="out of luck"):
                refit_policy_generation(policy, engines)
        traffic.wait()
    finally:
        traffic.stop()
    assert engines.weight_version == 20
    assert {sample.weight_versions[-1][0] for sample in traffic.samples} == {20}
    check_spans(twin.reference, traffic.samples, weights)
    refit_policy_generation(policy, engines)  # nothing is left open
    assert engines.weight_version == 21


def test_an_engine_killed_while_it_stages(
    cluster: RayCluster, policy: PolicyGroup, engines: EngineGroup, twin: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor finds the refit's memory also where systemd-logind has removed the names of it: it is the last test
    of the file."""
    engine = engines.workers[0]
    change(policy, twin, 30)
    paced(policy, 0, {"send_refit": lambda: os.kill(engine.place().pid, 9)}, monkeypatch)
    with pytest.raises(RefitError, match=r"engine-0 rank 0 has died|failed on engine-0: .*its process ended") as caught:
        refit_policy_generation(policy, engines)
    assert "abort_refit" in " ".join(caught.value.__notes__), "nobody is there to go back"
    assert engines.weight_version == 21
    policy.workers[1].call("offload").result()  # the policy's ranks are well
    monkeypatch.undo()
    pids = {rank.place().pid for rank in policy.workers}
    segments = [path for path in SEGMENTS.glob(f"{PREFIX}-*") if int(path.name.split("-")[-2]) in pids]
    assert len(segments) >= 2, "the buffer and the board"
    for path in segments:
        path.unlink()
    assert engines.replace_dead(caught.value) == [0]
    engines.await_successors()
    report = refit_policy_generation(policy, engines)
    assert report.version == engines.weight_version and report.checked
