"""`train --check` in processes of random environments: variables, limits, mounts, another user, odd standard streams.
It passes, or ends in one message; never in a traceback, and never in silence."""

import ctypes
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from tests.functional.preload import preload
from tests.functional.runs import grpo_recipe, make_task, write_recipe

NOBODY = 65534
ENDS_S = 60.0
NEW_MOUNTS = 0x20000  # CLONE_NEWNS

NUMBERS, PATHS = ("x", "", "-1", "0", "99999"), ("", "/dev/null", "/nonexistent", f"/{'a' * 200}")
VARIABLES = {
    **dict.fromkeys(
        "OMP_NUM_THREADS MKL_NUM_THREADS RANK WORLD_SIZE LOCAL_RANK MASTER_PORT SLURM_JOB_ID SLURM_NTASKS "
        "SLURM_JOB_END_TIME SLURM_CPUS_PER_TASK COLUMNS VLLM_CPU_KVCACHE_SPACE CUDA_VISIBLE_DEVICES".split(),
        NUMBERS,
    ),
    **dict.fromkeys("HOME TMPDIR HF_HOME XDG_CACHE_HOME TRITON_CACHE_DIR RAY_TMPDIR CUDA_HOME PATH".split(), PATHS),
    **dict.fromkeys("VLLM_PORT KUBERNETES_PORT MASTER_ADDR RAY_ADDRESS http_proxy".split(), ("tcp://10.0.0.1:80", "x")),
    **dict.fromkeys("LANG LC_ALL TZ TERM USER SHELL NO_COLOR FORCE_COLOR HF_HUB_OFFLINE WANDB_MODE".split(), ("", "x")),
    **dict.fromkeys("GLOO_SOCKET_IFNAME PYTORCH_CUDA_ALLOC_CONF VLLM_LOGGING_LEVEL NCCL_DEBUG".split(), ("x",)),
}
LIMITS = {
    "RLIMIT_NOFILE": (32, 64), "RLIMIT_FSIZE": (16384,), "RLIMIT_NPROC": (1, 64), "RLIMIT_STACK": (2**18,),
    "RLIMIT_AS": (2 * 10**9,), "RLIMIT_MEMLOCK": (0,),
}  # fmt: skip
MOUNTS = {
    "/proc": ("hidepid=1", "hidepid=2", None), "/dev/shm": ("ro", "size=4k", "mode=0"),
}  # fmt: skip
OTHERS = {
    "cwd": ("gone", "/proc/self"), "umask": (0o777, 0o077), "user": (NOBODY,),
    "stdout": ("closed", "/dev/full", "pipe"), "stdin": ("closed",), "logs": ("a file", "read-only"), **MOUNTS,
}  # fmt: skip
FOUND: list[dict[str, Any]] = [{"cwd": "gone"}, {"RLIMIT_NPROC": 1, "user": NOBODY}]


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    kinds: list[tuple[dict[str, Any], int]] = [(VARIABLES, 5), (LIMITS, 1), (OTHERS, 2)]
    names = {name: choices for kind, most in kinds for name, choices in draw.sample(sorted(kind.items()), most)}
    return {name: draw.choice(choices) for name, choices in names.items()}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return a folder that every user can enter, with a task and an untrained model."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o777)
        task = make_task(folder)
        preload()
        assert main(["train", str(write_recipe(folder, grpo_recipe(task, task.untrained))), "--check"]) == 0
        for path in folder.rglob("*"):
            path.chmod(0o777 if path.is_dir() else 0o644)
        yield folder


def change(environment: dict[str, Any], folder: Path) -> None:
    """Make this process one of such an environment."""
    if environment.keys() & MOUNTS:
        assert ctypes.CDLL(None).unshare(NEW_MOUNTS) == 0, "no namespace of mounts"
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for path in environment.keys() & MOUNTS:
        options, kind = environment[path], "proc" if path == "/proc" and environment[path] else "tmpfs"
        subprocess.run(["mount", "-t", kind, *(["-o", options] if options else []), "none", path], check=True)
    for name in environment.keys() & VARIABLES:
        os.environ[name] = environment[name]
    match environment.get("logs"):
        case "a file":
            (folder / "logs").write_text("")
        case "read-only":
            (folder / "logs").mkdir(mode=0o555)
    match environment.get("cwd"):
        case "gone":
            os.chdir(gone := tempfile.mkdtemp(dir=folder))
            os.rmdir(gone)
        case str(path):
            os.chdir(path)
    os.dup2(os.open(folder / "err", os.O_WRONLY | os.O_CREAT), 2)
    reader, writer = os.pipe()
    os.close(reader)
    outputs = {"pipe": writer, "/dev/full": os.open("/dev/full", os.O_WRONLY)}
    os.dup2(outputs.get(environment.get("stdout", ""), os.open(folder / "out", os.O_WRONLY | os.O_CREAT)), 1)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    if environment.get("stdout") == "closed":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]
    if "stdin" in environment:
        os.close(0)
    os.umask(environment.get("umask", 0o022))
    if "user" in environment:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    for name in environment.keys() & LIMITS:
        number, most = getattr(resource, name), environment[name]
        resource.setrlimit(number, (most, most))


def checked_there(environment: dict[str, Any], recipe: Path) -> tuple[int | str, str]:
    """Return the exit code of `train --check` in a fork of this process with such an environment, or "hangs", and what
    it printed on standard error."""
    pid = os.fork()
    if pid == 0:
        try:
            os.closerange(3, 1 << 16)  # of earlier tests: a limit of open files is for the command's own
            change(environment, recipe.parent)
            os._exit(main(["train", str(recipe), "--check"]))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    deadline = time.monotonic() + ENDS_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", (recipe.parent / "err").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts, and processes of other users")
@pytest.mark.parametrize(
    "environment",
    [
        *FOUND,
        *(drawn(seed) for seed in range(12)),
        *(pytest.param(drawn(seed), marks=pytest.mark.every_state) for seed in range(12, 200)),
    ],
    ids=", ".join,
)
def test_check_ends_in_order_in_any_environment(environment: dict[str, Any], folder: Path) -> None:
    here = Path(tempfile.mkdtemp(dir=folder))
    here.chmod(0o777)
    recipe = here / "recipe.yaml"
    recipe.write_text((folder / "recipe.yaml").read_text().replace(str(folder / "logs"), str(here / "logs")))
    code, printed = checked_there(environment, recipe)
    assert "Traceback" not in printed and code in (0, 1, 2), (code, printed)
    assert code == 0 or printed.count("grpo-mcore train: ") == 1, printed
