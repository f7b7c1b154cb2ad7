"""No library is patched, and no private name of one is read, outside the files that say why (law 6)."""

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.checkout import PACKAGE, python_files

CPU_PLUG_INS = {
    "parallel/cpu_platform.py": "Megatron-Core and torch without a GPU",
    "generation/cpu_kernels.py": "kernels that vLLM's CPU build lacks",
    "generation/cpu_experts.py": "experts with adapters that vLLM's CPU build lacks",
    "generation/cpu_quantized.py": "FP8 layers that vLLM's CPU build lacks",
}
"""Files that patch libraries. Nothing in them happens on a GPU."""

READS = {
    "base/torch_profile.py": ({"_ExperimentalConfig"}, "torch's documented type of the profiler's option for threads"),
    "cluster/inspection.py":
        ({"_distributed_c10d", "_world"},
         "which collectives a rank has entered: torch's flight recorder has no public name"),
    "cluster/ray_session.py":
        ({"_raylet"}, "whether a node lives, with a deadline: Ray's public calls have none, or need its dashboard"),
    "parallel/divergence.py": ({"_assert_async"}, "torch's only assertion that does not wait for the GPU"),
    "parallel/finite.py": ({"_foreach_norm"}, "torch documents its operations on lists under such names"),
    "parallel/mesh.py": ({"_internal"}, "torch's group without other ranks, for a rank that is only traced"),
    "refit/transport/network.py": ({"_Options"}, "torch's only options of a Gloo group"),
    "tools/plan/counting.py":
        ({"_subclasses", "_python_dispatch", "_pytree", "_local_scalar_dense"},
         "torch's documented fake tensors and modes live there; the last is an operator's name"),
    "tools/plan/trace.py": ({"_subclasses"}, "torch's documented fake tensors live there"),
}  # fmt: skip
"""Files that read private names of a library: which, and why there is no public way."""

PENDING = {
    "parallel/weights/checkpoint.py": "Megatron-Core's queue of written files: its own has a manager process a rank"
}
"""Files that still patch a library, to be deleted from here with their patches."""


def modules_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name in the file, dotted path) of what an import statement brings from other packages."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def is_library(path: str) -> bool:
    top = path.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("grpo_mcore", "tests")


def dotted(node: ast.AST) -> str | None:
    """Return a.b.c for an attribute of an attribute of a name; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return None


def library_names(nodes: list[ast.AST]) -> set[str]:
    """Return the names by which a file knows parts of libraries: from imports, and `name = part` of one."""
    names = {name for node in nodes for name, path in modules_of(node) if is_library(path)}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            path = dotted(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if path and path.partition(".")[0] in names:
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def patches_and_private_reads(source: str) -> tuple[set[str], set[str]]:
    """Return, of libraries: the attributes that are set or deleted, or the objects whose attributes are; and the
    private modules, classes and functions that are imported or read."""
    nodes = list(ast.walk(ast.parse(source)))
    names = library_names(nodes)
    changed = set[str | None]()
    read = {path for node in nodes for _, path in modules_of(node) if is_library(path)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            path = dotted(node)
            if path and path.partition(".")[0] in names:
                read.add(path)
                if isinstance(node.ctx, ast.Store | ast.Del):
                    changed.add(path)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
            changed.add(dotted(node.args[0]))
    return (
        {path for path in changed if path and path.partition(".")[0] in names},
        {path for path in read if any(map(is_private, path.split(".")))},
    )


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@pytest.fixture(scope="module")
def package() -> dict[str, tuple[set[str], set[str]]]:
    """What `patches_and_private_reads` finds, by file."""
    files = {file.relative_to(PACKAGE).as_posix(): file for file in python_files("grpo_mcore")}
    return {name: patches_and_private_reads(file.read_text()) for name, file in files.items()}


def test_no_library_is_patched(package: dict[str, tuple[set[str], set[str]]]) -> None:
    patched = {name: patches for name, (patches, _) in package.items() if patches and name not in CPU_PLUG_INS}
    assert patched.keys() == PENDING.keys(), patched


def test_no_private_name_of_a_library_is_read(package: dict[str, tuple[set[str], set[str]]]) -> None:
    for name in sorted(package.keys() - CPU_PLUG_INS.keys() - PENDING.keys()):
        allowed, reads = READS.get(name, (set(), ""))[0], package[name][1]
        # Within a private module every name is one.
        wrong = {path for path in reads if not allowed.intersection(path.split("."))}
        assert not wrong, f"{name} reads {wrong}"
        unused = {part for part in allowed if not any(part in path.split(".") for path in reads)}
        assert not unused, f"{name} does not read {unused}: delete them here"


@pytest.mark.parametrize(
    ("source", "set_there", "read_there"),
    [
        ("import torch\ntorch.compile = None", {"torch.compile"}, set()),
        ("import torch as t\nt.Tensor.cuda, x = 1, 2", {"t.Tensor.cuda"}, set()),
        ("from vllm import envs\nsetattr(envs, name, 1)", {"envs"}, set()),
        ("import ray\nkind = ray.actor.Actor\ndel kind.call", {"kind.call"}, set()),
        ("import torch\nx = torch._C.x", set(), {"torch._C", "torch._C.x"}),
        ("from ray._private import services", set(), {"ray._private.services"}),
        ("from torch import _dynamo as d", set(), {"torch._dynamo"}),
        ("import sys, torch\nsys._getframe()\ntorch.__version__\nself._x = torch.zeros(1)._x", set(), set()),
    ],
)
def test_patches_and_reads_are_found(source: str, set_there: set[str], read_there: set[str]) -> None:
    assert patches_and_private_reads(source) == (set_there, read_there)
