"""Turn what a probe saw into a finding: ok, a note, or a fault with its remedy. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

GB = 10**9
MIN_DRIVER = 580
"""The first driver branch for CUDA 13, which the `gpu` extra's wheels are built for."""
MIN_OPEN_FILES = 4096
"""Minimum limit of open files. Ray advises 65536; below this a run of a few dozen workers fails with "too many open
files"."""
MAX_CLOCK_OFFSET_S = 1.0
MAX_FILE_SECONDS = 1.0
USED_BEFORE = 0.05
"""Share of a GPU's memory that may be in use before a run."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. A note is worth knowing and not a fault. `advice`: the remedy."""

    check: str
    state: Literal["ok", "note", "fault"]
    saw: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.state:6}{self.check:16}{self.saw}{advice}"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it. Memory in bytes; `errors`: uncorrected ECC errors, None if they are not counted."""

    index: int
    name: str
    driver: str
    memory: int
    used: int
    errors: int | None


@dataclass(frozen=True)
class FileTimes:
    """Seconds of writing, renaming and reading back a small file, or the `error`. `clock`: seconds by which the file
    system's clock is ahead of this machine's."""

    folder: str
    write: float = 0.0
    rename: float = 0.0
    read: float = 0.0
    clock: float = 0.0
    error: str | None = None


def versions(
    pins: Sequence[str], installed: Mapping[str, str], source: str = "pip install -e .[cpu|gpu]"
) -> list[Finding]:
    """Compare requirements such as "torch==2.13.*" with the `installed` versions by normalised name."""
    wrong = []
    for pin in pins:
        requirement = Requirement(pin)
        name = requirement.name.lower().replace("_", "-")
        found = installed.get(name)
        if found is None:
            wrong.append(f"{name} is not installed ({requirement.specifier or 'any version'})")
        elif not requirement.specifier.contains(Version(found).base_version, prereleases=True):
            wrong.append(f"{name} {found} instead of {requirement.specifier}")
    if wrong:
        return [Finding("versions", "fault", "; ".join(wrong), f"install the pinned ones: {source}")]
    return [Finding("versions", "ok", f"{len(pins)} packages as pinned")]


def gpus(found: Sequence[Gpu] | None, wanted: int, seen_by_torch: int | None = None) -> list[Finding]:
    """Check the GPUs of a node. `found`: None without nvidia-smi. `wanted`: GPUs that the recipe needs (0: any)."""
    if not found:
        if wanted:
            reason = "no nvidia-smi" if found is None else "no device"
            advice = "install the driver, start the container with --gpus all, or set cluster.platform: cpu"
            return [Finding("GPUs", "fault", f"{reason}, but {wanted} are asked for", advice)]
        return [Finding("GPUs", "ok", "none, and none asked for")]
    faults = []
    if len(found) < wanted:
        faults.append(
            Finding("GPUs", "fault", f"{len(found)} instead of {wanted}", "lower cluster.gpus_per_node, or see dmesg")
        )
    if seen_by_torch is not None and seen_by_torch != len(found):
        saw = f"torch sees {seen_by_torch} of {len(found)}"
        faults.append(Finding("GPUs", "fault", saw, "unset CUDA_VISIBLE_DEVICES; install a CUDA build of torch"))
    drivers = {gpu.driver for gpu in found}
    if any(int(driver.split(".")[0]) < MIN_DRIVER for driver in drivers):
        saw = f"driver {', '.join(sorted(drivers))}"
        faults.append(Finding("driver", "fault", saw, f"CUDA 13 needs {MIN_DRIVER} or newer"))
    if len({gpu.name for gpu in found}) > 1:
        names = ", ".join(sorted({gpu.name for gpu in found}))
        faults.append(Finding("GPUs", "fault", f"they differ: {names}", "use nodes of one kind of GPU"))
    for gpu in found:
        if gpu.used > USED_BEFORE * gpu.memory:
            saw = f"GPU {gpu.index}: {gpu.used / GB:.1f} GB are in use"
            faults.append(Finding("GPU memory", "fault", saw, "end the processes that nvidia-smi lists"))
        if gpu.errors:
            saw = f"GPU {gpu.index}: {gpu.errors} uncorrected ECC errors"
            faults.append(Finding("GPU errors", "fault", saw, "drain the node and reset or replace the GPU"))
    names = ", ".join(sorted({gpu.name for gpu in found}))
    return faults or [Finding("GPUs", "ok", f"{len(found)} x {names}, driver {', '.join(sorted(drivers))}")]


