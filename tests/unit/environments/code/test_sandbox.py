"""Programs that try to get out of the sandbox or to take more than they are given: none does, each ends in its limit
with a reason, and nothing is left running."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mcore.environments.code.sandbox import command as sandbox_command
from grpo_mcore.environments.code.sandbox.sandboxes import BUBBLEWRAP, TRUST, Limits, Sandbox, SandboxError, Sandboxes
from tests.unit.environments.code.sandbox_cases import ATTEMPTS, SECRET, Attempt
from tests.unit.environments.code.sandbox_here import HAS_PROC, needs_sandbox
from tests.waiting import wait_until

pytestmark = pytest.mark.slow  # a sandbox for each attempt

LIMITS = Limits(cpu_s=1.0, wall_s=30.0, memory_gb=0.125, processes=8, output_mb=1.0, scratch_mb=16.0)
SHORT = replace(LIMITS, wall_s=1.0)  # for those who sleep
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    os.environ["A_SECRET"] = SECRET
    maker = Sandboxes(BUBBLEWRAP, LIMITS)
    yield maker
    maker.close()
    del os.environ["A_SECRET"]


@pytest.fixture(scope="module")
def sandbox(sandboxes: Sandboxes) -> Iterator[Sandbox]:
    """Return one sandbox for many programs, as for the tests of an answer."""
    with sandboxes.open() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def short(sandboxes: Sandboxes) -> Iterator[Sandbox]:
    with Sandboxes(BUBBLEWRAP, SHORT).open() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Things outside to reach: a file, a TCP port, an abstract Unix socket, a process."""
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.write_text(SECRET)
    outside.parent.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        abstract = f"\0grpo-mcore-test-{os.getpid()}"
        unix.bind(abstract)
        unix.listen()
        yield {"PORT": tcp.getsockname()[1], "ABSTRACT": abstract, "OUTSIDE": str(outside), "PARENT": os.getpid()}
    assert sorted(outside.parent.iterdir()) == [outside] and outside.read_text() == SECRET


@needs_sandbox
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name.replace(" ", "-"))
def test_an_attempt(attempt: Attempt, sandbox: Sandbox, short: Sandbox, facts: dict[str, object]) -> None:
    if attempt.needs_proc and not HAS_PROC:
        pytest.skip("a sandbox may not have a /proc of its own here")
    sandbox, limits = (short, SHORT) if attempt.how == "wall" else (sandbox, LIMITS)
    ended = sandbox.run(attempt.source(**facts))
    trouble = ended.trouble(limits) or ""
    assert attempt.ended_well(ended, trouble), (ended, trouble)
    assert sandbox.run("import os\nprint(os.listdir())").stdout == "[]\n"
    assert len(inside(sandbox)) == 1  # the worker, as seen from here


def test_there_are_enough_attempts() -> None:
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS) >= 25


def inside(sandbox: Sandbox) -> list[psutil.Process]:
    assert sandbox._process is not None
    return psutil.Process(sandbox._process.pid).children(recursive=True)


