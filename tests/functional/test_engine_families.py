"""Engines of families whose weights vLLM holds in forms of its own: log-probs against transformers, before and after a
refit, and after one that was given up."""

from dataclasses import replace
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
from tests.functional.engine_cases import Source, config, generate, load_reference, request, worst_difference
from tests.mixed_models import KEPT, make_mixed_model
from tests.unit.refit.shards import Handle

SLEEPING = "tests.functional.sleeping_worker.SleepingWorker"
REQUESTS = [request(number) for number in range(8)]


def copy_sinks(worker: Any) -> None:
    """Let attention keep a copy of the sinks, as vLLM's kernels for Blackwell do of those in bfloat16."""
    for kernel in (getattr(module, "impl", None) for module in worker.model_runner.model.modules()):
        if kernel is not None:
            source, kernel.sinks = kernel.sinks, kernel.sinks.detach().clone()
            kernel.process_weights_after_loading = lambda _, copy=kernel.sinks, source=source: copy.copy_(source)


def forget_host_scales(worker: Any) -> None:
    """Let attention have no copies of its scales on the host, which is another memory only on a GPU."""
    for module in worker.model_runner.model.modules():
        for name in ("_k_scale_cpu", "_v_scale_cpu"):
            module.__dict__.pop(name, None)


def weights_are_lost(worker: Any) -> bool:
    return all(bool(parameter.isnan().all()) for parameter in worker.model_runner.model.parameters())


FORMS = ("nemotron_h_latent", "glm4_moe_lite", "qwen3_5_moe_text", "gpt_oss")  # every form; the others under --chaos
ALIKE = ("glm4_moe", "moonlight", "qwen3_5_text", "qwen3_next", "minimax_m2", "gemma3_text", "gemma3", "nemotron_h_moe")
ALIKE += ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3", "qwen3_moe", "nemotron_h")


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *((family, 1) for family in FORMS),
        ("gpt_oss", 2),
        *(pytest.param(family, 1, marks=pytest.mark.every_state) for family in ALIKE),
        *(pytest.param(family, 2, marks=pytest.mark.every_state) for family in (*FORMS[:3], *ALIKE)),
    ],
)
def test_a_refit_brings_every_weight(tmp_path: Path, family: str, ranks: int) -> None:
    folders = [
        make_tiny_model(family, tmp_path / str(seed), seed=seed, words=True, **ENGINE_SIZES.get(family, {}))
        for seed in (0, 1)
    ]
    shape, layout = shape_of(read_hf_config(folders[0])), EngineLayout(ranks)
    plan = plan_refit(params_of(shape), shape, PolicyLayout(), layout, dtype="float32", buffer_bytes=2 * 72_000)
    assert not plan.fallbacks and len(plan.buckets) > 1
    source = Source(folders[1])
    sender = Handle("policy-0", RefitSender(source, 0, run_id=family.replace("_", "-")))
    options = {"tensor_parallel_size": ranks, "vllm_kwargs": {"worker_cls": SLEEPING}, **engine_options(shape)}
    engine = EngineWorker(config(folders[0], **options), None)
    handle = Handle(engine.name, engine)
    try:
        engine._llm_engine.collective_rpc(forget_host_scales)
        assert engine._level_without_weights() == (1 if engine.config.kept else 2)
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
        settled = generate(engine, REQUESTS)
        assert worst_difference(load_reference(folders[0]), settled) < 1e-4
        # A sleep that drops the weights: whatever the refit does not bring would be NaN.
        object.__setattr__(engine.config, "sleep_between_phases", True)
        engine.release(keep_weights=False)
        assert engine._llm_engine.collective_rpc(weights_are_lost) == [not engine.config.kept] * ranks
        refit([sender], [handle], plan, 4)
        engine.prepare(4)
        for uid, sample in generate(engine, REQUESTS).items():
            assert sample.token_ids().equal(settled[uid].token_ids())
            assert sample.turns[-1].logprobs.equal(settled[uid].turns[-1].logprobs)
    finally:
        sender.target.close_refit()
        engine.shutdown()


def values_in_float32(worker: Any) -> dict[str, torch.Tensor]:
    """Return the engine's parameters and buffers that are float32, by name."""
    model = worker.model_runner.model
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in found.items() if tensor.dtype == torch.float32}


@pytest.mark.every_state
@pytest.mark.parametrize("family", KEPT)
def test_an_engine_in_bfloat16_keeps_and_gets_in_float32_what_its_family_declares(tmp_path: Path, family: str) -> None:
    sizes = ENGINE_SIZES.get(family, {})
    folders = [make_mixed_model(family, tmp_path / str(seed), seed=seed, words=True, **sizes) for seed in (0, 1)]
    shape = shape_of(read_hf_config(folders[0]))
    plan = plan_refit(
        params_of(shape), shape, PolicyLayout(), EngineLayout(), dtype="bfloat16", buffer_bytes=2 * 72_000
    )
    sender = Handle("policy-0", RefitSender(Source(folders[1]), 0, run_id=f"mixed-{family}".replace("_", "-")))
    settings = replace(config(folders[0], **engine_options(shape)), dtype="bfloat16")
    engine = EngineWorker(settings, None)
    try:
        (before,) = engine._llm_engine.collective_rpc(values_in_float32)
        refit([sender], [Handle(engine.name, engine)], plan, 1, verify="full")
        (after,) = engine._llm_engine.collective_rpc(values_in_float32)
    finally:
        sender.target.close_refit()
        engine.shutdown()
    stored = unstacked(load_file(folders[1] / "model.safetensors"), shape)
    declared = {param.engine: param for param in params_of(shape) if any(tensor.float32 for tensor in param.hf)}
    assert declared and declared.keys() <= before.keys(), "vLLM keeps them in float32"
    for name, param in declared.items():
        expected = stored[param.hf[0].name].float()
        expected = -expected.exp() if param.engine_form.negative_exp else expected
        if after[name].numel():  # vLLM's CPU build packs some; the refit has compared their checksums
            assert torch.equal(after[name].flatten(), expected.flatten()) and not torch.equal(before[name], after[name])
