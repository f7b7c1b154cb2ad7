"""Run the checks on every node of a running Ray cluster, and check what concerns several nodes: clocks, shared folders,
the network between them."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_mcore import processes
from grpo_mcore.rollout.workers import DeadlineExceeded
from grpo_mcore.tools.doctor import checks
from grpo_mcore.tools.doctor.checks import CheckResult, Needs, examine, fault, judged

NODE_S = 55.0
"""Seconds until a node's checks must have come back, including the start of the worker."""

CHECKS_S = 40.0
"""Seconds of NODE_S for the checks themselves."""

LINK_S = 30.0
"""Seconds for an all-reduce over two nodes, including the start of its processes."""


def examine_cluster(needs: Needs, address: str | None = None) -> dict[str, list[CheckResult]]:
    """Return the findings by node, and those of the whole cluster under "cluster". Attaches to `address` or
    RAY_ADDRESS.

    Raises DeadlineExceeded if a node does not answer.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        advice = "start it, or unset RAY_ADDRESS to have one started"
        return {"cluster": [fault("Ray", "RAY_ADDRESS is not set: no cluster", advice)]}
    if (answer := checks.ray_answers(address)).state == "fault":
        return {"cluster": [answer]}
    ours = not ray.is_initialized()
    if ours:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
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
    backend = "nccl" if gpus and needs.gpu is not False else "gloo"
    for half in (0, 1):  # pairs without a common node at the same time
        whole += _links(ray, list(pairwise(alive))[half::2], hosts, names, backend)
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


def _links(
    ray: Any,
    pairs: Sequence[tuple[str, str]],
    hosts: dict[str, str],
    names: dict[str, str],
    backend: str,
    seconds: float = LINK_S,
) -> Iterator[CheckResult]:
    """Check that the first accelerator of one node (or gloo) reaches that of another, over the network that refits and
    data-parallel ranks use."""
    sums = []
    for pair in pairs:
        port = ray.get(_task(ray, pair[0], processes.free_port).remote(""), timeout=NODE_S)
        where = f"{hosts[pair[0]]}:{port}"
        ranks = [
            _task(ray, node, checks.all_reduce).remote(backend, [(where, i, 0)], seconds) for i, node in enumerate(pair)
        ]
        sums.append(ranks)
    for (first, second), refs in zip(pairs, sums, strict=True):
        answers = [answer for (answer,) in ray.get(refs, timeout=NODE_S + seconds)]
        yield checks.pair_reduced("network", f"{backend} {names[first]}-{names[second]}", answers)


def _task(ray: Any, node: str, function: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(function)


def _names(alive: dict[str, Any]) -> dict[str, str]:
    """Return host names by node; with a port if several nodes run on one host."""
    hosts = [node["NodeManagerHostname"] for node in alive.values()]
    return {
        node: node_info["NodeManagerHostname"]
        + (f":{node_info['NodeManagerPort']}" if hosts.count(node_info["NodeManagerHostname"]) > 1 else "")
        for node, node_info in alive.items()
    }
