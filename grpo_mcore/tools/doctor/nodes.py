"""Run the checks on every node of a running Ray cluster, and check what concerns several nodes: clocks, shared folders,
the network between them."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_mcore import processes
from grpo_mcore.rollout.workers import DeadlineExceeded
from grpo_mcore.tools.doctor import checks, probes
from grpo_mcore.tools.doctor.checks import Finding
from grpo_mcore.tools.doctor.examine import Needs, examine, shared_files

NODE_S = 55.0
"""Seconds until a node's checks must have come back, including the start of the worker."""

CHECKS_S = 40.0
"""Seconds of NODE_S for the checks themselves."""

LINK_S = 30.0
"""Seconds for an all-reduce over two nodes, including the start of its processes."""


def examine_cluster(needs: Needs, address: str | None = None) -> dict[str, list[Finding]]:
    """Return the findings by node, and those of the whole cluster under "cluster". Attaches to `address` or
    RAY_ADDRESS.

    Raises DeadlineExceeded if a node does not answer.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    want = (needs.nodes, needs.nodes * needs.gpus_per_node if needs.gpu else 0)
    if address is None or (error := probes.why_no_answer(address)) is not None:
        advised = checks.ray_cluster(
            address or "RAY_ADDRESS is not set", error if address else "no cluster", 0, 0, want
        )
        return {"cluster": [advised]}
    ours = not ray.is_initialized()
    if ours:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        return _examine_all(ray, needs, address, want)
    finally:
        if ours:
            ray.shutdown()


def _examine_all(ray: Any, needs: Needs, address: str, want: tuple[int, int]) -> dict[str, list[Finding]]:
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    names = _names(alive)
    gpus = sum(node["Resources"].get("GPU", 0.0) for node in alive.values())
    whole = [checks.ray_cluster(address, None, len(alive), gpus, want)]
    mark = f".doctor-{uuid.uuid4().hex[:8]}"
    marks = {what: folder / mark for what, folder in shared_files(needs).items()}
    made = [path for path in marks.values() if _touch(path)]
    needs = replace(needs, folders={what: str(path.parent) for what, path in marks.items()})
    try:
        looks = {
            node: _task(ray, node, _look).remote(needs, {what: str(path) for what, path in marks.items()})
            for node in alive
        }
        done, late = ray.wait(list(looks.values()), num_returns=len(looks), timeout=NODE_S)
        if late:
            missing = ", ".join(names[node] for node, ref in looks.items() if ref in late)
            raise DeadlineExceeded("the doctor's checks", missing, NODE_S, "")
        answers = {node: ray.get(ref) for node, ref in looks.items()}
        clocks = [_clock(ray, node, names[node]) for node in alive]
        hosts = {node: found["NodeManagerAddress"] for node, found in alive.items()}
        backend = "nccl" if gpus and needs.gpu is not False else "gloo"
        network = [
            finding
            for half in (0, 1)  # pairs without a common node at the same time
            for finding in _links(ray, list(pairwise(alive))[half::2], hosts, names, backend)
        ]
    finally:
        for path in made:
            path.unlink(missing_ok=True)
    for what, path in marks.items():
        if path in made:
            whole.append(checks.seen(what, str(path.parent), {names[n]: answers[n][1][what] for n in alive}))
    return {"cluster": whole + clocks + network} | {names[node]: answers[node][0] for node in alive}


def _look(needs: Needs, marks: dict[str, str]) -> tuple[list[Finding], dict[str, bool]]:
    """Run on a node. Return its findings, without those about Ray, and which marks it sees."""
    seen = {what: os.path.exists(path) for what, path in marks.items()}
    return [finding for finding in examine(needs, deadline_s=CHECKS_S) if finding.check not in {"ports", "Ray"}], seen


def _now() -> float:
    return time.time()


def _clock(ray: Any, node: str, name: str) -> Finding:
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
) -> list[Finding]:
    """Check that the first accelerator of one node (or gloo) reaches that of another, over the network that refits and
    data-parallel ranks use."""
    sums = []
    for first, second in pairs:
        port = ray.get(_task(ray, first, processes.free_port).remote(""), timeout=NODE_S)
        where = (backend, f"{hosts[first]}:{port}")
        ranks = enumerate((first, second))
        sums.append([_task(ray, node, probes.all_reduce).remote(*where, {rank: 0}, seconds) for rank, node in ranks])
    found = []
    for (first, second), refs in zip(pairs, sums, strict=True):
        answers = ray.get(refs, timeout=NODE_S + seconds)
        error = next((error for _, error in answers if error), None)
        found.append(checks.pair(backend, (names[first], names[second]), answers[0][0], error, of="network"))
    return found


def _task(ray: Any, node: str, function: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(function)


def _names(alive: dict[str, Any]) -> dict[str, str]:
    """Return host names by node; with a port if several nodes run on one host."""
    hosts = [node["NodeManagerHostname"] for node in alive.values()]
    return {
        node: found["NodeManagerHostname"]
        + (f":{found['NodeManagerPort']}" if hosts.count(found["NodeManagerHostname"]) > 1 else "")
        for node, found in alive.items()
    }


def _touch(path: Path) -> bool:
    """Create a file. Return whether that worked: an unwritable folder is a finding of its node."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return False
    return True
