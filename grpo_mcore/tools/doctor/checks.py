"""The checks of one machine. The result of each is ok, a note, or a fault with its remedy."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from grpo_mcore.base import processes, processor
from grpo_mcore.base.addresses import running_ray, split_port
from grpo_mcore.base.imports import NOT_INSTALLED, why_not_imported
from grpo_mcore.generation.config import pips_cuda

GB = 10**9
DEADLINE_S = 50.0
RAY_PORTS = (6379, 8265)
MIN_DRIVER = 580
"""The first driver branch for CUDA 13, which the `gpu` extra's wheels are built for."""
MIN_OPEN_FILES = 4096
"""Minimum limit of open files. Ray advises 65536; below this a run of a few dozen workers fails with "too many open
files"."""
MAX_CLOCK_OFFSET_S = 1.0
MAX_FILE_SECONDS = 1.0
PEERS_S = 10.0
"""Seconds that the other processes of an all-reduce get after one has failed; all started at the same time."""
USED_BEFORE = 0.05
"""Share of a GPU's memory that may be in use before a run."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check. A note is worth knowing and not a fault. `saw` is what the check found, `advice` the
    remedy."""

    check: str
    state: Literal["ok", "note", "fault"]
    saw: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.state:6}{self.check:16}{self.saw}{advice}"


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
    checkpoint_bytes: int = 0  # of one; 0: not known
    ports: tuple[int, ...] = ()
    sandbox: bool = False  # the recipe runs programs that the model writes
    gpu_packages: tuple[str, ...] = ()  # optional packages that have fused kernels for the recipe's model


Check = Callable[[], Iterable[CheckResult]]


