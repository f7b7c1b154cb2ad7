"""Runs that are disturbed at a random time, by seed: each must tell the truth, and a resume must reach the same end.

    python -m tests.chaos.random_runs TASK MODEL OUT SEED ...

TASK, MODEL: folders of `tests.functional.runs`. The runs are forks of one process that has imported everything, so that
a hundred of them take minutes. All of a run is in its one process (cluster.backend: local).
"""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.cli.main import main
from grpo_mcore.cluster import ObjectLost
from grpo_mcore.cluster.local_cluster import LocalStore
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.observe import audit, read_ledger, read_metrics
from grpo_mcore.recipe import CheckpointingConfig
from tests.chaos.trackers import Flaky
from tests.functional.preload import preload
from tests.functional.runs import TIME_DEPENDENT, Task, grpo_recipe, write_recipe

STEPS = 4
DEADLINE_S = 240.0
BLOCKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Blocked while a run is forked, as `supervise` does: it hears them once it can."""

DISK_MB = 24
"""Size of the disk that fills: two checkpoints of the tiny model are on it at a time."""


@dataclass(frozen=True)
class Disturbance:
    """`kind`: what happens, `at_s`: seconds after the run's start, or after its first ledger entry (`in_loop`),
    `for_s`: for how long, `codes`: how it may end then. 0 is always possible: the run may be over before."""

    kind: str
    in_loop: bool
    at_s: float
    for_s: float
    codes: tuple[int, ...]


KINDS = {
    "TERM": (143,), "USR1": (75,), "INT": (130,), "KILL": (-9,), "STOP": (), "TERM TERM": (143, 130),
    "disk": (73, 1), "clock": (), "slow store": (), "lost object": (69,), "HUP": (143,), "NaN": (1,),
    "EIO": (73, 1, 69), "ENOSPC": (73, 1), "EROFS": (73, 1), "undeletable": (), "slow disk": (), "tracker": (),
    "closed terminal": (),
}  # fmt: skip
FULL = ("disk", "EIO", "ENOSPC", "EROFS")
"""Kinds in which files cannot be written."""


def disturbance(seed: int, start_s: float, loop_s: float, disk: bool) -> Disturbance:
    """Draw one: a quarter of them during the start. `start_s`, `loop_s`: durations of an undisturbed run; `disk`:
    whether a disk can be made to fill."""
    draw = random.Random(seed)
    kinds = [kind for kind in KINDS if disk or kind != "disk"]
    kind = kinds[seed % len(kinds)]
    in_loop = draw.random() < 0.75
    at_s = draw.uniform(0.0, loop_s if in_loop else start_s)
    return Disturbance(kind, in_loop, at_s, draw.uniform(0.2, loop_s), KINDS[kind])


def run(folder: Path, recipe: dict[str, Any], disturbed: Disturbance | None, name: str, *words: str) -> int:
    """Run `grpo-mcore train` in a fork. Return its exit code, negative for a signal that killed it."""
    path = write_recipe(folder, recipe)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    terminal = disturbed is not None and disturbed.kind == "closed terminal"
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        log = (
            writes
            if terminal
            else os.open(folder.parent / f"{folder.name}-{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        )
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        code = 99
        try:
            patch(disturbed, folder)
            code = main(["train", str(path), *words])
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 1
        finally:
            sys.stdout.flush()
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(writes)
    reader: int | None = reads
    began, acted = time.monotonic(), disturbed is None
    since = _since(disturbed, folder)
    while True:
        if reader is not None and (acted or not terminal):
            os.close(reader)
            reader = None
        if reader is not None:
            with suppress(BlockingIOError):
                os.read(reader, 65536)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            if reader is not None:
                os.close(reader)
            return os.waitstatus_to_exitcode(status)
        if not acted and disturbed is not None and since() >= disturbed.at_s:
            acted = True
            act(disturbed, pid, folder)
        if time.monotonic() - began > DEADLINE_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"{folder.name}: the run hung")
        time.sleep(0.005)


def act(disturbed: Disturbance, pid: int, folder: Path) -> None:
    """Do what comes from outside of the run."""
    match disturbed.kind:
        case "STOP":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(min(disturbed.for_s, 3.0))
            os.kill(pid, signal.SIGCONT)
        case "TERM TERM":
            os.kill(pid, signal.SIGTERM)
            time.sleep(disturbed.for_s)
            os.kill(pid, signal.SIGTERM)
        case "disk":
            filler = folder / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while file.write(b"0" * 4096):
                        pass
                except OSError:
                    pass
            time.sleep(disturbed.for_s)
            filler.unlink()
        case "TERM" | "USR1" | "INT" | "KILL" | "HUP" as name:
            os.kill(pid, signal.Signals[f"SIG{name}"])


def _since(disturbed: Disturbance | None, folder: Path) -> Callable[[], float]:
    """Return a function for the seconds since the start of the run or of its loop, below 0 before that."""
    begun = [] if disturbed is not None and disturbed.in_loop else [time.monotonic()]
    ledger = folder / "checkpoints" / "ledger.jsonl"

    def size() -> int:
        return ledger.stat().st_size if ledger.exists() else 0

    at_first = size()

    def since() -> float:
        if not begun and size() > at_first:
            begun.append(time.monotonic())
        return time.monotonic() - begun[0] if begun else -1.0

    return since


def patch(disturbed: Disturbance | None, folder: Path) -> None:
    """Install in the run's own process what cannot come from outside."""
    if disturbed is None:
        return
    since, clock, fetch = _since(disturbed, folder), time.time, LocalStore.fetch_many

    def due() -> bool:
        return disturbed.at_s <= since() <= disturbed.at_s + disturbed.for_s

    def fetch_many(self: LocalStore, refs: Any) -> Any:
        if due() and disturbed.kind == "lost object":
            raise ObjectLost("the object store", f"fetch of {len(refs)} objects", "ObjectLostError", "")
        time.sleep(0.3 if due() else 0.0)
        return fetch(self, refs)

    def on_files(names: Sequence[str], act: Callable[[str], None]) -> None:
        """Call `act` with the path before these functions of `os` touch a file of the run, in the time of the
        disturbance."""
        for name in names:
            original = getattr(os, name)

            def touch(file: Any, *args: Any, _original: Callable[..., Any] = original, **options: Any) -> Any:
                where = options.get("dir_fd")
                number = file if isinstance(file, int) else where
                path = "" if number is None else os.readlink(f"/proc/self/fd/{number}")
                path = path if isinstance(file, int) else os.path.join(path, os.fspath(file))
                if due() and path.startswith(str(folder)):
                    act(path)
                return _original(file, *args, **options)

            setattr(os, name, touch)

    def fail(path: str) -> None:
        number = getattr(errno, disturbed.kind)
        raise OSError(number, os.strerror(number), path)

    def keep(path: str) -> None:
        if "step_" in path:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    if disturbed.kind in ("EIO", "ENOSPC", "EROFS"):
        on_files(("fsync", "replace", "rename", "mkdir"), fail)
    if disturbed.kind == "undeletable":
        on_files(("unlink", "rmdir"), keep)
    if disturbed.kind == "slow disk":
        on_files(("fsync", "replace", "rename", "unlink"), lambda path: time.sleep(0.3))
    if disturbed.kind == "tracker":
        Flaky.is_down = staticmethod(due)
    if disturbed.kind == "NaN":
        break_a_weight(due)
    if disturbed.kind == "clock":
        time.time = lambda: clock() + (-86400.0 if due() else 86400.0)
    if disturbed.kind in ("slow store", "lost object"):
        LocalStore.fetch_many = fetch_many  # type: ignore[method-assign]


