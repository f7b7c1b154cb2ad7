"""Engines with FP8 weights: which layers are quantised, and that refits leave the bytes of a fresh start."""

from pathlib import Path
from typing import get_args

import psutil
import pytest
import torch

from grpo_mcore.refit.engine_side import fp8
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.refit import Refit, refit
from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.tools.verdict.judge import Judge, JudgedSample
from tests.functional.engine_cases import Killer, generate, request
from tests.functional.fp8_pairs import Pair, differing, of_engine
from tests.functional.rank_server import ranks as processes
from tests.unit.refit.shards import Handle

REQUESTS = [request(number) for number in range(2)]
KEPT = ("embed_tokens", "lm_head", "norm", "gate.", "kv_b_proj", "in_proj_ba", "conv1d", "W_U", "bias")
CASES = [
    pytest.param("qwen3_moe", "fp8_per_block", 1),
    pytest.param("qwen3_moe", "fp8_per_channel", 2),  # whose scales span ranks
    *(
        pytest.param(family, quantization, ranks, marks=pytest.mark.every_state)
        for family in ("qwen3", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3", "nemotron_h_moe")
        for quantization in get_args(fp8.Format)
        for ranks in (1, 2)
        if (family, quantization, ranks) not in (("qwen3_moe", "fp8_per_block", 1), ("qwen3_moe", "fp8_per_channel", 2))
    ),
]


@pytest.mark.parametrize(("family", "quantization", "ranks"), CASES)
def test_refits_leave_the_bytes_of_a_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: fp8.Format, ranks: int
) -> None:
    others = processes()
    pair = Pair(tmp_path, family, quantization, ranks)
    engine, handle = pair.engine, Handle(pair.engine.name, pair.engine)
    try:
        before = of_engine(engine)
        for name, weight in before[0].items():
            if weight.dtype == torch.float8_e4m3fn:
                assert not any(part in name for part in KEPT)
                scale = before[0][fp8.scale_name(name, quantization)]
                assert scale.dtype == (torch.uint8 if quantization == "mxfp8" else torch.float32)
            elif weight.ndim > 1 and "scale" not in name:
                assert any(part in name for part in KEPT), name
        texts = generate(engine, REQUESTS)
        refit([pair.sender], [handle], pair.plan, 1, verify="full")
        once = of_engine(engine)
        assert differing(once, before)
        if ranks == 1 and family != "nemotron_h_moe":  # whose parameters have other names in transformers
            check_logprobs(pair, quantization)
        pair.source.folder = pair.folders[0]
        Refit([pair.sender], [handle], pair.plan, 2).stage()
        assert differing(of_engine(engine), once) == []
        engine.commit_refit(2)
        engine.abort_refit()  # takes it back
        assert differing(of_engine(engine), once) == []
        refit([pair.sender], [handle], pair.plan, 3)
        refit([pair.sender], [handle], pair.plan, 4)
        assert differing(of_engine(engine), before) == []
        if ranks == 1:  # in this process
            with monkeypatch.context() as patch:
                patch.setattr(fp8, "DONE", "another_name")  # the shadow keeps vLLM's mark of a finished layer
                with pytest.raises(RefitError, match=r"from the reference in form|quantisation made torch.bfloat16"):
                    refit([pair.sender], [handle], pair.plan, 5)
        assert differing(of_engine(engine), before) == []
        again = generate(engine, REQUESTS)
        for uid, text in texts.items():
            assert torch.equal(text.turns[-1].token_ids, again[uid].turns[-1].token_ids)
        if ranks == 2:  # between staging and commit
            killer = Killer(engine, psutil.Process(max(processes() - others)), "commit_refit")
            run = Refit([pair.sender], [killer], pair.plan, 6)
            run.stage()
            with pytest.raises(RefitError, match=r"commit_refit .* failed on engine-0: engine-0: rank 1 of 2 has died"):
                run.commit()
    finally:
        pair.close()
    assert differing(once, pair.fresh()) == []


def check_logprobs(pair: Pair, quantization: fp8.Format) -> None:
    """The engine is about as far from the dequantised weights in float64 as bfloat16 is, and farther from others."""
    judge = Judge(pair.folders[1], Sampling(1))
    gaps: dict[str, list[float]] = {"quantised": [], "plain": [], "rounding": []}
    for uid, text in generate(pair.engine, [request(number) for number in range(8)]).items():
        tokens, mask = text.token_ids(), text.loss_mask()
        sample = JudgedSample(uid, tokens, mask, None, None)
        plain = judge.logprobs(sample)
        for name, found in (
            ("quantised", text.logprobs() - judge.logprobs(sample, tensors=judge.quantized(quantization))),
            ("plain", text.logprobs() - plain),
            ("rounding", judge.logprobs(sample, dtype=torch.bfloat16) - plain),
        ):
            gaps[name] += found[mask].abs().tolist()
    mean = {name: sum(values) / len(values) for name, values in gaps.items()}
    assert mean["quantised"] < min(3 * mean["rounding"], mean["plain"] / 2), mean
