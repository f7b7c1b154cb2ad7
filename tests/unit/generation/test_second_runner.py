"""vLLM's worker, model runner and engine on GPU, which cannot run here, have every name that we call."""

import ast
from importlib.util import find_spec
from pathlib import Path

import grpo_mcore

VLLM = find_spec("vllm")
assert VLLM is not None and VLLM.origin is not None
SOURCE, OURS = Path(VLLM.origin).parent, Path(grpo_mcore.__file__).parent / "generation"


def members(file: str, name: str) -> set[str]:
    """Return the names of a class's methods, and of the attributes that it sets on itself."""
    body = ast.parse((SOURCE / file).read_text()).body
    (node,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    parts = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
    return methods | {part.attr for part in parts if isinstance(part.ctx, ast.Store)}


def called(file: str, variable: str) -> set[str]:
    """Return the attributes that a file of ours reads of a variable, or of an attribute of that name."""
    parts = (part for part in ast.walk(ast.parse((OURS / file).read_text())) if isinstance(part, ast.Attribute))
    return {part.attr for part in parts if variable in (getattr(part.value, "id", ""), getattr(part.value, "attr", ""))}


def test_a_worker_has_what_our_calls_ask_of_it() -> None:
    base = members("v1/worker/worker_base.py", "WorkerBase") | members("v1/worker/gpu_worker.py", "Worker")
    ours = {"process_profile", "route_recorder", "layer_recorder"}  # set there by the same calls
    asked = called("worker_calls.py", "worker") - ours
    assert {"weight_transfer_engine", "update_weights", "model_runner", "rank"} <= asked <= base
    runner = members("v1/worker/gpu/model_runner.py", "GPUModelRunner")
    assert {"model", "execute_model", "sample_tokens", "finish_requests", "add_requests", "update_requests"} <= runner


def test_an_engine_has_what_ours_calls() -> None:
    asked = called("engine.py", "_llm_engine")
    assert {"step", "sleep", "wake_up", "collective_rpc", "reset_prefix_cache", "set_weight_version"} <= asked
    assert asked <= members("v1/engine/llm_engine.py", "LLMEngine")