def break_a_weight(due: Callable[[], bool]) -> None:
    """Let the next update in the time of the disturbance leave a weight that is NaN."""
    from grpo_mcore.parallel.policy import Policy

    look = Policy.check_state

    def check_state(self: Policy, when: str, **options: Any) -> None:
        if due() and when.startswith("after an update"):
            next(iter(self.chunks[0].parameters())).data.view(-1)[0] = float("nan")
        look(self, when, **options)

    Policy.check_state = check_state  # type: ignore[method-assign]


def check(folder: Path, disturbed: Disturbance, code: int, steps: int = STEPS) -> int:
    """Assert that the exit code tells the truth, and that the ledger has no flaw. Return the step of the newest
    checkpoint. `steps`: the planned end."""
    assert code in (0, *disturbed.codes), f"exit code {code} after {disturbed}"
    checkpoints = folder / "checkpoints"
    newest = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(checkpoints))).latest()
    saved = int(newest.name.removeprefix("step_")) if newest else 0
    ledger = checkpoints / "ledger.jsonl"
    found = audit(read_ledger(ledger)) if ledger.exists() else None
    trained = found.steps if found else 0
    assert not found or not found.flaws, found
    if code == 0:
        assert saved == steps == trained
    elif code in (75, 143):
        assert saved == trained, f"{code}: step {trained} is trained, step {saved} is saved"
    elif code == 73:
        assert saved < trained
    elif disturbed.kind in FULL:
        assert not found, "only a run that has not begun may end because files cannot be written"
    assert code in (-9, 130) or disturbed.kind in (*FULL, "undeletable") or not list(checkpoints.glob("tmp_*"))
    return saved


