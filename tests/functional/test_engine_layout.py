"""The engine's half of the families' declaration against vLLM itself: which element of which tensor do its own
`load_weights` put where? Every element of a checkpoint is another number, so the answer can be read back."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.families import params_of, read_hf_config, shape_of
from grpo_mcore.layout import EngineLayout
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from tests.functional.rank_server import CONTEXT

PADDING = -1.0
ROUTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # as in published configs of DeepSeek-V3
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied-one-kv-head": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama-vocabulary-150": ("llama", {"vocab_size": 150}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-whole-experts": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", ROUTED),
    "deepseek_v3-no-query-latent": ("deepseek_v3", ROUTED | {"q_lora_rank": None}),
    "nemotron_h": ("nemotron_h", {}),
}
WHOLE_EXPERTS = "whole-experts"  # dealt to the ranks of an engine


def numbered(folder: str) -> dict[str, Tensor]:
    """A checkpoint in which every element is another number; float32 holds them all exactly."""
    found, at = {}, 0
    for param in params_of(shape_of(read_hf_config(folder))):
        for tensor in param.hf:
            if tensor.name not in found:
                found[tensor.name] = torch.arange(at, at + tensor.numel, dtype=torch.float32).view(tensor.shape)
                if param.engine_form.negative_exp:
                    found[tensor.name] /= 2**20  # still different numbers, of which exp is one
                at += tensor.numel
    assert at < 2**24
    return found


def load_in_vllm(rank: int, tensor: int, pipeline: int, identity: str, folders: list[str], out: str) -> None:
    """One rank: builds each model, loads it, and saves its parameters before anything is packed."""
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": identity,
    }  # fmt: skip
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    configs = [
        EngineArgs(
            folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=64, enforce_eager=True,
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, distributed_executor_backend="mp",
            enable_expert_parallel=WHOLE_EXPERTS in folder,
        ).create_engine_config()
        for folder in folders
    ]  # fmt: skip
    with set_current_vllm_config(configs[-1]):  # one with experts: they have a group of their own
        # Over a file: a store of rank 0 is gone for the others when it ends first.
        init_distributed_environment(tensor * pipeline, rank, f"file://{out}/meeting", rank, backend="gloo")
        initialize_model_parallel(tensor, pipeline)
    found = []
    for folder, config in zip(folders, configs, strict=True):
        with set_current_vllm_config(config), torch.no_grad():
            torch.set_default_dtype(torch.float32)
            model = initialize_model(config)
            for parameter in model.parameters():
                parameter.fill_(PADDING)
            model.load_weights(iter(numbered(folder).items()))
        found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    torch.save(found, f"{out}/{rank}.pt")


# Of each kind one: which layers a stage has is the same for all of a kind.
STAGES = ("qwen3-tied", "llama-vocabulary-150", "qwen3_moe", "deepseek_v3", "nemotron_h")


def ended(processes: list[Any]) -> list[int | None]:
    """Return the exit codes once all have ended or one has failed. The test's time-out is the deadline."""
    try:
        while None in (codes := [process.exitcode for process in processes]) and not any(codes):
            time.sleep(0.05)
        return codes
    finally:
        for process in processes:
            process.kill()


def exit_with_compiler() -> None:
    import vllm.v1.engine.llm_engine  # noqa: F401

    raise SystemExit(3 if "torch._inductor.lowering" in sys.modules else 0)


def test_an_engine_on_cpu_does_without_the_compiler() -> None:
    process = CONTEXT.Process(target=exit_with_compiler)
    process.start()
    assert ended([process]) == [0]


@pytest.mark.timeout(600)  # on a loaded machine
@pytest.mark.parametrize(
    ("tensor", "pipeline", "names"),
    [
        pytest.param(2, 1, tuple(CASES), id="TP2"),
        pytest.param(1, 2, STAGES, id="PP2"),
        pytest.param(1, 2, tuple(CASES), id="PP2, all", marks=pytest.mark.every_state),
    ],
)
def test_the_declared_slices_are_those_that_vllm_loads(
    tmp_path: Path, tensor: int, pipeline: int, names: tuple[str, ...]
) -> None:
    folders = []
    for name in names:
        family, overrides = CASES[name]
        folders.append(str(tmp_path / name))
        layers = {} if family == "nemotron_h" else {"num_hidden_layers": 2 * pipeline}
        make_tiny_model(family, Path(folders[-1]), **layers | overrides)
    identity = f"layout-{os.getpid()}-{tensor}-{pipeline}"
    ranks = [
        CONTEXT.Process(target=load_in_vllm, args=(rank, tensor, pipeline, identity, folders, str(tmp_path)))
        for rank in range(tensor * pipeline)
    ]
    for process in ranks:
        process.start()
    codes = ended(ranks)
    for segment in Path("/dev/shm").glob(f"{identity}-*"):
        segment.unlink()
    assert codes == [0] * len(ranks)
    for rank in range(len(ranks)):
        for folder, loaded in zip(folders, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            expected = declared(folder, rank, tensor, pipeline, {name: found.shape for name, found in loaded.items()})
            assert expected.keys() == loaded.keys(), folder
            for name, values in loaded.items():
                filled = values[: len(expected[name])]
                assert torch.equal(filled, expected[name]), f"{Path(folder).name} {name} on rank {rank}"
                # What vLLM adds to the vocabulary is zero, or was never written.
                assert ((values[len(filled) :] == 0) | (values[len(filled) :] == PADDING)).all()


def declared(folder: str, rank: int, tensor: int, pipeline: int, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The engine's parameters by the declaration, if the engine has them; rows of padding are cut off."""
    shape, whole = shape_of(read_hf_config(folder)), numbered(folder)
    layout = EngineLayout(tensor, pipeline, WHOLE_EXPERTS in folder)
    found: dict[str, Tensor] = {}
    for param in params_of(shape):
        if param.copy:
            continue
        parts = [part for part, readers in enumerate(layout.readers(param, shape.num_layers)) if rank in readers]
        for name, piece in (place for part in parts for place in layout.places(param, shape, part)):
            if name not in shapes and param.layer is None and pipeline > 1:
                continue  # which stages have it differs from model to model
            place = found.setdefault(name, torch.full(shapes[name], PADDING))
            box = tuple(slice(*span) for span in piece.local_box)
            assert (place[box] == PADDING).all()
            values = whole[piece.hf][tuple(slice(*span) for span in piece.hf_box)]
            place[box] = -values.exp() if param.engine_form.negative_exp else values
    rows = {name: int((values != PADDING).reshape(len(values), -1).all(1).sum()) for name, values in found.items()}
    return {name: values[: rows[name]] for name, values in found.items()}
