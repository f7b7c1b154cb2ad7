"""Run the checks on every node of a running Ray cluster, and check what concerns several nodes: clocks, shared folders,
the network between them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_mcore.base import processes
from grpo_mcore.base.addresses import running_ray, with_port
from grpo_mcore.rollout.workers import DeadlineExceeded
from grpo_mcore.tools.doctor import checks
from grpo_mcore.tools.doctor.checks import CheckResult, Needs, Reduced, examine, fault, judged

NODE_S = 55.0
"""Seconds until a node's checks must have come back, including the start of the worker."""

CHECKS_S = 40.0
"""Seconds of NODE_S for the checks themselves."""

LINK_S = 30.0
"""Seconds for the all-reduces over two nodes, including the start of their processes."""

LINK_MB = {"gloo": 32, "nccl": 256}
"""Size of an all-reduce over two nodes: large enough that the bandwidth decides its time."""

ALL_GPUS = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
"""Runtime environment of tasks that see the GPUs of their node. A task that asks for none sees none in a Ray that was
started with RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1, as the job scripts start it; one that asks for them would wait for a
run that has them."""

PARTNERS = 3
"""Number of other nodes with which each node's bandwidth is measured, if there are so many."""

USED = 0.2
"""Share of its InfiniBand ports' bandwidth that an all-reduce by NCCL reaches at least if it uses them. An estimate: no
InfiniBand was measured."""

SLOW = 0.7
"""Share of the usual bandwidth between two nodes, below which a pair is slow."""


def examine_cluster(needs: Needs, address: str | None = None) -> dict[str, list[CheckResult]]:
    """Return the findings by node, and those of the whole cluster under "cluster". Attaches to `address` or
    RAY_ADDRESS.

    Raises DeadlineExceeded if a node does not answer.
    """
    import ray

    from grpo_mcore.cluster.ray_session import BadRayAddress, RayUnreachable, as_this_process, attach

    address = running_ray(address or os.environ.get("RAY_ADDRESS"))
    if address is None:
        return {"cluster": [fault("Ray", "RAY_ADDRESS is not set", "start Ray on all nodes and set RAY_ADDRESS")]}
    if (answer := checks.ray_answers(address)).state == "fault":
        return {"cluster": [answer]}
    ours = not ray.is_initialized()
    if ours:
        as_this_process()
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
    folders = {what: str(Path(path).absolute()) for what, path in needs.folders.items() if path}
    needs = replace(needs, folders=folders)
    marks = {what: Path(path, f".doctor-{uuid.uuid4().hex[:8]}") for what, path in folders.items()}
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
        for what, mark in marks.items():
            if os.path.exists(mark):
                whole.append(seen(what, folders[what], {names[node]: answers[node][1][what] for node in alive}))
    finally:
        for mark in marks.values():
            with suppress(OSError):
                mark.unlink()
    whole += [_compare_clock(ray, node, names[node]) for node in alive]
    hosts = {node: node_info["NodeManagerAddress"] for node, node_info in alive.items()}
    on_gpus = bool(gpus) and needs.gpu is not False
    devices = int(min(node["Resources"].get("GPU", 0.0) for node in alive.values())) if on_gpus else 0
    whole += _network(ray, list(alive), hosts, names, "nccl" if on_gpus else "gloo", max(devices, 1))
    return {"cluster": whole} | {names[node]: answers[node][0] for node in alive}


def compare_size(address: str, nodes: int, gpus: float, needs: Needs) -> CheckResult:
    """Compare a running Ray with what the recipe needs."""
    wanted = needs.nodes * needs.gpus_per_node if needs.gpu else 0
    remedy = f"the recipe asks for {needs.nodes} nodes and {wanted} GPUs: wait for the others, or see their logs"
    saw = f"{address}: {nodes} nodes, {gpus:g} GPUs"
    return judged("Ray", saw, (nodes < needs.nodes or gpus < wanted) and remedy)


def seen(what: str, path: str, nodes: dict[str, bool]) -> CheckResult:
    """Check that a file in the folder `path` is seen by all nodes. `nodes`: whether each sees it."""
    blind = sorted(name for name, sees in nodes.items() if not sees)
    saw = f"not seen by {', '.join(blind)}" if blind else f"seen by {len(nodes)} nodes"
    remedy = "it must be one file system, mounted at the same path on every node"
    return judged(what, f"{path}: {saw}", bool(blind) and remedy)


def _look(needs: Needs, marks: dict[str, Path]) -> tuple[list[CheckResult], dict[str, bool]]:
    """Run on a node. Return its findings, without those about Ray, and which marks it sees."""
    visible = {what: os.path.exists(path) for what, path in marks.items()}
    findings = [finding for finding in examine(needs, deadline_s=CHECKS_S) if finding.check not in {"ports", "Ray"}]
    return findings, visible


def _now() -> float:
    return time.time()


def _compare_clock(ray: Any, node: str, name: str) -> CheckResult:
    """Compare a node's clock with this one's, by the most precise of three readings: each was taken between the request
    and the answer."""
    task, best = _task(ray, node, _now), (0.0, float("inf"))
    for _ in range(3):
        asked = time.time()
        theirs = ray.get(task.remote(), timeout=NODE_S)
        answered = time.time()
        best = min(best, (theirs - (asked + answered) / 2, (answered - asked) / 2), key=lambda each: each[1])
    return checks.clock(*best, name)


