"""An engine with FP8 weights beside a policy rank with others of the same tiny model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.families import engine_options, params_of, read_hf_config, shape_of, unquantized_layers
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.engine_side import fp8
from grpo_mcore.refit.plan.plan import plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model
from tests.functional.engine_cases import Source, config
from tests.unit.refit.shards import Handle

EXPERTS = {"hidden_size": 128, "moe_intermediate_size": 96}  # the second is no multiple of a block
DIVISIBLE = {"intermediate_size": 128, "moe_intermediate_size": 128}  # MXFP8's 32 also divide a half of it
OF_FAMILIES = {
    "deepseek_v3": {"v_head_dim": 16, "q_lora_rank": 32},
    # vLLM packs convolutions of 32 channels, also those of one of two ranks.
    "nemotron_h_moe": {"moe_shared_expert_intermediate_size": 64, "ssm_state_size": 16},
    "qwen3_5_moe_text": {"shared_expert_intermediate_size": 64, "linear_value_head_dim": 32},
}


def parameters(worker: Any) -> dict[str, Tensor]:
    """Return a copy of every parameter that the rank computes with."""
    return {name: weight.data.clone() for name, weight in worker.model_runner.model.named_parameters()}


def of_engine(engine: EngineWorker) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = engine._llm_engine.collective_rpc(parameters)
    return found


def differing(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> list[str]:
    """Return the names of parameters that differ in a byte, in their strides or in their dtype."""
    names = []
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        for name, weight in mine.items():
            same = (weight.dtype, weight.stride()) == (other[name].dtype, other[name].stride())
            if not (same and torch.equal(*(part.contiguous().view(torch.uint8) for part in (weight, other[name])))):
                names.append(f"{rank}: {name}")
    return names


class Pair:
    """Two checkpoints of one tiny model, an engine with the weights of the first, and a policy rank of the second.
    `options`: of EngineConfig."""

    def __init__(self, folder: Path, family: str, quantization: fp8.Format, ranks: int, **options: Any) -> None:
        sizes = ENGINE_SIZES.get(family, {}) | (EXPERTS if family != "qwen3" else {}) | OF_FAMILIES.get(family, {})
        sizes |= DIVISIBLE if quantization == "mxfp8" else {}
        self.folders = [make_tiny_model(family, folder / str(seed), seed=seed, words=True, **sizes) for seed in (0, 1)]
        for path in self.folders:  # in the format in which the refit sends
            weights = load_file(path / "model.safetensors")
            save_file({name: weight.bfloat16() for name, weight in weights.items()}, path / "model.safetensors")
        shape = shape_of(read_hf_config(self.folders[0]))
        params = params_of(shape)
        layout = EngineLayout(tensor=ranks)
        self.plan = plan_refit(params, shape, PolicyLayout(), layout, dtype="bfloat16", buffer_bytes=2 * 72_000)
        self.source = Source(self.folders[1])
        self.sender = Handle("policy-0", RefitSender(self.source, 0, run_id=f"fp8-{family}-{ranks}".replace("_", "-")))
        self.config = replace(
            config(self.folders[0], **engine_options(shape)),
            dtype="bfloat16", quantization=quantization, unquantized=unquantized_layers(shape),
            tensor_parallel_size=ranks, **options,
        )  # fmt: skip
        self.engine = EngineWorker(self.config, None)

    def fresh(self) -> list[dict[str, Tensor]]:
        """Return the parameters of an engine that starts with the second checkpoint."""
        engine = EngineWorker(replace(self.config, model=str(self.folders[1]), name="engine-1"), None)
        try:
            return of_engine(engine)
        finally:
            engine.shutdown()

    def close(self) -> None:
        self.sender.target.close_refit()
        self.engine.shutdown()