def examine(
    needs: Needs, *, deadline_s: float = DEADLINE_S, checks: dict[str, Check] | None = None
) -> list[CheckResult]:
    """Run all checks at once. Return their findings in order; one that hangs or fails is a fault."""
    checks = checks_of(needs) if checks is None else checks
    findings: dict[str, list[CheckResult]] = {}
    end = time.monotonic() + deadline_s

    def look(name: str, check: Check) -> None:
        try:
            findings[name] = list(check())
        except Exception as error:
            findings[name] = [fault(name, f"{type(error).__name__}: {error}", "the check itself failed")]

    threads = [threading.Thread(target=look, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer in {deadline_s:.0f} s", "a hanging mount, driver or network"
    return [finding for name in checks for finding in findings.get(name, [fault(name, *late)])]


def checks_of(needs: Needs) -> dict[str, Check]:
    """Return the checks of a machine by name."""
    folders = {use: path for use, path in needs.folders.items() if path}
    return {
        "versions": lambda: versions(requirements(extra := "gpu" if _on_gpu(needs) else "cpu"), extra),
        "GPUs": lambda: gpus(needs),
        "GPU kernels": lambda: gpu_kernels(needs.gpu_packages if _on_gpu(needs) else ()),
        "FlashInfer": lambda: flashinfer() if _on_gpu(needs) else (),
        "/dev/shm": lambda: shared_memory(needs.shm_bytes),
        **{use: partial(folder, use, path) for use, path in folders.items()},
        "disk": lambda: disk(
            [*folders.values()], needs.disk_bytes, {folders.get("checkpoints"): needs.checkpoint_bytes}
        ),
        "ports": lambda: ports(needs.ports or (() if running_ray(os.environ.get("RAY_ADDRESS")) else RAY_PORTS)),
        "open files": open_files,
        "sandbox": lambda: sandbox(needs.sandbox),
        "bfloat16": lambda: bfloat16(gpu=_on_gpu(needs)),
        "load": load,
        "HF cache": hub_cache,
        "HF hub": lambda: model(needs.model),
        "Ray": lambda: ray(needs.nodes),
        "collectives": lambda: collectives(needs),
    }


def fault(check: str, text: str, advice: str) -> CheckResult:
    return CheckResult(check, "fault", text, advice)


def checked(check: str, text: str, remedy: str | Literal[False]) -> CheckResult:
    """Return a fault with its remedy, or ok if there is nothing to remedy."""
    return fault(check, text, remedy) if remedy else CheckResult(check, "ok", text)


def requirements(extra: str) -> list[str]:
    """Return this package's requirements, including those of `extra`."""
    needed = map(Requirement, metadata.requires("grpo-mcore") or ())
    return [f"{r.name}{r.specifier}" for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]


def versions(pins: Sequence[str], extra: str) -> Iterator[CheckResult]:
    """Compare requirements such as "torch==2.13.*" with what is installed."""
    wrong = []
    for pin in map(Requirement, pins):
        try:
            installed = metadata.version(pin.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{pin.name} is not installed ({pin.specifier or 'any version'})")
            continue
        if not pin.specifier.contains(Version(installed).base_version, prereleases=True):
            wrong.append(f"{pin.name} {installed} instead of {pin.specifier}")
    remedy = f"install the pinned ones: pip install -e .[{extra}]"
    yield checked("versions", "; ".join(wrong) or f"{len(pins)} packages as pinned", bool(wrong) and remedy)


def gpu_kernels(packages: Sequence[str]) -> Iterator[CheckResult]:
    """Import optional packages with fused kernels. Without one a run is slower, not wrong; one that is installed and
    cannot be imported ends it."""
    reasons = {name: why_not_imported(name) for name in packages}
    for name, reason in reasons.items():
        if reason not in (None, NOT_INSTALLED):
            remedy = f"install it again with scripts/setup_gpu.sh, or remove it: pip uninstall {name.replace('_', '-')}"
            yield fault("GPU kernels", f"{name} cannot be imported: {reason}", remedy)
    missing = [name for name, reason in reasons.items() if reason == NOT_INSTALLED]
    if missing:
        text = f"torch's own are used in place of those of {', '.join(missing)}"
        yield CheckResult("GPU kernels", "note", text, "not installed; scripts/setup_gpu.sh installs them")
    elif packages and not any(reasons.values()):
        yield CheckResult("GPU kernels", "ok", ", ".join(packages))


def flashinfer() -> Iterator[CheckResult]:
    """Look for FlashInfer's compiled kernels, or else for what compiles them at an engine's first start."""
    if find_spec("flashinfer") is None:
        return
    remedy = "fetch them: scripts/setup_gpu.sh prefetch"
    if find_spec("flashinfer_jit_cache") is not None:
        yield CheckResult("FlashInfer", "ok", "its compiled kernels are installed")
    elif pips_cuda() is not None or shutil.which("nvcc") is not None:
        yield CheckResult("FlashInfer", "note", "engines compile its kernels at their first start", remedy)
    else:
        text = "neither its kernels nor an nvcc are here: engines do without the fused all-reduce, which is slower"
        yield CheckResult("FlashInfer", "note", text, remedy)


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it. Memory is in bytes, 0 where it is not known. `errors` counts uncorrected ECC
    errors; it is None if they are not counted."""

    index: int
    name: str
    driver: str
    memory: int
    used: int
    errors: int | None


def list_gpus(timeout_s: float = 15.0) -> list[Gpu] | None:
    """Return what nvidia-smi lists, or None if it is not installed. Raises OSError with its message if it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise OSError(f"nvidia-smi: {(done.stderr or done.stdout).strip()}")
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    # Among the GPUs nvidia-smi prints warnings; for a value that it cannot read "[N/A]" or what is wrong with the GPU.
    listed = [row for row in rows if len(row) == len(fields.split(",")) and row[0].isdigit()]
    return [
        Gpu(int(index), name, driver, _mib(total), _mib(used), int(errors) if errors.isdigit() else None)
        for index, name, driver, total, used, errors in listed
    ]


def _mib(text: str) -> int:
    """Return the bytes of a number of MiB, 0 for anything else."""
    return int(text) * 2**20 if text.isdigit() else 0


def _on_gpu(needs: Needs) -> bool:
    return bool(list_gpus()) if needs.gpu is None else needs.gpu


def gpus(needs: Needs) -> Iterable[CheckResult]:
    if needs.gpu is False:
        return [CheckResult("GPUs", "ok", "not used: cluster.platform is cpu")]
    present = list_gpus()
    needed = needs.gpus_per_node if needs.gpu else 0
    if present:
        import torch

        return check_gpus(present, needed, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not needed:
        return [CheckResult("GPUs", "ok", "none, and none asked for")]
    reason = "no nvidia-smi" if present is None else "no device"
    advice = "install the driver, start the container with --gpus all, or set cluster.platform: cpu"
    return [fault("GPUs", f"{reason}, but {needed} are asked for", advice)]


def check_gpus(
    present: Sequence[Gpu], needed: int, seen_by_torch: int, visible: str | None = None
) -> list[CheckResult]:
    """Check the GPUs of a node. `needed` is the number that the recipe needs (0: any). `visible` is
    CUDA_VISIBLE_DEVICES, by which a scheduler gives a job some of a node's GPUs, or MIG instances; the others are not
    checked."""
    lost = [gpu for gpu in present if not gpu.driver[:1].isdigit()]
    sound = [gpu for gpu in present if gpu not in lost]
    allotted = visible.split(",") if visible else None
    ours = [gpu for gpu in sound if allotted is None or str(gpu.index) in allotted]
    names, drivers = sorted({gpu.name for gpu in sound}), sorted({gpu.driver for gpu in sound})
    faults = [
        fault("GPUs", f"GPU {gpu.index}: {gpu.driver}", "drain the node and reset or replace the GPU") for gpu in lost
    ]
    if len(sound) < needed and allotted is None:
        faults.append(fault("GPUs", f"{len(sound)} instead of {needed}", "lower cluster.gpus_per_node, or see dmesg"))
    if seen_by_torch == 0 or (allotted is None and seen_by_torch != len(sound)):
        text = f"torch sees {seen_by_torch} of {len(sound)}"
        faults.append(fault("GPUs", text, "unset CUDA_VISIBLE_DEVICES; install a CUDA build of torch"))
    elif allotted is not None and seen_by_torch < needed:
        text = f"CUDA_VISIBLE_DEVICES gives this job {seen_by_torch} of {len(sound)} GPUs, and {needed} are asked for"
        faults.append(fault("GPUs", text, "ask the scheduler for all of them, or lower cluster.gpus_per_node"))
    if any(int(driver.split(".")[0]) < MIN_DRIVER for driver in drivers):
        faults.append(fault("driver", f"driver {', '.join(drivers)}", f"CUDA 13 needs {MIN_DRIVER} or newer"))
    if len(names) > 1:
        faults.append(fault("GPUs", f"they differ: {', '.join(names)}", "use nodes of one kind of GPU"))
    for gpu in ours:
        if gpu.used > USED_BEFORE * gpu.memory:
            text = f"GPU {gpu.index}: {gpu.used / GB:.1f} GB are in use"
            faults.append(fault("GPU memory", text, "end the processes that nvidia-smi lists"))
        if gpu.errors:
            text = f"GPU {gpu.index}: {gpu.errors} uncorrected ECC errors"
            faults.append(fault("GPU errors", text, "drain the node and reset or replace the GPU"))
    some = f" of {len(sound)}, by CUDA_VISIBLE_DEVICES" if allotted is not None and seen_by_torch != len(sound) else ""
    text = f"{seen_by_torch}{some} x {', '.join(names)}, driver {', '.join(drivers)}"
    return faults or [CheckResult("GPUs", "ok", text)]


def shared_memory(needed: int, path: str = "/dev/shm") -> Iterator[CheckResult]:
    """Check the shared memory. `needed` is the bytes that refit buffer and collectives take."""
    usage = shutil.disk_usage(path)
    remedy = "delete what ended runs left in /dev/shm"
    if usage.total < needed:
        remedy = "docker run --shm-size, or a Memory emptyDir at /dev/shm"
    text = f"{usage.total / GB:.2f} GB, {usage.free / GB:.2f} GB free"
    yield checked("/dev/shm", text, usage.free < needed and f"{needed / GB:.1f} GB are needed: {remedy}")


class FileTimes(NamedTuple):
    """Seconds of writing, renaming and reading back a small file. `clock` is how many seconds the file system's clock
    is ahead of this machine's."""

    write: float
    rename: float
    read: float
    clock: float


def file_times(path: str, nbytes: int = 1 << 20) -> FileTimes:
    """Write, rename, read and delete a file. Folders that do not exist are created, and removed again if empty."""
    folder = Path(path).expanduser().absolute()
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    first = folder / f".doctor-{uuid.uuid4().hex[:8]}"
    second = first.with_suffix(".renamed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with first.open("wb") as file:
            file.write(os.urandom(nbytes))
            file.flush()
            os.fsync(file.fileno())
        clock = first.stat().st_mtime - time.time()
        written = time.perf_counter()
        first.rename(second)
        renamed = time.perf_counter()
        if len(second.read_bytes()) != nbytes:
            raise OSError(f"a file of {nbytes:,} bytes came back shorter")
        return FileTimes(written - start, renamed - written, time.perf_counter() - renamed, clock)
    finally:
        for file_left in (first, second):
            if folder.is_dir():
                file_left.unlink(missing_ok=True)
        for made in missing:
            if made.is_dir() and not any(made.iterdir()):
                made.rmdir()


def folder(use: str, path: str) -> Iterator[CheckResult]:
    """Check a folder that all nodes share. `use` is what it holds, such as "checkpoints"."""
    try:
        times = file_times(path)
    except OSError as error:
        yield fault(use, f"{path}: {error.strerror or error}", "give a folder that every node may write")
        return
    text = f"{path}: write {times.write:.3f} s, rename {times.rename:.3f} s, read {times.read:.3f} s"
    slow = max(times[:3]) > MAX_FILE_SECONDS
    yield checked(use, text, slow and "checkpoints would stall the run: use a faster file system")
    if not slow:
        yield clock(times.clock, 0.05, f"file system of {path}")


def clock(offset: float, uncertainty: float, of: str) -> CheckResult:
    """Check another clock, which is `offset` seconds ahead, known to within `uncertainty`."""
    if abs(offset) - uncertainty > MAX_CLOCK_OFFSET_S:
        advice = "tokens and leases expire by the clock: run chrony or ntpd on both"
        return fault("clock", f"{of} is {offset:+.1f} s off", advice)
    return CheckResult("clock", "ok", f"{of} agrees within {abs(offset) + uncertainty:.2f} s")


def disk(folders: Sequence[str], needed: int, checkpoints: Mapping[str | None, int]) -> Iterator[CheckResult]:
    """Check the space for checkpoints and logs, and in the temporary folder for Ray's logs and spilled objects.
    `checkpoints` has the bytes of a checkpoint by the folder that gets them."""
    for path in dict.fromkeys([*folders, tempfile.gettempdir()]):
        absolute = Path(path).absolute()
        usage = shutil.disk_usage(next(parent for parent in (absolute, *absolute.parents) if parent.exists()))
        checkpoint = checkpoints.get(path, 0)
        least = max(needed, checkpoint) if path in folders else 2 * GB
        text = f"{path}: {usage.free / GB:,.1f} of {usage.total / GB:,.1f} GB free"
        text += f", for {usage.free // checkpoint} checkpoints of {checkpoint / GB:,.1f} GB" if checkpoint else ""
        remedy = f"make room for {least / GB:,.0f} GB, or take another folder"
        yield checked("disk", text, usage.free < least and remedy)


def ports(numbers: Sequence[int]) -> Iterator[CheckResult]:
    """Check that ports can be listened on."""
    taken = []
    for port in sorted(numbers):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
            except OSError:
                taken.append(f"{port} is taken by {_holder(port)}")
    text = ", ".join(taken) or (f"{', '.join(map(str, numbers))} free" if numbers else "none asked for")
    yield checked("ports", text, bool(taken) and "end that process, or give another port (RAY_PORT, --port)")


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} ({connection.pid})"
    except (psutil.Error, OSError):
        return "a process of another user"
    return "another process"


def open_files() -> Iterator[CheckResult]:
    """Check the soft limit of open files of this process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = f"ulimit -n 65536 (at least {MIN_OPEN_FILES})"
    yield checked("open files", f"limit {limit}", limit < MIN_OPEN_FILES and remedy)


def sandbox(needed: bool, timeout_s: float = 20.0) -> Iterator[CheckResult]:
    """Check that bubblewrap, in which env.code runs programs, makes a sandbox with its own namespaces."""
    problem, advice = None, "let this user or container make namespaces: docs/environments.md, The sandbox"
    program = shutil.which("bwrap")
    if program is None:
        problem = "bubblewrap (bwrap) is not installed"
        advice = "apt-get install bubblewrap, or your system's package of that name"
    else:
        command = [program, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            problem = (done.stderr.strip().splitlines() or [f"bwrap: exit code {done.returncode}"])[-1]
    if problem is None:
        yield CheckResult("sandbox", "ok", "bubblewrap makes one")
    elif needed:
        yield fault("sandbox", f"env.code runs programs in one, but {problem}", advice)
    else:
        yield CheckResult("sandbox", "note", problem, f"only env.code needs it: {advice}")


def bfloat16(*, gpu: bool) -> Iterator[CheckResult]:
    """Say whether a CPU has instructions for the default precision of a recipe."""
    if not gpu:
        slow = processor.lacks_bfloat16()
        text = processor.SLOW_BFLOAT16 if slow else "the processor has instructions for it"
        yield CheckResult(
            "bfloat16",
            "note" if slow else "ok",
            text,
            "policy.precision: auto (the default) is float32 here" if slow else "",
        )


def load() -> Iterator[CheckResult]:
    """Compare the processes that want to run, averaged over the last minute, with the cores."""
    average, cores = os.getloadavg()[0], processes.available_cores()
    busy = average > 4 * cores
    advice = "others are busy here: starts may run into their time limits" if busy else ""
    yield CheckResult("load", "note" if busy else "ok", f"{average:.0f} processes for {cores:g} cores", advice)


def hub_cache() -> Iterator[CheckResult]:
    """Check that the Hugging Face cache can be written."""
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    try:
        file_times(cache, nbytes=1024)
    except OSError as error:
        yield fault("HF cache", f"{cache}: {error.strerror or error}", "set HF_HOME to a folder you may write")
    else:
        yield CheckResult("HF cache", "ok", cache)


def model(name: str | None) -> Iterator[CheckResult]:
    """Check that a model is in a folder or the cache, or can be fetched. Credentials are not read."""
    from huggingface_hub import constants

    token = bool(os.environ.get("HF_TOKEN")) or os.path.isfile(constants.HF_TOKEN_PATH)
    credentials = "with credentials" if token else "without credentials"
    if name is None:
        yield CheckResult("HF hub", "ok" if token else "note", f"{credentials}; gated models need them")
    elif Path(name).is_dir() or any(
        Path(constants.HF_HUB_CACHE).glob(f"models--{name.replace('/', '--')}/snapshots/*")
    ):
        yield CheckResult("HF hub", "ok", f"{name} is here")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:  # a name of the hub is OWNER/MODEL
        yield CheckResult("HF hub", "note", f"there is no folder {name}", "make it before the run")
    elif constants.HF_HUB_OFFLINE:
        advice = "fetch it first (hf download), or unset HF_HUB_OFFLINE"
        yield fault("HF hub", f"{name} is not here, and HF_HUB_OFFLINE is set", advice)
    else:
        advice = "" if token else "a gated model needs HF_TOKEN or `hf auth login`"
        yield CheckResult("HF hub", "note", f"{name} is not here and will be fetched {credentials}", advice)


def ray(nodes: int) -> Iterator[CheckResult]:
    """Check whether Ray answers; `--cluster` examines its nodes."""
    if address := running_ray(os.environ.get("RAY_ADDRESS")):
        yield ray_answers(address)
    elif nodes > 1:
        advice = "start Ray on all nodes (ray start) and set RAY_ADDRESS"
        yield fault("Ray", f"{nodes} nodes are asked for, but RAY_ADDRESS is not set", advice)
    else:
        yield CheckResult("Ray", "ok", "none is running; a run starts its own")


def ray_answers(address: str, timeout_s: float = 5.0) -> CheckResult:
    """Check that something listens at host:port, or where Ray finds itself with "auto"."""
    if "://" in address:
        advice = "start the run on a node of the cluster, with RAY_ADDRESS=HOST:6379 or auto"
        return fault("Ray", f"RAY_ADDRESS {address} is for a client outside the cluster", advice)
    if address == "auto":
        address = _ray_of_this_machine() or ""
        if not address:
            return fault(
                "Ray", "RAY_ADDRESS is auto, but no Ray runs on this machine", "start it, or unset RAY_ADDRESS"
            )
    host, port = split_port(address)
    if not port.isdigit():
        return fault("Ray", f"RAY_ADDRESS {address} has no port", "RAY_ADDRESS=HOST:6379, or auto on a node of it")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError as error:
        advice = "start it, or unset RAY_ADDRESS to have one started"
        return fault("Ray", f"{address}: nobody answers ({error})", advice)
    return CheckResult("Ray", "ok", f"{address} answers")


def _ray_of_this_machine() -> str | None:
    """Return the HOST:PORT of the Ray that has a node on this machine, from the command line of its raylet."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet":
            for word in process.info["cmdline"] or ():
                if word.startswith("--gcs-address="):
                    return word.partition("=")[2]
    return None


def collectives(needs: Needs) -> Iterator[CheckResult]:
    """All-reduce over the GPUs of this host by NCCL, or over two processes by gloo."""
    count = 0
    if needs.gpu is not False and list_gpus():
        import torch

        count = torch.cuda.device_count()  # of a shared node the job may have some
    backend, world = ("nccl", count) if count > 1 else ("gloo", 2)
    address = f"127.0.0.1:{processes.free_port()}"
    answers = all_reduce(backend, address, range(world), world, DEADLINE_S - 5)
    yield reduced("collectives", f"{backend} over {world} processes", backend, answers)


@dataclass(frozen=True)
class Reduced:
    """Result of one process of an all-reduce. `seconds` includes its start. `rate` is in GB/s in each direction, and 0
    with an error."""

    seconds: float
    error: str | None = None
    rate: float = 0.0


def all_reduce(
    backend: str, address: str, ranks: Sequence[int], world: int, timeout_s: float, megabytes: int = 4
) -> list[Reduced]:
    """Run these ranks of an all-reduce on this host, the first on its first GPU, and return the result of each.
    `address` is HOST:PORT of rank 0."""
    start = time.monotonic()
    program = [sys.executable, "-P", "-m", "grpo_mcore.tools.doctor.allreduce_probe", backend, f"{timeout_s}"]
    started = [
        subprocess.Popen(
            [*program, str(os.getpid()), address, *map(str, (rank, world, device, megabytes))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for device, rank in enumerate(ranks)
    ]
    end = start + timeout_s
    results: list[Reduced] = []
    try:
        for process in started:
            error, rate = None, 0.0
            try:
                output, text = process.communicate(timeout=max(0.1, end - time.monotonic()))
                if process.returncode:
                    error = (text.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                else:
                    rate = float(output.split()[-1])
            except subprocess.TimeoutExpired:
                error = f"no answer in {timeout_s:.0f} s"
            if error:
                end = min(end, time.monotonic() + PEERS_S)
            results.append(Reduced(time.monotonic() - start, error, rate))
    finally:
        processes.end(started, grace_s=0)
    return results


def reduced(check: str, ranks: str, backend: str, answers: Sequence[Reduced]) -> CheckResult:
    """Check the results of an all-reduce. `ranks` says which processes took part."""
    if error := next((answer.error for answer in answers if answer.error), None):
        variables = "GLOO_SOCKET_IFNAME, and that the host's own name resolves"
        if backend == "nccl":
            variables = "NCCL_SOCKET_IFNAME, NCCL_IB_HCA; NCCL_DEBUG=INFO tells more"
        return fault(check, f"{ranks}: {error}", f"look at {variables}")
    seconds, rate = max(answer.seconds for answer in answers), min(answer.rate for answer in answers)
    return CheckResult(check, "ok", f"{ranks}: {rate:.2g} GB/s, {seconds:.1f} s with start")
