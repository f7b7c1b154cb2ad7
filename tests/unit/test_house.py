"""Rules of the house that a reader relies on, read from the source. Who may import whom is in pyproject.toml
([tool.importlinter])."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.checkout import PACKAGE, ROOT, python_files


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


def is_quick(module: str, rooms: tuple[str, ...]) -> bool:
    """Whether a module is of the standard library or of one of the rooms."""
    return module.split(".")[0] in sys.stdlib_module_names or module.startswith(rooms)


def report(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


CALLERS = "algorithms", "driver", "tools", "refit", "generation"


def test_workers_are_called_by_methods_of_their_class() -> None:
    """By a name as a string neither a reader nor mypy gets from the call to the code: see `remote_call`."""
    findings = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in python_files(*(f"grpo_mcore/{room}" for room in CALLERS))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("call", "stream")
        and node.args and isinstance(node.args[0], ast.Constant)
    ]  # fmt: skip
    report(findings)


TWO_OF_A_NAME = {
    "Refit": "a refit, and the schedule's command, which is written s.Refit",
    "Worker": "the interface, and a process of the sandbox, whose files know nothing of the package",
    "Block": "a kind of layer, and a slice that a refit sends",
    "Node": "of a YAML file, and of the virtual cluster",
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
    "driver/checkpoints/copy_to_url.py": "threads that talk to a store outside",
    "driver/checkpoints/lease.py": "tells people on other machines since when it holds a folder",
    "observe/trackers/tracker.py": "a thread that talks to a service outside",
    "observe/trackers/backends.py": "values for that service",
}
"""Files of the driver's rooms that need the machine's time, and why."""


def test_the_driver_has_one_clock() -> None:
    """Whatever else tells the time, sleeps or starts threads would not follow a virtual clock."""
    driver = [*python_files(*(f"grpo_mcore/{room}" for room in ("algorithms", "driver", "step", "rollout", "observe")))]
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
        "grpo_mcore.base.processes",
        "grpo_mcore.base.stopping",
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


def test_modules_say_what_lives_there() -> None:
    findings = [
        str(file.relative_to(ROOT))
        for file in python_files("grpo_mcore")
        if file.read_text().strip() and not ast.get_docstring(ast.parse(file.read_text()))
    ]
    report(findings)


def test_megatron_is_prepared_before_it_is_imported() -> None:
    """Else a CPU process has its fused kernels compiled: each rank, and each test that shares the process."""
    names = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in python_files("grpo_mcore/parallel")
        if _loads(file, {"megatron"})
    }
    assert "grpo_mcore.parallel.model" in names
    for file in python_files("grpo_mcore", "tests", "benchmarks", "examples"):
        if file.is_relative_to(PACKAGE / "parallel"):
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
