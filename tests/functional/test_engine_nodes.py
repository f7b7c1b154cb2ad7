"""One engine over two nodes, which are two Ray nodes of this machine: what it says has the log-probs of transformers,
before and after a refit, and is token for token what an engine inside a node says; what dies on either node is named,
and the engine starts anew on both; a whole run. `make test` has a refit between two nodes (test_two_nodes.py), an
engine of two ranks under Ray (test_async_ray.py), and where an engine's ranks go (unit/driver/engines)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._raylet import AuthenticationTokenLoader
from ray.cluster_utils import Cluster as RayNodes

from grpo_mcore.algorithms.grpo import refit_policy_generation
from grpo_mcore.cluster import WorkerFailed
from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.driver.run.checks import check_run
from grpo_mcore.driver.run.setup import start_engines, wait_until_ready
from grpo_mcore.generation import Engine
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.trajectory import Sampling, Trajectory
from tests.functional import engine_cases
from tests.functional.engine_cases import CONTEXT, Policy, PolicyRank, make_model, request, worst_difference
from tests.functional.ray_policy import change, policy_group, recipe_of
from tests.functional.runs import Task, grpo_recipe, run_command
from tests.processes_below import with_words
from tests.waiting import wait_until

pytestmark = pytest.mark.every_state

DEADLINE_S = 150.0
REQUESTS = [request(number) for number in range(6)]
SAMPLING = Sampling(max_new_tokens=24)


class Rank(PolicyRank):
    def host_network(self, *arguments: Any) -> Any:
        return self.sender.host_network(*arguments)

    def close_refit(self) -> None:
        self.sender.close_refit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("nodes") / "model")


@pytest.fixture(scope="module")
def inside(folder: Path) -> Iterator[Engine]:
    """The same engine inside a node."""
    engine = Engine(engine_cases.config(folder, name="inside", tensor_parallel_size=2))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    AuthenticationTokenLoader.instance().reset_cache()  # of an earlier Ray of this process
    nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    logs = tmp_path_factory.mktemp("logs")
    try:
        with RayCluster(logs, address=nodes.address, start_timeout_s=200, call_timeout_s=DEADLINE_S) as cluster:
            yield cluster
    finally:
        ray.shutdown()
        nodes.shutdown()


def recipe_for(folder: Path, nodes: int = 2, **generation: Any) -> MasterConfig:
    cluster = {"num_nodes": nodes, "gpus_per_node": 1, "max_engine_restarts": 4}
    return recipe_of(folder, {"tensor_parallel_size": 2, "load_format": "auto"}, cluster, **generation)


@pytest.fixture(scope="module")
def policy(cluster: RayCluster, folder: Path) -> PolicyGroup:
    """Two tensor-parallel ranks, one on each node."""
    return policy_group(cluster, folder, Rank, nodes=2)


@pytest.fixture(scope="module")
def engines(cluster: RayCluster, folder: Path, policy: PolicyGroup) -> EngineGroup:
    config = recipe_for(folder)
    engines = start_engines(config, cluster, check_run(config), policy)
    wait_until_ready(config, cluster, [*policy.workers, *engines.all_hosts()])
    return engines


def tokens(engine: Engine) -> dict[str, list[int]]:
    return {uid: found.token_ids().tolist() for uid, found in engine_cases.generate(engine, REQUESTS).items()}


def samples_of(cluster: RayCluster, engines: EngineGroup) -> dict[str, Trajectory]:
    stream = engines.workers[0].stream("generate_refs", REQUESTS, SAMPLING, timeout_s=DEADLINE_S)
    parcels = [parcel for parcels in stream for parcel in parcels]
    return {parcel.label.uid: cluster.store.fetch(parcel.content) for parcel in parcels}


def tokens_of(cluster: RayCluster, engines: EngineGroup) -> dict[str, list[int]]:
    return {uid: sample.token_ids().tolist() for uid, sample in samples_of(cluster, engines).items()}


def ranks_of(host: Any) -> list[psutil.Process]:
    """vLLM's processes below a worker."""
    return with_words("Worker", host.place().pid)