def rounds_of(nodes: Sequence[str], partners: int = PARTNERS) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs, as of a tournament: in a round no node is in two pairs, and over all rounds each node has
    that many different partners, or all others if there are fewer."""
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(min(partners if len(nodes) % 2 == 0 else partners + 1, len(ring) - 1)):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        rounds.append([(first, second) for first, second in pairs if first is not None and second is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]  # the first stays, the others move on by one
    return rounds


def slow_pairs(rates: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
    """Return the pairs whose bandwidth is far below the usual one."""
    return [pair for pair, rate in rates.items() if rate < SLOW * usual_rate(rates)]


def usual_rate(rates: Mapping[tuple[str, str], float]) -> float:
    """Return the upper quartile: one slow node of few makes most pairs slow."""
    return sorted(rates.values())[-(-3 * len(rates) // 4) - 1]


def compare_rates(rates: Mapping[tuple[str, str], float], backend: str) -> Iterator[CheckResult]:
    """Name the nodes all of whose pairs are slow, and then the slow pairs of other nodes. `rates`: GB/s by the names of
    two nodes. Two nodes alone have nothing to be compared with."""
    if len(rates) < 2:
        return
    slow = slow_pairs(rates)
    pairs_of = {node: [pair for pair in rates if node in pair] for pair in rates for node in pair}
    named = [node for node, pairs in pairs_of.items() if len(pairs) > 1 and all(pair in slow for pair in pairs)]
    usual = usual_rate(rates)
    look = "ibstat, and nvidia-smi nvlink -s and topo -m" if backend == "nccl" else "ethtool, and what else uses it"
    for node in named:
        best = max(rates[pair] for pair in pairs_of[node])
        saw = f"{node} is slow: at most {best:.2g} GB/s with {len(pairs_of[node])} others, where {usual:.2g} is usual"
        yield fault("bandwidth", saw, f"look at its network interfaces ({look}), or leave it out")
    for pair in slow:
        if not set(pair) & set(named):
            saw = f"{'-'.join(pair)}: {rates[pair]:.2g} GB/s, where {usual:.2g} is usual; both are faster with others"
            yield fault("bandwidth", saw, "look at the switches and cables between the two")
    if not slow:
        low, high = min(rates.values()), max(rates.values())
        yield CheckResult("bandwidth", "ok", f"{len(rates)} pairs of nodes, {low:.2g} to {high:.2g} GB/s by {backend}")


def compare_links(rates: Mapping[tuple[str, str], float], links: Sequence[float]) -> Iterator[CheckResult]:
    """Report pairs of nodes that are much slower than their InfiniBand or RoCE ports. `links`: GB/s of as many ports as
    the nodes have GPUs. NCCL takes TCP, and says nothing, where it cannot use such a port."""
    if rates and links and (usual := usual_rate(rates)) < USED * sum(links):
        saw = (
            f"{usual:.2g} GB/s between nodes by nccl, whose active InfiniBand ports have {sum(links):.2g} for its GPUs"
        )
        advice = (
            "NCCL_DEBUG=INFO tells whether it uses them (IB) or TCP (Socket); a container needs /dev/infiniband and "
            "ulimit -l unlimited, and NCCL_IB_HCA chooses the ports"
        )
        yield fault("bandwidth", saw, advice)


def _network(
    ray: Any, nodes: Sequence[str], hosts: dict[str, str], names: dict[str, str], backend: str, devices: int
) -> Iterator[CheckResult]:
    """Check that nodes reach each other, measure their bandwidth, and name what is slow. A slow pair is measured once
    more, by itself: something else may have used the network."""
    rates: dict[tuple[str, str], float] = {}
    for pairs in rounds_of(nodes):
        for pair, answers in _links(ray, pairs, hosts, backend, devices=devices):
            first, second = (names[node] for node in pair)
            result = checks.pair_reduced("network", f"{backend} {first}-{second}", answers)
            yield result
            if result.state == "ok":
                rates[first, second] = checks.pair_rate(answers)
    of_name = {names[node]: node for node in nodes}
    for slow in slow_pairs(rates):
        pair = (of_name[slow[0]], of_name[slow[1]])
        for _, answers in _links(ray, [pair], hosts, backend, devices=devices):
            rates[slow] = max(rates[slow], checks.pair_rate(answers))
    yield from compare_rates(rates, backend)
    if backend == "nccl":
        yield from compare_links(rates, checks.infiniband_rates()[:devices])


def _links(
    ray: Any,
    pairs: Sequence[tuple[str, str]],
    hosts: dict[str, str],
    backend: str,
    seconds: float = LINK_S,
    devices: int = 1,
) -> Iterator[tuple[tuple[str, str], list[Reduced]]]:
    """All-reduce between the accelerators of two nodes (those of the same number, all at once) or by gloo, over the
    network that refits and data-parallel ranks use. Return what came of the ranks of each pair, first those of its
    first node."""
    started = []
    for pair in pairs:
        free = _task(ray, pair[0], processes.free_port)
        ports = ray.get([free.remote("") for _ in range(devices)], timeout=NODE_S)
        where = [with_port(hosts[pair[0]], port) for port in ports]
        ranks = [
            _task(ray, node, checks.all_reduce).remote(
                backend, [(address, i, device) for device, address in enumerate(where)], seconds, LINK_MB[backend]
            )
            for i, node in enumerate(pair)
        ]
        started.append(ranks)
    for pair, refs in zip(pairs, started, strict=True):
        first, second = ray.get(refs, timeout=NODE_S + seconds)
        yield pair, [*first, *second]


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
