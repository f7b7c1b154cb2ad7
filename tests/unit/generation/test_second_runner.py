"""What we assume of vLLM's worker and second model runner on GPU, which cannot run here, compared with their source:
the names that we call, the order in which a step handles requests, and that of a weight update."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import grpo_mcore

VLLM = find_spec("vllm")
assert VLLM is not None and VLLM.origin is not None
SOURCE = Path(VLLM.origin).parent
RUNNER = ("v1/worker/gpu/model_runner.py", "GPUModelRunner")
STAND_IN = Path(__file__).with_name("queue_executor.py")
WORKER = ("v1/worker/gpu_worker.py", "Worker")


def classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def members(where: tuple[str, str]) -> set[str]:
    """Return the names of a class's methods, and of the attributes that it sets on itself."""
    node = classes(SOURCE / where[0])[where[1]]
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    return methods | {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    }


def method(node: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name)


def read_from(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the attributes that are read of the variable `name`, in the order of the text."""
    found = [
        (part.lineno, part.col_offset, part.attr)
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == name
    ]
    return (attribute for _, _, attribute in sorted(found))


def test_a_worker_has_what_our_calls_ask_of_it() -> None:
    tree = ast.parse((Path(grpo_mcore.__file__).parent / "generation/worker_calls.py").read_text())
    base = members(("v1/worker/worker_base.py", "WorkerBase")) | members(WORKER)
    ours = {"process_profile", "route_recorder", "layer_recorder"}  # set there by the same calls
    asked = set(read_from(tree, "worker")) - ours
    assert {"weight_transfer_engine", "update_weights", "model_runner", "rank"} <= asked <= base
    assert {"model", "execute_model", "sample_tokens"} <= members(RUNNER)


def test_an_engine_has_what_ours_calls() -> None:
    tree = ast.parse((Path(grpo_mcore.__file__).parent / "generation/engine.py").read_text())
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute | ast.Name)
        and (node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id) == "_llm_engine"
    }
    assert {"step", "sleep", "wake_up", "collective_rpc", "reset_prefix_cache", "set_weight_version"} <= asked
    assert asked <= members(("v1/engine/llm_engine.py", "LLMEngine"))


def test_a_weight_update_is_refused_in_another_order_than_ours() -> None:
    """refit_step calls init, start, update and, in the end, finish."""
    worker = classes(SOURCE / WORKER[0])[WORKER[1]]
    texts = {
        name: ast.unparse(method(worker, name))
        for name in ("_start_weight_update", "update_weights", "finish_weight_update")
    }
    assert "self._weight_update_active = True" in texts["_start_weight_update"]
    assert "start_weight_update must be called before update_weights" in texts["update_weights"]
    assert "finish_weight_update called without a matching start_weight_update" in texts["finish_weight_update"]
    assert "self._weight_update_active = False" in texts["finish_weight_update"]


@pytest.mark.parametrize(("level", "kept"), [(1, "weights"), (2, "buffers")])
def test_a_sleep_keeps_what_ours_expects(level: int, kept: str) -> None:
    """Level 1 the weights, level 2 the buffers alone (Engine.release)."""
    sleep = ast.unparse(method(classes(SOURCE / WORKER[0])[WORKER[1]], "sleep"))
    backend = ast.unparse(classes(SOURCE / "device_allocator/sleep_mode_backend.py")["CuMemBackend"])
    if level == 1:
        assert "if level == 1:\n            offload_tags = ('weights', *offload_tags)" in backend
    else:
        assert "if level == 2:" in sleep and f"model.named_{kept}()" in sleep


def test_a_step_handles_requests_in_the_stand_ins_order() -> None:
    """Ended requests, new ones, the blocks of running ones, then the model; the tokens when they are asked for."""
    runner = classes(SOURCE / RUNNER[0])[RUNNER[1]]
    handled = list(read_from(method(runner, "execute_model"), "self"))
    order = [handled.index(name) for name in ("finish_requests", "add_requests", "update_requests")]
    assert order == sorted(order) and order[-1] < handled.index("execute_model_state")
    ours = classes(STAND_IN)["QueueExecutor"]
    read = list(dict.fromkeys(read_from(method(ours, "execute_model"), "scheduler_output")))
    assert read[:3] == ["finished_req_ids", "scheduled_new_reqs", "scheduled_cached_reqs"]
    sample = ast.unparse(method(runner, "sample_tokens"))
    assert "if self.execute_model_state is None" in sample and "self.execute_model_state = None" in sample


@pytest.mark.parametrize(("ours", "theirs", "handler"), [("new", "new_req_data", "add_requests"),
                                                       ("cached", "reqs", "update_requests")])  # fmt: skip
def test_the_stand_in_reads_what_the_runner_reads(ours: str, theirs: str, handler: str) -> None:
    runner, stand_in = classes(SOURCE / RUNNER[0])[RUNNER[1]], classes(STAND_IN)["QueueExecutor"]
    # The first runner's names, which the stand-in reads too.
    first = {"prompt_token_ids", "resumed_req_ids", "num_output_tokens"}
    read = set(read_from(method(stand_in, "execute_model"), ours))
    assert read - first <= set(read_from(method(runner, handler), theirs))
    assert {"block_ids", "num_computed_tokens"} <= read or {"new_block_ids", "num_computed_tokens"} <= read
