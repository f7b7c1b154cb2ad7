"""Engines of families whose weights vLLM holds in forms of its own: log-probs against transformers, before and after a
refit, and after one that was given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.families import engine_options, params_of, read_hf_config, shape_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.plan import plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import Refit, refit
from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model
from grpo_mcore.tools.parity.parity import unstacked
from tests.functional.engine_cases import config, generate, load_reference, request, worst_difference
from tests.unit.refit.shards import Handle, ShardedModel

REQUESTS = [request(number) for number in range(8)]


class Source:
    """A policy rank with the weights of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def parameters(self) -> dict[str, torch.Tensor]:
        shape = shape_of(read_hf_config(self.folder))
        whole = unstacked(load_file(self.folder / "model.safetensors"), shape)
        return ShardedModel(whole, shape, 0, 1).parameters()


def copy_sinks(worker: Any) -> None:
    """Let attention keep a copy of the sinks, as vLLM's kernels for Blackwell do of those in bfloat16."""
    for kernel in (getattr(module, "impl", None) for module in worker.model_runner.model.modules()):
        if kernel is not None:
            source, kernel.sinks = kernel.sinks, kernel.sinks.detach().clone()
            kernel.process_weights_after_loading = lambda _, copy=kernel.sinks, source=source: copy.copy_(source)


FORMS = ("nemotron_h_latent", "glm4_moe_lite", "qwen3_5_moe_text", "gpt_oss")  # every form; the others under --chaos
ALIKE = ("glm4_moe", "moonlight", "qwen3_5_text", "qwen3_next", "minimax_m2", "gemma3_text", "gemma3", "nemotron_h_moe")


@pytest.mark.parametrize("family", [*FORMS, *(pytest.param(each, marks=pytest.mark.every_state) for each in ALIKE)])
def test_a_refit_brings_every_weight(tmp_path: Path, family: str) -> None:
    folders = [
        make_tiny_model(family, tmp_path / str(seed), seed=seed, words=True, **ENGINE_SIZES.get(family, {}))
        for seed in (0, 1)
    ]
    shape = shape_of(read_hf_config(folders[0]))
    plan = plan_refit(params_of(shape), shape, PolicyLayout(), EngineLayout(), dtype="float32", buffer_bytes=2 * 72_000)
    assert not plan.fallbacks and len(plan.buckets) > 1
    source = Source(folders[1])
    sender = Handle("policy-0", RefitSender(source, 0, run_id=family.replace("_", "-")))
    engine = EngineWorker(config(folders[0], **engine_options(shape)), None)
    handle = Handle(engine.name, engine)
    try:
        if family == "gpt_oss":
            engine._llm_engine.collective_rpc(copy_sinks)
        before = generate(engine, REQUESTS)
        assert worst_difference(load_reference(folders[0]), before) < 1e-4
        reference = load_reference(folders[1])
        report = refit([sender], [handle], plan, 1, verify="full")
        assert report.checked == sum(len(block.reads) for block in plan.blocks())
        after = generate(engine, REQUESTS)
        assert worst_difference(reference, after) < 1e-4 < 0.1 < worst_difference(reference, before)
        source.folder = folders[0]
        Refit([sender], [handle], plan, 2).stage()
        engine.commit_refit(2)
        engine.abort_refit()  # takes it back: what was derived from a weight goes back with it
        assert worst_difference(reference, generate(engine, REQUESTS)) < 1e-4
        refit([sender], [handle], plan, 3)
        assert generate(engine, REQUESTS).keys() == before.keys()
        assert worst_difference(load_reference(folders[0]), generate(engine, REQUESTS)) < 1e-4
    finally:
        sender.target.close_refit()
        engine.shutdown()