def lives(process: psutil.Process) -> bool:
    """One that has ended, and that nobody has asked about yet, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_its_samples_have_the_log_probs_of_transformers_before_and_after_a_refit(
    cluster: RayCluster, policy: PolicyGroup, engines: EngineGroup, folder: Path
) -> None:
    leader, follower = engines.slots[0].hosts
    assert leader.place().node != follower.place().node
    assert [host.place().node for host in (leader, follower)] == [rank.place().node for rank in policy.workers]
    twin = Policy(folder)
    assert worst_difference(twin.reference, samples_of(cluster, engines)) < 1e-4
    change(policy, twin, 1)
    report = refit_policy_generation(policy, engines)
    assert report.version == 1 and report.checked, "every copy on both nodes, by its checksum"
    assert report.in_place == report.fallbacks == ()
    assert worst_difference(twin.reference, samples_of(cluster, engines)) < 1e-4
    twin.close()


def test_it_says_what_an_engine_inside_a_node_says(
    cluster: RayCluster, policy: PolicyGroup, engines: EngineGroup, inside: Engine, folder: Path
) -> None:
    twin = Policy(folder)
    for version in (2, 3):
        change(policy, twin, version)
        twin.refit(inside, version, verify="full")
        inside.prepare(version)
        assert refit_policy_generation(policy, engines).checked
        assert tokens_of(cluster, engines) == tokens(inside)
    twin.close()


@pytest.mark.parametrize("what", ["a rank", "the follower", "the engine"])
def test_a_death_on_either_node_is_named_and_the_engine_starts_anew_on_both(
    cluster: RayCluster, policy: PolicyGroup, engines: EngineGroup, inside: Engine, what: str
) -> None:
    before = engines.slots[0].hosts
    gone = [process for host in before for process in ranks_of(host)]
    assert len(gone) >= 2
    endless = Sampling(max_new_tokens=CONTEXT - 20)
    stream = engines.workers[0].stream(
        "generate_refs", [request(n) for n in range(64)], endless, timeout_s=DEADLINE_S, purpose="samples"
    )
    next(stream)
    (rank,) = ranks_of(before[1])
    pid, message = {
        "a rank": (rank.pid, r"engine-0: rank 1 of 2 has died \(exit code -9\) on "),
        "the follower": (before[1].place().pid, r"engine-0: its node 1 of 2 \(ranks 1 to 1, at .*\) is gone"),
        "the engine": (before[0].place().pid, "its process ended"),
    }[what]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerFailed, match=message) as caught:
        list(stream)
    assert engines.replace_dead(caught.value) == [0]
    engines.await_successors()
    assert all(old.place().pid != new.place().pid for old, new in zip(before, engines.slots[0].hosts, strict=True))
    wait_until(lambda: not any(map(lives, gone)), "the end of the old engine's ranks")
    refit_policy_generation(policy, engines)
    engines.lost.clear()
    assert tokens_of(cluster, engines) == tokens(inside)


def end(cluster: RayCluster, engines: EngineGroup) -> None:
    """Nothing is left."""
    processes = [process for host in engines.slots[0].hosts for process in ranks_of(host)]
    assert len(processes) == 2
    cluster.stop(engines.slots[0].hosts)
    wait_until(lambda: not any(map(lives, processes)), "the end of the ranks", 20.0)


def test_on_nodes_of_its_own_each_node_receives_over_the_wire(
    cluster: RayCluster, policy: PolicyGroup, engines: EngineGroup, inside: Engine, folder: Path
) -> None:
    """First the engine of the tests before ends."""
    end(cluster, engines)
    pool = {"enabled": False, "resources": {"num_nodes": 2, "gpus_per_node": 1}}
    config = recipe_for(folder, nodes=3, colocated=pool)
    apart = start_engines(config, cluster, check_run(config), policy)
    wait_until_ready(config, cluster, apart.all_hosts())
    assert len(apart.nodes().hosts) == 2 and not apart.colocated
    twin = Policy(folder)
    for version in (11, 12):
        change(policy, twin, version)
        twin.refit(inside, version, verify="full")
        inside.prepare(version)
        assert refit_policy_generation(policy, apart, False).checked
        assert tokens_of(cluster, apart) == tokens(inside)
    twin.close()
    end(cluster, apart)


def test_a_whole_run(
    cluster: RayCluster, task: Task, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command, a data-parallel rank of the policy on each node and the engine over both; after every refit all
    checksums are compared, and the engine's log-probs with the policy's."""
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"max_num_steps": 2, "val_at_end": False}
    recipe["policy"] |= {"refit_verify": "full", "refit_parity": 1.001}
    recipe["policy"]["generation"]["vllm_cfg"] |= {"tensor_parallel_size": 2}
    recipe["cluster"] = {"platform": "cpu", "num_nodes": 2, "gpus_per_node": 1}
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    run = run_command("train", tmp_path, recipe)
    assert run.code == 0, run.out + run.err
    assert "on 2 nodes, engines on 2" in run.out
    assert [metrics["step"] for metrics in run.metrics()] == [1, 2]
