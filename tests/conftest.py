"""Settings of every test: one thread per process, no hub, markers by folder, cheap tests first."""

import functools
import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

gc.disable()  # until all tests are collected: garbage collection is a fifth of the time of every import

# Set before torch is imported. Ranks, engines and Ray share two cores, and more threads would slow them down. The
# processes of ranks and engines inherit these.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)

# Tests send Ctrl-C and SIGHUP. Programs started by nohup or in the background of a shell ignore these, and so do their
# children.
for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)

# Without bytecode files, each of some hundred processes would compile torch, vLLM and Ray again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No deadline: the first example of a test may take long. CI runs the same examples every time.
hypothesis.settings.register_profile("shared machine", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.register_profile("thorough", hypothesis.settings.get_profile("shared machine"))
hypothesis.settings.load_profile("shared machine")

FOLDERS = ("unit", "distributed", "chaos", "functional", "gpu")
"""In the order in which they begin: chaos has one long test, and no worker should be alone with that at the end."""
LONGEST = (
    "test_async_ray.py", "test_train_local.py", "test_sweep.py", "test_engine_layout.py", "test_multi_turn.py",
    "test_verifiers.py", "test_async_local.py", "test_gpu_kit.py", "test_variants.py", "test_ppo.py",
    "test_on_policy_distillation.py",
)  # fmt: skip
"""Files that take longest. They begin first in their folder, so that no worker is alone with one at the end, and in
this order: one of many processes, which mostly wait for each other, and one of a single process in turn."""
FORKED = ("test_engine_layout.py", "test_engine_tied.py", "test_engine_adapters.py", "test_refit_faults.py")
"""Files of tests/functional whose engines have ranks of their own, forked from one process that has imported vLLM."""
HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slurm", action="store_true", help="run the tests on a real Slurm too (minutes)")
    parser.addoption("--chaos", action="store_true", help="run every case: see CONTRIBUTING.md (hours)")
    parser.addoption("--browser", action="store_true", help="walk through the page of a run in headless Chromium too")
    parser.addoption("--registry", action="store_true", help="resolve every extra against the package index too")
    parser.addoption("--nemo-run", action="store_true", help="run the tests with NeMo-Run too (0.5 GB, minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its folder's name, skip GPU tests without a GPU, and run cheap folders first."""
    for item in items:
        item.add_marker(_folder(item))
    no_gpu = any(_folder(item) == "gpu" for item in items) and _why_no_gpu()
    if no_gpu:
        for item in items:
            if _folder(item) == "gpu":
                item.add_marker(pytest.mark.skip(reason=no_gpu))
    options = {
        "slurm": "--slurm",
        "every_state": "--chaos",
        "nemo_run": "--nemo-run",
        "registry": "--registry",
        "browser": "--browser",
    }
    for marker, option in options.items():
        if not config.getoption(option):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=f"takes minutes, or other programs: pytest {option}"))
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (FOLDERS.index(_folder(item)), rank.get(item.path.name, len(rank))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, give each file to one worker, in the order of collection. tests/distributed goes to one worker as a
    whole, because its files share the processes of a mesh, and so do the files of FORKED. A test with a parameter
    `shard-N` goes by itself."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if "[shard-" in nodeid:
                return nodeid
            if file.startswith("tests/distributed/"):
                return "tests/distributed"
            return "forked" if file.startswith("tests/functional/") and file.endswith(FORKED) else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


def _folder(item: pytest.Item) -> str:
    return _folder_of(item.path)


@functools.cache
def _folder_of(path: Path) -> str:
    folder = path.relative_to(HERE).parts[0]
    if folder not in FOLDERS:
        raise pytest.UsageError(f"{path}: tests live in tests/{{{','.join(FOLDERS)}}}")
    return folder


def _why_no_gpu() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    platform = sys.modules.get("grpo_mcore.parallel.cpu_platform")
    if platform is not None and platform.installed():
        return "other tests have prepared this process for the CPU; run tests/gpu alone"
    return None if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude everything that exists now from garbage collection: it lives until the end."""
    from grpo_mcore.base.processes import collect_rarely

    gc.freeze()
    collect_rarely()
    gc.enable()


@pytest.fixture
def package_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The messages of the package's logger, whatever a command of an earlier test has configured."""
    package = logging.getLogger("grpo_mcore")
    monkeypatch.setattr(package, "handlers", [caplog.handler])
    monkeypatch.setattr(package, "propagate", False)
    caplog.set_level(logging.INFO, logger="grpo_mcore")
    return caplog


def end_process_groups() -> bool:
    """End the torch process groups of this process, with what the policy and vLLM know of them. Return whether there
    were any."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return False
    if (state := sys.modules.get("vllm.distributed.parallel_state")) is not None:
        state.destroy_model_parallel()
        state.destroy_distributed_environment()
    if (mesh := sys.modules.get("grpo_mcore.parallel.mesh")) is not None and mesh._members:
        mesh.leave_mesh(whole_process=True)
    elif torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return True


@pytest.fixture(scope="module", autouse=True)
def _a_file_leaves_no_process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a test that failed has left: no policy and no engine of a later file would start in this process."""
    yield
    if end_process_groups():
        warnings.warn(f"{request.node.name} has left a process group of torch, which is ended", stacklevel=1)


@pytest.fixture(autouse=True)
def _each_test_imports_its_own_modules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget the modules that a test imported from its temporary folder, and its places on the path: the next test's
    folder may have a module of the same name, such as the reward.py that several guides write."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    path, modules = sys.path.copy(), set(sys.modules)
    folder = str(request.getfixturevalue("tmp_path"))
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
