"""A program's process in the sandbox: sets the limits, runs the program and its test, and ends. worker.py, in the
same folder, loads it; it uses nothing of this package, only Python's standard library."""

import atexit
import contextlib
import ctypes
import json
import linecache
import math
import os
import random
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import KeysView, Mapping
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
RESULT, CHECK = 3, 4  # file descriptors of a program's process, besides the standard ones
ALL_DESCRIPTORS = 2**20
MAX_DIGITS = 50_000  # of an integer that is printed or read: as LiveCodeBench has it; Python's own limit is 4,300
prctl = ctypes.CDLL(None).prctl


def be_program(job: dict[str, Any], ends: dict[int, int], isolated: bool, uid: int) -> NoReturn:
    """Turn this process into the program's. `ends`: file descriptor -> the pipe's end that it becomes; `isolated`,
    `uid`: see worker.py."""
    for fd, end in ends.items():
        os.dup2(end, fd)
    os.closerange(CHECK + 1, ALL_DESCRIPTORS)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    set_limits(job["limits"])
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own /proc/self, and with it /dev/stdin, is closed to it
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as adjust:
        adjust.write("1000")  # killed first when the machine itself runs out of memory
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)  # this drops all capabilities too
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    if not isolated:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    random.seed()
    code = 1
    try:
        execute(job)
        code = 0
    except SystemExit as stop:
        code = exit_code(stop)
    except BaseException:
        traceback.print_exc()
    finish(code)


def set_limits(limits: Mapping[str, Any]) -> None:
    whole_s, memory = math.ceil(limits["cpu_s"]), int(limits["memory_gb"] * 2**30)
    scratch = int(limits["scratch_mb"] * 2**20)
    for which, soft, hard in (
        (resource.RLIMIT_CPU, whole_s, whole_s + 1),
        (resource.RLIMIT_DATA, memory, memory),
        (resource.RLIMIT_AS, memory + 2**30, memory + 2**30),  # only here shared and reserved memory counts
        (resource.RLIMIT_STACK, 2**26, 2**26),
        (resource.RLIMIT_FSIZE, scratch, scratch),
        (resource.RLIMIT_NOFILE, 128, 128),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_SIGPENDING, 128, 128),
    ):
        already = resource.getrlimit(which)[1]
        if hard != resource.RLIM_INFINITY and (already == resource.RLIM_INFINITY or hard <= already):
            resource.setrlimit(which, (soft, hard))


def execute(job: dict[str, Any]) -> None:
    """Run the program as a script, or as a module if a test follows."""
    sys.set_int_max_str_digits(MAX_DIGITS)
    module = types.ModuleType("solution" if job["checked"] else "__main__")
    module.__file__ = "solution.py"
    sys.modules[module.__name__] = module
    sys.argv = ["solution.py"]
    sys.path.insert(0, os.getcwd())
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="backslashreplace")  # type: ignore[misc]
    run_source(job["program"], "solution.py", module.__dict__)
    if job["checked"]:
        with open(CHECK, "rb") as end:
            run_test(json.loads(end.read()), module)


def run_test(check: dict[str, Any], module: types.ModuleType) -> None:
    """Run the test and write its result."""
    if "steps" in check:
        result = {"values": evaluate(check["steps"], module), "passed": check["secret"]}
    elif "assert" in check:
        run_source(check["assert"], "test.py", module.__dict__)
        result = {"passed": check["secret"]}
    else:
        in_class = hasattr(getattr(module, "Solution", None), check["call"])
        function = getattr(module.Solution() if in_class else module, check["call"], None)
        if function is None:
            raise NameError(f"name {check['call']!r} is not defined")
        result = {"value": function(*check["args"])}
    text = json.dumps(result).encode()
    while text:
        text = text[os.write(RESULT, text) :]


def evaluate(steps: list[list[str]], module: types.ModuleType) -> list[Any]:
    """Return the values of a test's expressions, which are compared outside; see code/asserts.py."""
    scope, values = module.__dict__, []
    for kind, source, *name in steps:
        if kind == "run":
            run_source(source, "test.py", scope)
        elif kind == "scope":
            scope = {**scope, name[0]: eval(source, scope)}
        else:
            value = eval(source, scope)
            values.append(bool(value) if kind == "truth" else plain(value))
    return values


def plain(value: Any) -> Any:
    """Encode a value as JSON. A kind that JSON does not have becomes {kind: content}."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, set | frozenset | KeysView):
        return {"set": [plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for module, name in (("fractions", "Fraction"), ("decimal", "Decimal")):
        exact = getattr(sys.modules.get(module), name, None)
        if exact is not None and isinstance(value, exact):
            with contextlib.suppress(ValueError, OverflowError):  # NaN, infinity
                return {"ratio": list(value.as_integer_ratio())}
    return {"object": type(value).__name__}


def run_source(source: str, name: str, scope: dict[str, Any]) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec", dont_inherit=True), scope)


def exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def finish(code: int) -> NoReturn:
    """End as an interpreter does: wait for threads, run exit functions, flush buffers."""
    for step in (threading._shutdown, atexit._run_exitfuncs, flush):  # type: ignore[attr-defined]
        try:
            step()
        except SystemExit as stop:
            code = exit_code(stop)
        except BaseException:
            traceback.print_exc()
    os._exit(code & 255)


def flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