def pair(
    backend: str, ranks: tuple[int, int] | tuple[str, str], seconds: float | None, error: str | None, *, of: str
) -> Finding:
    """Check an all-reduce over two processes. `seconds`: None if it did not end. `of`: name of the check."""
    who = f"{backend} {ranks[0]}-{ranks[1]}"
    if error is not None or seconds is None:
        variables = (
            "NCCL_SOCKET_IFNAME, NCCL_IB_HCA; NCCL_DEBUG=INFO tells more"
            if backend == "nccl"
            else ("GLOO_SOCKET_IFNAME, and that the host's own name resolves")
        )
        return Finding(of, "fault", f"{who}: {error or 'no answer'}", f"look at {variables}")
    return Finding(of, "ok", f"{who}: {seconds:.1f} s with start")


def shared_memory(total: int, free: int, needed: int) -> Finding:
    """Check /dev/shm, in bytes. `needed`: what refit buffer and collectives take."""
    saw = f"{total / GB:.2f} GB, {free / GB:.2f} GB free"
    if total < needed:
        advice = f"{needed / GB:.1f} GB are needed: docker run --shm-size, or a Memory emptyDir at /dev/shm"
        return Finding("/dev/shm", "fault", saw, advice)
    if free < needed:
        advice = f"{needed / GB:.1f} GB are needed: delete what ended runs left in /dev/shm"
        return Finding("/dev/shm", "fault", saw, advice)
    return Finding("/dev/shm", "ok", saw)


def folder(times: FileTimes, what: str) -> list[Finding]:
    """Check a folder that all nodes share."""
    if times.error is not None:
        return [Finding(what, "fault", f"{times.folder}: {times.error}", "give a folder that every node may write")]
    slowest = max(times.write, times.rename, times.read)
    saw = f"{times.folder}: write {times.write:.3f} s, rename {times.rename:.3f} s, read {times.read:.3f} s"
    if slowest > MAX_FILE_SECONDS:
        return [Finding(what, "fault", saw, "checkpoints would stall the run: use a faster file system")]
    return [Finding(what, "ok", saw), clock(times.clock, 0.05, f"file system of {times.folder}")]


def seen(what: str, path: str, nodes: Mapping[str, bool]) -> Finding:
    """Check that a file of one node is seen by the others. `nodes`: whether each sees it."""
    blind = sorted(name for name, sees in nodes.items() if not sees)
    if blind:
        advice = "it must be one file system, mounted at the same path on every node"
        return Finding(what, "fault", f"{path}: not seen by {', '.join(blind)}", advice)
    return Finding(what, "ok", f"{path}: seen by {len(nodes)} nodes")


def clock(offset: float, uncertainty: float, of: str) -> Finding:
    """Check another clock, which is `offset` seconds ahead, known to within `uncertainty`."""
    if abs(offset) - uncertainty > MAX_CLOCK_OFFSET_S:
        advice = "tokens and leases expire by the clock: run chrony or ntpd on both"
        return Finding("clock", "fault", f"{of} is {offset:+.1f} s off", advice)
    return Finding("clock", "ok", f"{of} agrees within {abs(offset) + uncertainty:.2f} s")


def ports(taken: Mapping[int, str], wanted: Sequence[int]) -> Finding:
    """Check ports. `taken`: those of `wanted` that are in use, with their holder."""
    if taken:
        saw = ", ".join(f"{port} is taken by {who}" for port, who in sorted(taken.items()))
        return Finding("ports", "fault", saw, "end that process, or give another port (RAY_PORT, --port)")
    return Finding("ports", "ok", f"{', '.join(map(str, wanted))} free" if wanted else "none asked for")


