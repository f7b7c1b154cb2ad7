"""Run the checks on every node of a running Ray cluster, and check clocks, shared folders and the network of all."""

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_mcore.base import processes
from grpo_mcore.base.addresses import running_ray, with_port
from grpo_mcore.cluster import DeadlineExceeded
from grpo_mcore.tools.doctor import checks
from grpo_mcore.tools.doctor.checks import CheckResult, Needs, checked, examine, fault

NODE_S = 55.0
"""Seconds until a node's checks must have come back, including the start of the worker."""

CHECKS_S = 40.0
"""Seconds of NODE_S for the checks themselves."""

ALL_REDUCE_S = 30.0
"""Seconds for the all-reduce over all nodes, including the start of its processes."""

ALL_REDUCE_MB = {"gloo": 32, "nccl": 256}
"""Size of that all-reduce: large enough that the bandwidth decides its time."""

ALL_GPUS = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
"""Runtime environment of tasks that see the GPUs of their node. A task that asks for none sees none in a Ray that was
started with RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1, as the job scripts start it; one that asks for them would wait for a
run that has them."""


def examine_cluster(needs: Needs, address: str | None = None) -> dict[str, list[CheckResult]]:
    """Return the findings by node, and those of the whole cluster under "cluster". Attaches to `address` or
    RAY_ADDRESS.

    Raises DeadlineExceeded if a node does not answer.
    """
    import ray

    from grpo_mcore.cluster.ray_session import BadRayAddress, RayUnreachable, attach

    address = running_ray(address or os.environ.get("RAY_ADDRESS"))
    if address is None:
        return {"cluster": [fault("Ray", "RAY_ADDRESS is not set", "start Ray on all nodes and set RAY_ADDRESS")]}
    if (answer := checks.ray_answers(address)).state == "fault":
        return {"cluster": [answer]}
    ours = not ray.is_initialized()
    if ours:
        try:
            attach(address)
        except (RayUnreachable, BadRayAddress) as error:
            return {"cluster": [fault("Ray", str(error), "a run could not join it either")]}
    try:
        return _examine_all(ray, needs, address)
    finally:
        if ours:
            ray.shutdown()


def _examine_all(ray: Any, needs: Needs, address: str) -> dict[str, list[CheckResult]]:
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    names = _names(alive)
    gpus = sum(node["Resources"].get("GPU", 0.0) for node in alive.values())
    whole = [compare_size(address, len(alive), gpus, needs)]
    folders = {use: str(Path(path).absolute()) for use, path in needs.folders.items() if path}
    needs = replace(needs, folders=folders)
    marks = {use: Path(path, f".doctor-{uuid.uuid4().hex[:8]}") for use, path in folders.items()}
    for mark in marks.values():
        with suppress(OSError):  # an unwritable folder is a finding of its node
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    try:
        looks = {node: _task(ray, node, _look).remote(needs, marks) for node in alive}
        _, late = ray.wait(list(looks.values()), num_returns=len(looks), timeout=NODE_S)
        if late:
            missing = ", ".join(names[node] for node, ref in looks.items() if ref in late)
            raise DeadlineExceeded("the doctor's checks", missing, NODE_S, "")
        answers = {node: ray.get(ref) for node, ref in looks.items()}
        for use, mark in marks.items():
            if os.path.exists(mark):
                whole.append(seen(use, folders[use], {names[node]: answers[node][1][use] for node in alive}))
    finally:
        for mark in marks.values():
            with suppress(OSError):
                mark.unlink()
    whole += [_compare_clock(ray, node, names[node]) for node in alive]
    hosts = {node: node_info["NodeManagerAddress"] for node, node_info in alive.items()}
    on_gpus = bool(gpus) and needs.gpu is not False
    devices = int(min(node["Resources"].get("GPU", 0.0) for node in alive.values())) if on_gpus else 0
    if len(alive) > 1:
        whole.append(_network(ray, hosts, "nccl" if on_gpus else "gloo", max(devices, 1)))
    return {"cluster": whole} | {names[node]: answers[node][0] for node in alive}


def compare_size(address: str, nodes: int, gpus: float, needs: Needs) -> CheckResult:
    """Compare a running Ray with what the recipe needs."""
    needed = needs.nodes * needs.gpus_per_node if needs.gpu else 0
    remedy = f"the recipe asks for {needs.nodes} nodes and {needed} GPUs: wait for the others, or see their logs"
    text = f"{address}: {nodes} nodes, {gpus:g} GPUs"
    return checked("Ray", text, (nodes < needs.nodes or gpus < needed) and remedy)


def seen(use: str, path: str, nodes: dict[str, bool]) -> CheckResult:
    """Check that all nodes see a file in the folder `path`. `nodes` says of each whether it does."""
    blind = sorted(name for name, sees in nodes.items() if not sees)
    text = f"not seen by {', '.join(blind)}" if blind else f"seen by {len(nodes)} nodes"
    remedy = "it must be one file system, mounted at the same path on every node"
    return checked(use, f"{path}: {text}", bool(blind) and remedy)


def _look(needs: Needs, marks: dict[str, Path]) -> tuple[list[CheckResult], dict[str, bool]]:
    """Run on a node. Return its findings, without those about Ray, and which marks it sees."""
    visible = {use: os.path.exists(path) for use, path in marks.items()}
    findings = [finding for finding in examine(needs, deadline_s=CHECKS_S) if finding.check not in {"ports", "Ray"}]
    return findings, visible


def _now() -> float:
    return time.time()


def _compare_clock(ray: Any, node: str, name: str) -> CheckResult:
    """Compare a node's clock with this one's, by the most precise of three readings: each was taken between the request
    and the answer."""
    task, best = _task(ray, node, _now), (0.0, float("inf"))
    for _ in range(3):
        start = time.time()
        theirs = ray.get(task.remote(), timeout=NODE_S)
        end = time.time()
        best = min(best, (theirs - (start + end) / 2, (end - start) / 2), key=lambda reading: reading[1])
    return checks.clock(*best, name)


def _network(ray: Any, hosts: Mapping[str, str], backend: str, devices: int) -> CheckResult:
    """All-reduce once over all nodes, by NCCL over as many GPUs of each, or by gloo. `hosts` are the addresses of the
    nodes, by node."""
    first = next(iter(hosts))
    port = ray.get(_task(ray, first, processes.free_port).remote(""), timeout=NODE_S)
    address, world, megabytes = with_port(hosts[first], port), len(hosts) * devices, ALL_REDUCE_MB[backend]
    started = []
    for index, node in enumerate(hosts):
        ranks = range(index * devices, (index + 1) * devices)
        call = _task(ray, node, checks.all_reduce).remote
        started.append(call(backend, address, ranks, world, ALL_REDUCE_S, megabytes))
    answers = [answer for of_node in ray.get(started, timeout=NODE_S + ALL_REDUCE_S) for answer in of_node]
    return checks.reduced("network", f"{backend} over {len(hosts)} nodes", backend, answers)


def _task(ray: Any, node: str, function: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy, runtime_env=ALL_GPUS)(function)


def _names(alive: dict[str, Any]) -> dict[str, str]:
    """Return host names by node; with a port if several nodes run on one host."""
    hosts = [node["NodeManagerHostname"] for node in alive.values()]
    return {
        node: node_info["NodeManagerHostname"]
        + (f":{node_info['NodeManagerPort']}" if hosts.count(node_info["NodeManagerHostname"]) > 1 else "")
        for node, node_info in alive.items()
    }
