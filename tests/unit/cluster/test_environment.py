"""Workers see allowed environment variables only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.cluster import open_cluster
from grpo_mcore.cluster.environment import chosen, is_allowed, only_allowed
from grpo_mcore.cluster.ray_actor import search_last
from grpo_mcore.recipe.schema.cluster import ClusterConfig


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HF_HOME", "LC_ALL", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS"),
        *("HF_HUB_CACHE", "HF_ENDPOINT", "HTTPS_PROXY", "no_proxy", "SSL_CERT_FILE", "VLLM_CACHE_ROOT", "FI_PROVIDER"),
        *("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "RAY_AUTH_TOKEN"),
        *("NVTE_FUSED_ATTN", "TORCH_NCCL_AVOID_RECORD_STREAMS", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_what_workers_need_is_allowed(name):
    assert is_allowed(name)


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_API_KEY", "TORCH_HUB_TOKEN", "TRITON_SECRET", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"),
        *("MY_PATH", "PATHX", "SSH_AUTH_SOCK", "MY_TORCH_HOME"),
    ],
)
def test_secrets_and_strangers_are_not(name):
    assert not is_allowed(name)
    assert is_allowed(name, extra=[name])


def test_more_variables_by_name_and_pattern():
    environ = {"A_ONE": "1", "A_TWO": "2", "B": "3"}
    assert chosen(environ, ["A_*"]) == {"A_ONE": "1", "A_TWO": "2"}
    assert chosen(environ, ["B", "MISSING"]) == {"B": "3"}
    assert chosen(environ, []) == {}


def test_the_rest_is_hidden_inside_only(monkeypatch):
    monkeypatch.setenv("GRPO_TEST_SECRET", "x")
    monkeypatch.setenv("GRPO_TEST_WANTED", "y")
    with pytest.raises(KeyError), only_allowed(["GRPO_TEST_WANTED"]):
        assert "GRPO_TEST_SECRET" not in os.environ
        child = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
        assert "GRPO_TEST_SECRET" not in child and "GRPO_TEST_WANTED=y" in child and "PATH=" in child
        raise KeyError
    assert os.environ["GRPO_TEST_SECRET"] == "x"


def test_variables_are_added_inside_only(monkeypatch):
    monkeypatch.setenv("GRPO_TEST_ONE", "before")
    with only_allowed(added={"GRPO_TEST_ONE": "inside", "GRPO_TEST_TWO": "inside"}):
        assert os.environ["GRPO_TEST_ONE"] == os.environ["GRPO_TEST_TWO"] == "inside"
        os.environ["GRPO_TEST_THREE"] = "stays"
    assert os.environ["GRPO_TEST_ONE"] == "before" and "GRPO_TEST_TWO" not in os.environ
    assert os.environ.pop("GRPO_TEST_THREE") == "stays"


def test_the_room_loads_without_ray_and_torch():
    code = "import sys, grpo_mcore.cluster; sys.exit(any(m in sys.modules for m in ('ray', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_worker_looks_for_modules_in_the_working_directory_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray searches it first: a user's datasets.py was imported in place of the package, and ended the run."""
    monkeypatch.setattr(sys, "path", ["/ray", "/work", "/packages", "/work"])
    monkeypatch.setenv("PYTHONPATH", "/a:/work")
    search_last("/work")
    assert sys.path[1] == "/work", "it is asked for"
    monkeypatch.setenv("PYTHONPATH", "/a")
    search_last("/elsewhere")
    search_last("/work")
    assert sys.path == ["/ray", "/packages", "/work"]


@pytest.mark.parametrize(("asked", "answer"), [(False, "{}"), (True, "py_executable")])
def test_workers_below_uv_run_have_the_environment_of_the_run(tmp_path: Path, asked: bool, answer: str) -> None:
    """Ray would start them by uv, in a copy of the working directory: a run waited for its policy without end."""
    program = """
import grpo_mcore.cluster
from ray._private.worker import _maybe_modify_runtime_env
print(_maybe_modify_runtime_env({}, False))
"""
    (tmp_path / "run").write_text(f"\"{sys.executable}\" -c '{program}'\n")
    variables = os.environ | ({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1"} if asked else {})
    words = ["bash", "-c", "exec -a uv bash run"]  # Ray looks for a parent with these words
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert answer in done.stdout, done.stderr


def test_a_text_of_the_recipe_is_the_drivers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_SHELL", "shell")
    monkeypatch.setenv("OF_THE_RECIPE", "shell")
    config = ClusterConfig(backend="local", env_vars={"OF_THE_SHELL": None, "OF_THE_RECIPE": "recipe"})
    with open_cluster(config, tmp_path):
        assert (os.environ["OF_THE_SHELL"], os.environ["OF_THE_RECIPE"]) == ("shell", "recipe")