@needs_sandbox
def test_a_program_does_what_programs_do(sandbox: Sandbox) -> None:
    """The program reads its input in all usual ways, uses threads, processes, files, the whole library, and exits."""
    for reading in (
        "input()",
        "sys.stdin.readline().strip()",
        "open(0).read().strip()",
        "open('/dev/stdin').read().strip()",
        "io.BytesIO(os.read(0, os.fstat(0).st_size)).readline().decode().strip()",  # usual on Codeforces
        "mmap.mmap(0, 0, access=mmap.ACCESS_READ).readline().decode().strip()",
    ):
        assert sandbox.run(f"import io, mmap, os, sys\nprint({reading} * 2)", "ab\n").stdout == "abab\n", reading
    modules = "asyncio, bz2, ctypes, decimal, fractions, hashlib, heapq, json, lzma, multiprocessing, re, sqlite3, ssl"
    ended = sandbox.run(
        f"""
import {modules}, threading, atexit, os, sys, tempfile, dataclasses
@dataclasses.dataclass
class Point:
    x: int
atexit.register(print, "end")
async def five(): return 5
with tempfile.TemporaryFile("w+") as file:
    file.write("file")
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]), asyncio.run(five()), Point(3), __name__)
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
sys.setrecursionlimit(10**6)
def depth(n): return n and 1 + depth(n - 1)
print(depth(20000))
exit(7)
"""
    )
    assert ended.stdout == "[1, 2] 5 Point(x=3) __main__\nthread\n20000\nend\n", ended
    assert (ended.how, ended.code, ended.trouble(LIMITS)) == ("exit", 7, "exit code 7")


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "code", "trouble"),
    [
        ("raise ValueError('one\\ntwo')", 1, "crashed: two"),
        ("import sys; sys.exit('no')", 1, "crashed: no"),
        ("import sys; sys.exit(3)", 3, "exit code 3"),
        ("import os; os.abort()", -6, "was ended by SIGABRT"),
        ("a b", 1, "crashed: SyntaxError: invalid syntax"),
        ("import os; os.kill(os.getpid(), 40)", -40, "was ended by signal 40"),
        ("print('\\ud800')", 1, "crashed: UnicodeEncodeError"),
        ("\ud800", 1, "crashed: "),
        ("a\0b", 1, "crashed: "),
        ("import sys; sys.stdout.close()", 0, None),
        ("import sys; sys.stdout = None", 0, None),
    ],
)
def test_how_a_program_ends(sandbox: Sandbox, program: str, code: int, trouble: str | None) -> None:
    ended = sandbox.run(program)
    assert ended.code == code
    assert (ended.trouble(LIMITS) or "").startswith(trouble or "") and bool(trouble) == bool(ended.trouble(LIMITS))


@needs_sandbox
def test_input_of_any_size_read_or_not(sandbox: Sandbox) -> None:
    text = "0123456789\n" * 2_000_000  # 22 MB
    assert sandbox.run("print('unread')", text).stdout == "unread\n"
    reading = "import sys\nprint(sum(len(line) for line in sys.stdin))"
    assert sandbox.run(reading, text).stdout == "22000000\n"
    with Sandboxes(BUBBLEWRAP, replace(LIMITS, scratch_mb=1.0)).open() as small:
        assert small.run(reading, text).stdout == "22000000\n"  # more than the files that it may have
    assert sandbox.run("print('x' * 10**6, end='')").stdout == "x" * 10**6


@needs_sandbox
def test_tests_after_the_program(sandbox: Sandbox) -> None:
    program = "def f(a, b=1): return [a + b, None]\nif __name__ == '__main__': input()"
    assert sandbox.run(program, check={"call": "f", "args": [1]}).result == {"value": [2, None]}
    assert sandbox.run(
        f"class Solution:\n  @staticmethod\n  {program}", check={"call": "f", "args": [1, 2]}
    ).result == {"value": [3, None]}
    assert sandbox.run(program, check={"assert": "assert f(1)[0] == 2"}).result == {"passed": True}
    failed = sandbox.run(program, check={"assert": "assert f(1)[0] == 3"})
    assert failed.result is None and failed.trouble(LIMITS) == "crashed: AssertionError"
    missing = sandbox.run(program, check={"call": "g", "args": []})
    assert missing.result is None and missing.trouble(LIMITS) == "crashed: NameError: name 'g' is not defined"


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os.write(3, b'{\"passed\": true}'); os._exit(0)",
        'import os; os.write(3, b\'{"passed": ""}\')',
        "import os; os.write(3, b'[' * 100000); os._exit(0)",
        "print('{\"passed\": true}')",
    ],
)
def test_a_program_that_ends_before_its_test_has_not_passed(sandbox: Sandbox, program: str) -> None:
    assert sandbox.run(program, check={"assert": "assert False"}).result is None


@needs_sandbox
def test_one_program_does_not_meet_another(sandbox: Sandbox) -> None:
    sandbox.run("open('left', 'w').write('x'); import builtins; builtins.print = None; import json; json.dumps = None")
    ended = sandbox.run("import os, json; print(os.path.exists('left'), json.dumps(1))")
    assert ended.stdout == "False 1\n"


@needs_sandbox
def test_many_sandboxes_at_a_time(sandboxes: Sandboxes) -> None:
    answers: dict[int, str] = {}

    def one(number: int) -> None:
        with sandboxes.open() as sandbox:
            answers[number] = sandbox.run("import threading, os; print(int(input()) ** 2)", f"{number}\n").stdout

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(one, range(12)))
    assert answers == {number: f"{number**2}\n" for number in range(12)}