def disk(path: str, total: int, free: int, needed: int) -> Finding:
    """Check the space for checkpoints or logs, in bytes."""
    saw = f"{path}: {free / GB:.1f} of {total / GB:.1f} GB free"
    if free < needed:
        return Finding("disk", "fault", saw, f"make room for {needed / GB:.0f} GB, or take another folder")
    return Finding("disk", "ok", saw)


def open_files(limit: int) -> Finding:
    """Check the soft limit of open files of this process."""
    if limit < MIN_OPEN_FILES:
        return Finding("open files", "fault", f"limit {limit}", f"ulimit -n 65536 (at least {MIN_OPEN_FILES})")
    return Finding("open files", "ok", f"limit {limit}")


def sandbox(problem: str | None, needed: bool) -> Finding:
    """Check bubblewrap, in which env.code runs programs. `problem`: why it makes no sandbox. `needed`: by the
    recipe."""
    if problem is None:
        return Finding("sandbox", "ok", "bubblewrap makes one")
    if "not installed" in problem:
        advice = "apt-get install bubblewrap, or your system's package of that name"
    else:
        advice = "let this user or container make namespaces: docs/environments.md, The sandbox"
    if not needed:
        return Finding("sandbox", "note", problem, f"only env.code needs it: {advice}")
    return Finding("sandbox", "fault", f"env.code runs programs in one, but {problem}", advice)


def load(average: float, cores: int) -> Finding:
    """Compare the processes that want to run, averaged over the last minute, with the cores."""
    saw = f"{average:.0f} processes for {cores} cores"
    if average > 4 * cores:
        return Finding("load", "note", saw, "others are busy here: starts may run into their time limits")
    return Finding("load", "ok", saw)


def cache(times: FileTimes) -> Finding:
    """Check the Hugging Face cache."""
    if times.error is not None:
        return Finding("HF cache", "fault", f"{times.folder}: {times.error}", "set HF_HOME to a folder you may write")
    return Finding("HF cache", "ok", times.folder)


def model(name: str | None, present: bool, offline: bool, token: bool) -> Finding:
    """Check a model. `present`: in a folder or the cache. `token`: whether there are credentials; they are never
    read."""
    credentials = "with credentials" if token else "without credentials"
    if name is None:
        return Finding("HF hub", "ok" if token else "note", f"{credentials}; gated models need them")
    if present:
        return Finding("HF hub", "ok", f"{name} is here")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # a name of the hub is OWNER/MODEL
        return Finding("HF hub", "note", f"there is no folder {name}", "make it before the run")
    if offline:
        advice = "fetch it first (hf download), or unset HF_HUB_OFFLINE"
        return Finding("HF hub", "fault", f"{name} is not here, and HF_HUB_OFFLINE is set", advice)
    advice = "" if token else "a gated model needs HF_TOKEN or `hf auth login`"
    return Finding("HF hub", "note", f"{name} is not here and will be fetched {credentials}", advice)


def ray_cluster(
    address: str | None, error: str | None, nodes: int, gpus_found: float, want: tuple[int, int]
) -> Finding:
    """Check the Ray cluster at `address` (RAY_ADDRESS). `want`: the nodes and GPUs that the recipe needs."""
    if address is None:
        if want[0] > 1:
            advice = "start Ray on all nodes (ray start) and set RAY_ADDRESS"
            return Finding("Ray", "fault", f"{want[0]} nodes are asked for, but RAY_ADDRESS is not set", advice)
        return Finding("Ray", "ok", "none is running; a run starts its own")
    if error is not None:
        return Finding("Ray", "fault", f"{address}: {error}", "start it, or unset RAY_ADDRESS to have one started")
    saw = f"{address}: {nodes} nodes, {gpus_found:g} GPUs"
    if nodes < want[0] or gpus_found < want[1]:
        advice = f"the recipe asks for {want[0]} nodes and {want[1]} GPUs: wait for the others, or see their logs"
        return Finding("Ray", "fault", saw, advice)
    return Finding("Ray", "ok", saw)
