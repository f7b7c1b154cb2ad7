"""The rules of the house that a reader relies on: imports go down only, rooms know only their own libraries. Read from
the source, so that a broken rule is found without running anything."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.checkout import PACKAGE, ROOT, python_files

PURE = {"rollout", "recipe", "observe", "batching", "objective", "families", "layout"}
WORKSHOPS = {"generation", "environments", "cluster", "data", "refit", "parallel"}
FLOOR = dict.fromkeys(PURE, 1) | dict.fromkeys(WORKSHOPS, 2) | {"algorithms": 3, "tools": 3, "cli": 4}

# What each room must not know. A prefix of the imported name.
FORBIDDEN = {
    "recipe": {"torch", "numpy", "transformers", "ray", "megatron", "vllm"},
    "rollout": {"ray", "megatron", "vllm"},
    "observe": {"ray", "megatron", "vllm"},
    "batching": {"ray", "megatron", "vllm", "torch.distributed"},
    "objective": {"ray", "megatron", "vllm"},
    "families": {"ray", "megatron", "vllm", "torch.distributed"},
    "layout": {"torch", "numpy", "ray", "megatron", "vllm"},
    "generation": {"megatron", "ray"},
    "environments": {"megatron", "vllm"},
    "cluster": {"megatron", "vllm", "transformers"},
    "data": {"torch.distributed", "megatron", "vllm", "ray"},
    "refit": {"megatron", "ray"},
    "parallel": {"vllm", "ray"},
    "tools/launch": {"torch", "ray", "megatron", "vllm", "transformers"},  # it writes text, often on a laptop
    "algorithms": {"ray", "torch.cuda"},
}


def room_of(file: Path) -> str:
    """The room a file lives in; "" for files directly in the package."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@cache
def imports(file: Path) -> tuple[tuple[int, str], ...]:
    """(line, full dotted name) of everything the file imports, wherever in the file."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{name.name}") for name in node.names)


def rooms_known_to(file: Path) -> Iterator[tuple[int, str]]:
    for line, name in imports(file):
        parts = name.split(".")
        if parts[0] == "grpo_mcore" and len(parts) > 1 and parts[1] in FLOOR and parts[1] != room_of(file):
            yield line, parts[1]


def is_quick(module: str, rooms: tuple[str, ...]) -> bool:
    """Whether a module is of the standard library or of one of the rooms."""
    return module.split(".")[0] in sys.stdlib_module_names or module.startswith(rooms)


def report(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


def test_every_room_is_on_the_plan() -> None:
    rooms = {room_of(file) for file in python_files("grpo_mcore")} - {""}
    assert rooms <= set(FLOOR)


def test_imports_go_down() -> None:
    findings = []
    for file in python_files("grpo_mcore"):
        room = room_of(file)
        for line, other in rooms_known_to(file):
            allowed = FLOOR[other] == FLOOR.get(room) == 1 or (room, other) == ("tools", "algorithms")
            if room and FLOOR[other] >= FLOOR[room] and not allowed:
                findings.append(f"{file.relative_to(ROOT)}:{line}: {room} imports {other}")
    report(findings)


def test_pure_rooms_do_not_import_each_other_in_a_circle() -> None:
    knows: dict[str, set[str]] = {room: set() for room in PURE}
    for file in python_files("grpo_mcore"):
        if room_of(file) in PURE:
            knows[room_of(file)] |= {other for _, other in rooms_known_to(file)}
    assert knows["recipe"] <= {"layout", "families"}, "recipe knows how ranks are laid out, and no other room"
    assert knows["layout"] <= {"families"}
    assert not knows["families"], "families imports nothing of the package"
    while leaves := [room for room, others in knows.items() if not others & knows.keys()]:
        for room in leaves:
            del knows[room]
    assert not knows, f"a circle among {sorted(knows)}"


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_a_room_knows_only_its_own_libraries(room: str) -> None:
    findings = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in python_files(f"grpo_mcore/{room}")
        for line, name in imports(file)
        if any(name == prefix or name.startswith(prefix + ".") for prefix in FORBIDDEN[room])
    ]
    report(findings)


def test_workers_are_called_by_methods_of_their_class() -> None:
    """By a name as a string neither a reader nor mypy gets from the call to the code: see `remote_call`."""
    findings = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in python_files(*(f"grpo_mcore/{room}" for room in ("algorithms", "tools", "refit", "generation")))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("call", "stream")
        and node.args and isinstance(node.args[0], ast.Constant)
    ]  # fmt: skip
    report(findings)


TWO_OF_A_NAME = {
    "Refit": "a refit, and the schedule's command, which is written s.Refit",
    "Worker": "the interface, and a process of the sandbox, whose files know nothing of the package",
    "Block": "a kind of layer, and a slice that a refit sends",
    "Comparison": "of a run with its plan: what the report needs of it, and plan's own",
    "Node": "of a YAML file, and of the virtual cluster",
    "Verdict": "of the command, and of a verifier",
    "Outcome": "of a turn, and of a simulated run",
}
"""Names that two public classes have, and what they are."""


def test_a_name_belongs_to_one_class() -> None:
    """A reader who looks a class up finds the right one."""
    places: dict[str, list[str]] = {}
    for file in python_files("grpo_mcore"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    report([f"{name}: {', '.join(files)}" for name, files in twice.items() if name not in TWO_OF_A_NAME])
    assert TWO_OF_A_NAME.keys() <= twice.keys(), f"one of a name: {sorted(TWO_OF_A_NAME.keys() - twice.keys())}"


OTHER_TIME = {
    "driver/checkpoints/lease.py": "tells people on other machines since when it holds a folder",
    "observe/trackers/tracker.py": "a thread that talks to a service outside",
    "observe/trackers/backends.py": "values for that service",
}
"""Files of the driver's rooms that need the machine's time, and why."""


def test_the_driver_has_one_clock() -> None:
    """Whatever else tells the time, sleeps or starts threads would not follow a virtual clock."""
    driver = [*python_files(*(f"grpo_mcore/{room}" for room in ("algorithms", "rollout", "observe")))]
    driver += [PACKAGE / "cluster" / "gather.py", PACKAGE / "refit" / "refit.py"]
    others = [PACKAGE / name for name in OTHER_TIME]
    modules = "time", "datetime", "sched", "asyncio"
    report([
        f"{file.relative_to(ROOT)}:{line}: {name}; take it from the cluster's clock (clock.py)"
        for file in driver if file not in others
        for line, name in imports(file)
        if name.split(".")[0] in modules or name.endswith("ThreadPoolExecutor")
    ])  # fmt: skip
    idle = [file.name for file in others if "time" not in {name for _, name in imports(file)}]
    assert not idle, f"exceptions that nobody needs: {idle}"


def test_commands_import_inside_the_verb() -> None:
    """`grpo-mcore --help` must not wait for torch. The recipe room does without."""
    quick = (
        "grpo_mcore.cli",
        "grpo_mcore.base.garbage",
        "grpo_mcore.observe",
        "grpo_mcore.recipe",
        "grpo_mcore.base.text",
        "grpo_mcore.observe.console.console_stream",
    )
    findings = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in python_files("grpo_mcore/cli")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module and not is_quick(node.module, quick)
    ]
    report(findings)


WITHOUT_TEXT = ("os", "gzip", "checkpointer", "self", "self._sandboxes", "self._client")
"""Objects whose `open` opens no text."""


def test_texts_are_utf_8_in_every_locale() -> None:
    """Without an encoding a text is read and written as the machine's locale has it, and another machine reads it."""
    report([
        f'{file.relative_to(ROOT)}:{node.lineno}: give encoding="utf-8"'
        for file in python_files("grpo_mcore")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _is_text(node) and "encoding" not in {word.arg for word in node.keywords}
    ])  # fmt: skip


