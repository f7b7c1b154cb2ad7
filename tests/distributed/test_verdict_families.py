"""The verdict on the policy of every family is "none", of each of its layers too: packed rows on one rank, judged by
transformers in float64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.tools.demo.tiny_models import FAMILIES, make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool
from grpo_mcore.tools.verdict.judge import Judge, JudgedSample
from grpo_mcore.tools.verdict.verdict import first_layer, judge_samples


@pytest.mark.parametrize("family", [family for family in FAMILIES if "vision" not in FAMILIES[family]])
def test_none_where_nothing_is_wrong(ranks: RankPool, tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(family, tmp_path)
    generator = torch.Generator().manual_seed(5)
    asked = [
        (torch.randint(2, 131, (length,), generator=generator), torch.arange(length) >= 5) for length in (9, 21, 14)
    ]
    target = "grpo_mcore.tools.verdict.collect:policy_logprobs"
    ((said, layers),) = ranks.run(1, target, str(folder), LayoutCase("TP1"), asked)
    samples = [
        replace(JudgedSample(f"p#{i}", *one, None, None), policy=said[i], layers=layers[i])
        for i, one in enumerate(asked)
    ]
    judge = Judge(folder, Sampling(1))
    verdict = judge_samples(judge, samples, torch.float32)
    parted = first_layer(judge, samples, torch.float32)
    assert parted is not None and parted.what.endswith("agree: it is what comes after them"), parted
    assert verdict.line.startswith("none: "), "\n".join(verdict.table())
    assert verdict.evidence[0].largest < 1e-4