@needs_sandbox
def test_nothing_is_left_when_a_sandbox_is_closed(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.open()
    sandbox.run("print()")
    processes = [psutil.Process(sandbox._process.pid), *inside(sandbox)]  # type: ignore[union-attr]
    sandbox.close()
    assert not psutil.wait_procs(processes, timeout=60)[1]


@needs_sandbox
def test_a_sandbox_that_is_killed_is_made_anew(sandboxes: Sandboxes) -> None:
    with sandboxes.open() as sandbox:
        sandbox.run("print()")
        sandbox._process.kill()  # type: ignore[union-attr]
        assert sandbox.run("print(5)").stdout == "5\n"


@needs_sandbox
def test_sandboxes_that_are_closed_end_what_runs() -> None:
    maker = Sandboxes(BUBBLEWRAP, Limits(wall_s=60))
    with maker.open() as sandbox:
        sandbox.run("print()")
        threading.Timer(0.3, maker.close).start()
        with pytest.raises(SandboxError, match="closed"):
            sandbox.run("import time; time.sleep(60)")


@needs_sandbox
def test_a_sandbox_does_not_outlive_its_parent() -> None:
    program = (
        "from grpo_mcore.environments.code.sandbox.sandboxes import *\n"
        "sandbox = Sandboxes(BUBBLEWRAP, Limits(wall_s=60)).open()\n"
        "sandbox.run('print()')\n"
        "print(sandbox._process.pid, flush=True)\n"
        "sandbox.run('import time; time.sleep(60)')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    bubblewrap = psutil.Process(int(parent.stdout.readline()))
    wait_until(lambda: len(bubblewrap.children(recursive=True)) >= 2, "the worker and the program")
    processes = [bubblewrap, *bubblewrap.children(recursive=True)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not psutil.wait_procs(processes, timeout=60)[1]


@pytest.mark.slow
@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="runs as another user, which only root can start")
def test_it_holds_for_an_ordinary_user_too(tmp_path: Path, facts: dict[str, object]) -> None:
    """Programs then run as the worker's own user, in a user namespace."""
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("there is no Python of the system, and this one may be root's alone")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o001:
            break
        folder.chmod(0o755)
    names = ("sandboxes", "command", "program", "worker", "seccomp")
    for name in names:
        shutil.copy(ROOT / f"grpo_mcore/environments/code/sandbox/{name}.py", tmp_path)
        text = (tmp_path / f"{name}.py").read_text().replace("from grpo_mcore.environments.code.sandbox.", "from ")
        (tmp_path / f"{name}.py").write_text(text)
    shutil.copy(ROOT / "tests/unit/environments/code/sandbox_cases.py", tmp_path)
    (tmp_path / "main.py").write_text(
        "import sys, sandboxes, sandbox_cases as cases\n"
        f"maker = sandboxes.Sandboxes(sandboxes.BUBBLEWRAP, sandboxes.{LIMITS!r})\n"
        "with maker.open() as box:\n"
        "    for attempt in cases.ATTEMPTS:\n"
        "        if attempt.how == 'wall' or attempt.needs_proc and not maker.proc: continue\n"
        f"        ended = box.run(attempt.source(**{facts!r}))\n"
        "        trouble = ended.trouble(maker.limits) or ''\n"
        "        if not attempt.ended_well(ended, trouble): print(attempt.name, ended, trouble)\n"
        "print('all tried')\n"
    )
    done = subprocess.run(
        [python, "main.py"], cwd=tmp_path, user=61_234, group=61_234, extra_groups=[], env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    if "user namespaces must be allowed" in done.stderr:
        pytest.skip("ordinary users may not make namespaces here")
    assert done.stdout == "all tried\n", (done.stdout, done.stderr)


@pytest.mark.slow
@needs_sandbox
@pytest.mark.every_state  # all attempts once more
def test_it_holds_without_a_proc_of_its_own(monkeypatch: pytest.MonkeyPatch, facts: dict[str, object]) -> None:
    """Some containers forbid a new /proc. Only the limits over several processes need one."""
    whole = sandbox_command.sandboxed

    def without(*arguments: Any, proc: bool) -> sandbox_command.Start:
        start = whole(*arguments, proc=proc)
        refused = ("/bin/sh", "-c", "echo 'bwrap: Can not mount proc' >&2; exit 1")
        return replace(start, command=refused) if proc else start

    monkeypatch.setattr("grpo_mcore.environments.code.sandbox.sandboxes.sandboxed", without)
    maker = Sandboxes(BUBBLEWRAP, replace(SHORT, wall_s=3.0))
    assert not maker.proc
    with maker.open() as sandbox:
        for attempt in ATTEMPTS:
            if not attempt.needs_proc and attempt.how != "wall":
                ended = sandbox.run(attempt.source(**facts))
                late = bool(attempt.reason) and ended.how == "wall"  # the time of several processes is not added up
                assert late or attempt.ended_well(ended, ended.trouble(maker.limits) or ""), (attempt.name, ended)
        assert sandbox.run("import time; time.sleep(60)").how == "wall"
        assert len(inside(sandbox)) == 1


def test_a_machine_without_bubblewrap_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_command.shutil, "which", lambda _: None)
    with pytest.raises(SandboxError, match=r"bubblewrap \(bwrap\) is not installed.*apt-get install bubblewrap"):
        Sandboxes(BUBBLEWRAP, LIMITS)


def test_a_bubblewrap_that_may_not_make_namespaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sandbox_command.shutil, "which", lambda _: str(script))
    with pytest.raises(SandboxError, match=r"(?s)No permissions to create new namespace.*user\.max_user_namespaces"):
        Sandboxes(BUBBLEWRAP, LIMITS)


@needs_sandbox
@pytest.mark.parametrize("hole", ["sockets", "files", "packages"])
def test_a_sandbox_with_a_hole_is_refused(hole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial at the start finds a leak that a change of the command line, or another bubblewrap, would open."""
    whole = sandbox_command.sandboxed

    def with_hole(*arguments: object, **keywords: object) -> sandbox_command.Start:
        start = whole(*arguments, **keywords)  # type: ignore[arg-type]
        command = list(start.command)
        if hole == "files":
            command[1:1] = ["--perms", "0755", "--dir", "/etc", "--ro-bind", "/etc/passwd", "/etc/passwd"]
        elif hole == "packages":
            place = command.index("/worker.py") + 1
            (tmp_path / "pydantic.py").touch(0o644)
            command[place:place] = ["--ro-bind", str(tmp_path / "pydantic.py"), "/pydantic.py"]
            command[place:place] = ["--setenv", "PYTHONPATH", "/"]
        else:
            place = command.index("--seccomp")
            del command[place : place + 2]
        return sandbox_command.Start(tuple(command), start.environment, start.folder, start.uid)

    monkeypatch.setattr("grpo_mcore.environments.code.sandbox.sandboxes.sandboxed", with_hole)
    with pytest.raises(SandboxError, match="the sandbox leaks: it "):
        Sandboxes(BUBBLEWRAP, LIMITS)


@pytest.fixture(scope="module")
def trusting() -> Iterator[Sandbox]:
    with Sandboxes(TRUST, replace(SHORT, cpu_s=0.2)).open() as sandbox:
        yield sandbox


class TestTrust:
    """Without a sandbox only the limits hold."""

    @pytest.mark.parametrize(
        ("program", "how"),
        [
            ("while True: pass", "cpu"),
            ("import time; time.sleep(60)", "wall"),
            ("import os\nwhile True: os.write(1, b'x' * 10**6)", "output"),
        ],
    )
    def test_limits(self, trusting: Sandbox, program: str, how: str) -> None:
        assert trusting.run(program).how == how

    def test_a_daemon_is_ended_with_its_program(self, trusting: Sandbox) -> None:
        ended = trusting.run(
            "import os, time\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0: time.sleep(60)\n"
            "    os._exit(0)\n"
            "os.wait(); print('done')"
        )
        assert ended.stdout == "done\n"
        assert not inside(trusting)

    def test_its_folder_is_its_own_and_goes(self) -> None:
        with Sandboxes(TRUST, LIMITS).open() as sandbox:
            folder = sandbox.run("import os; open('x', 'w'); print(os.getcwd())").stdout.strip()
            assert os.path.isdir(folder)
        assert not os.path.exists(folder)