def _is_text(call: ast.Call) -> bool:
    """Return whether the call opens, reads or writes a text."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    if name in ("read_text", "write_text"):
        return True
    given = [*call.args, *(word.value for word in call.keywords)]
    modes = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    binary = any("b" in mode and set(mode) <= set("rwaxbt+") for mode in modes)
    return name in ("open", "fdopen") and not binary and (owner not in WITHOUT_TEXT or name == "fdopen")


def test_modules_say_what_lives_there() -> None:
    findings = [
        str(file.relative_to(ROOT))
        for file in python_files("grpo_mcore")
        if file.read_text().strip() and not ast.get_docstring(ast.parse(file.read_text()))
    ]
    report(findings)


def test_megatron_is_prepared_before_it_is_imported() -> None:
    """Else a CPU process has its fused kernels compiled: each rank, and each test that shares the process."""
    importers = {file.stem for file in python_files("grpo_mcore/parallel") if _loads(file, {"megatron"})}
    names = {f"grpo_mcore.parallel.{stem}" for stem in importers}
    assert "grpo_mcore.parallel.model" in names
    for file in python_files("grpo_mcore", "tests", "benchmarks", "examples"):
        if file.parent.name == "parallel" and file.is_relative_to(PACKAGE):
            continue  # policy.py imports them when a mesh is joined
        assert not _loads(file, {"megatron"} | names), f"{file} imports Megatron-Core before prepare_megatron"


def _loads(file: Path, names: set[str]) -> bool:
    """Return whether importing the file imports one of these, before it calls `prepare_megatron`."""
    for node in ast.parse(file.read_text(), str(file)).body:
        if isinstance(node, ast.Expr) and "prepare_megatron(" in ast.unparse(node):
            return False
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if isinstance(node, ast.ImportFrom):
            modules += [f"{module}.{alias.name}" for module in modules for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        if any(module == name or module.startswith(f"{name}.") for module in modules for name in names):
            return True
    return False


def test_folders_of_tests_are_packages() -> None:
    """Else two test files of one name would be taken for one module."""
    folders = sorted({file.parent for file in python_files("tests")})
    report([str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()])


def test_what_tests_share_is_no_test_itself() -> None:
    """It is a module named by its topic."""
    report(
        [
            f"{file.relative_to(ROOT)}:{line} imports {name}"
            for file in python_files("tests")
            for line, name in imports(file)
            if re.match(r"tests\.(\w+\.)*test_\w+", name)
        ]
    )


def test_no_paths_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|root|home)/\w")
    folders = "grpo_mcore", "tests", "recipes", "docs", "benchmarks", "scripts", "launchers", "requirements"
    files = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".yaml", ".md", ".sh", ".toml", ".lock"}
    ]
    findings = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in [*files, ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    report(findings)
