"""Run all probes at once and check what they saw. A probe that hangs is a fault."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_mcore.tools.doctor import checks, probes
from grpo_mcore.tools.doctor.checks import GB, Finding

DEADLINE_S = 50.0
RAY_PORTS = (6379, 8265)


@dataclass(frozen=True)
class Needs:
    """The needs of a recipe on a node. The defaults are what any run needs."""

    gpu: bool | None = None  # None: if there are any
    nodes: int = 1
    gpus_per_node: int = 0
    folders: dict[str, str] = field(default_factory=lambda: {"checkpoints": "results", "logs": "logs"})
    model: str | None = None
    shm_bytes: int = 2 * GB
    disk_bytes: int = 10 * GB
    ports: tuple[int, ...] = ()
    sandbox: bool = False  # the recipe runs programs that the model writes


Check = Callable[[], Sequence[Finding]]


def examine(needs: Needs, *, deadline_s: float = DEADLINE_S, checks: dict[str, Check] | None = None) -> list[Finding]:
    """Return all findings of this node, in the order of the checks. Takes `deadline_s` at most."""
    checks = _checks(needs) if checks is None else checks
    found: dict[str, Sequence[Finding]] = {}
    end = time.monotonic() + deadline_s

    def look(name: str, check: Check) -> None:
        try:
            found[name] = check()
        except Exception as error:  # a probe that fails is a finding; the others go on
            found[name] = [Finding(name, "fault", f"{type(error).__name__}: {error}", "the check itself failed")]

    threads = {
        name: threading.Thread(target=look, args=(name, check), name=f"doctor-{name}", daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    findings: list[Finding] = []
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        late = Finding(name, "fault", f"no answer in {deadline_s:.0f} s", "a hanging mount, driver or network")
        findings += [late] if thread.is_alive() else found[name]
    return findings


def _checks(needs: Needs) -> dict[str, Check]:
    folders = {what: path for what, path in needs.folders.items() if path}
    places = list(dict.fromkeys([*folders.values(), tempfile.gettempdir()]))
    address = os.environ.get("RAY_ADDRESS")
    asked = needs.ports or (() if address else RAY_PORTS)

    def each_folder(what: str, path: str) -> Check:
        return lambda: checks.folder(probes.file_times(path), what)

    return {
        "versions": lambda: _versions(needs),
        "GPUs": lambda: _gpus(needs),
        "/dev/shm": lambda: [checks.shared_memory(*probes.space("/dev/shm"), needs.shm_bytes)],
        **{what: each_folder(what, path) for what, path in folders.items()},
        "disk": lambda: [checks.disk(path, *probes.space(path), _space(path, needs)) for path in places],
        "ports": lambda: [checks.ports(probes.taken_ports(asked), asked)],
        "open files": lambda: [checks.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])],
        "sandbox": lambda: [checks.sandbox(probes.sandbox(), needs.sandbox)],
        "load": lambda: [checks.load(os.getloadavg()[0], len(os.sched_getaffinity(0)))],
        "HF cache": lambda: [checks.cache(probes.file_times(probes.hub_cache(), nbytes=1024))],
        "HF hub": lambda: [_model(needs)],
        "Ray": lambda: [_ray(needs, address)],
        "collectives": lambda: list(_collectives(needs)),
    }


def _space(path: str, needs: Needs) -> int:
    """Return the bytes needed: by checkpoints and logs, or in the temporary folder by Ray's logs and spilled
    objects."""
    return needs.disk_bytes if path in needs.folders.values() else 2 * GB


def _on_gpu(needs: Needs) -> bool:
    return bool(probes.gpus()) if needs.gpu is None else needs.gpu


def _versions(needs: Needs) -> list[Finding]:
    extra = "gpu" if _on_gpu(needs) else "cpu"
    return checks.versions(probes.pins(extra), probes.installed(), f"pip install -e .[{extra}]")


def _gpus(needs: Needs) -> list[Finding]:
    if needs.gpu is False:
        return [Finding("GPUs", "ok", "not used: cluster.platform is cpu")]
    found = probes.gpus()
    seen = None
    if found:
        import torch

        seen = torch.cuda.device_count()
    return checks.gpus(found, needs.gpus_per_node if needs.gpu else 0, seen)


def _collectives(needs: Needs) -> Iterator[Finding]:
    """Test gloo on this host, or with several GPUs NCCL between neighbours, so that every link is used once."""
    count = len(probes.gpus() or ()) if needs.gpu is not False else 0
    pairs = [(rank, rank + 1) for rank in range(count - 1)] or [(0, 1)]
    backend = "nccl" if count > 1 else "gloo"
    limit = DEADLINE_S - 5
    answers: dict[tuple[int, int], tuple[float | None, str | None]] = {}

    def ask(pair: tuple[int, int]) -> None:
        answers[pair] = probes.pair(backend, pair, limit)

    for half in (pairs[::2], pairs[1::2]):  # pairs without a common GPU at the same time
        threads = [threading.Thread(target=ask, args=(pair,), daemon=True) for pair in half]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for pair in pairs:
        yield checks.pair(backend, pair, *answers[pair], of="collectives")


def _model(needs: Needs) -> Finding:
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "yes", "on"}
    present = needs.model is not None and probes.has_model(needs.model)
    return checks.model(needs.model, present, offline, probes.has_token())


def _ray(needs: Needs, address: str | None) -> Finding:
    """Check only whether Ray answers: `--cluster` examines its nodes."""
    want = (needs.nodes, needs.nodes * needs.gpus_per_node if needs.gpu else 0)
    if address is None or (error := probes.why_no_answer(address)) is not None:
        return checks.ray_cluster(address, None if address is None else error, 0, 0, want)
    return Finding("Ray", "ok", f"{address} answers")


def shared_files(needs: Needs) -> dict[str, Path]:
    """Return the folders of a run that every node must see."""
    return {what: Path(path).absolute() for what, path in needs.folders.items() if path}