def outcome(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step that do not depend on the clock. A run that ended before its first checkpoint
    has begun again in a new folder."""
    rows = read_metrics(max((folder / "logs").glob("exp_*/metrics.jsonl")), "train")
    return [{name: value for name, value in row.items() if not name.startswith(TIME_DEPENDENT)} for row in rows]


@contextmanager
def small_disk(folder: Path, wanted: bool) -> Iterator[None]:
    """Mount a disk of DISK_MB at `folder` if it is `wanted`."""
    folder.mkdir(parents=True)
    if not wanted:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    try:
        with small_disk(folder, wanted=True):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def campaign(task: Task, model: Path, out: Path, seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, int]:
    """Run all seeds. Return how often each kind ended with each code. Raises AssertionError for the first
    that fails."""
    preload()
    recipe = grpo_recipe(task, model)
    recipe["grpo"]["max_num_steps"] = STEPS
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None, "keep_top_k": 2}
    disk, counts = can_mount(out / "disk"), dict[str, int]()
    began = time.monotonic()
    assert run(out / "calm", recipe, None, "calm") == 0
    ledger, expected = out / "calm" / "checkpoints" / "ledger.jsonl", outcome(out / "calm")
    loop_s = max(ledger.stat().st_mtime - read_ledger(ledger)[0]["time"], 1.0)
    start_s = time.monotonic() - began - loop_s
    for seed in seeds:
        disturbed, folder = disturbance(seed, start_s, loop_s, disk), out / f"seed_{seed}"
        recipe["checkpointing"]["is_async"] = seed % 3 == 0
        recipe["logger"] = {"num_val_samples_to_print": 1}
        if disturbed.kind == "tracker":
            recipe["logger"]["own"] = [{"path": "tests.chaos.trackers:Flaky"}]
        with small_disk(folder, wanted=disturbed.kind == "disk"):
            code = run(folder, recipe, disturbed, "disturbed")
            where = "loop" if disturbed.in_loop else "start"
            say(f"seed {seed}: {disturbed.kind} after {disturbed.at_s:.2f} s of the {where}: {code}")
            check(folder, disturbed, code)
            if code:
                resumed = run(folder, recipe, None, "resumed", "--resume=auto")
                assert resumed == 0, f"seed {seed}: the resumed run ended with {resumed}"
                check(folder, disturbed, 0)
            assert outcome(folder) == expected, f"seed {seed}: other numbers than an undisturbed run"
        counts[f"{disturbed.kind}: {code}"] = counts.get(f"{disturbed.kind}: {code}", 0) + 1
    return counts


if __name__ == "__main__":
    task_folder, model_folder, out_folder = map(Path, sys.argv[1:4])
    seeds = [int(word) for word in sys.argv[4:]]
    found = campaign(Task(task_folder), model_folder, out_folder, seeds, lambda text: print(text, flush=True))
    print(json.dumps(dict(sorted(found.items()))))
