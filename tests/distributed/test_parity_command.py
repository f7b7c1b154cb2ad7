"""`grpo-mcore parity`, on the ranks that all tests of this folder share."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity import rank_pool
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.awkward import make_awkward


def test_every_layout_packed_and_not(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_pool, "RankPool", lambda _: SimpleNamespace(run=ranks.run, close=lambda: None))
    code = main(["parity", "tiny:qwen3_moe", "--layouts", "TP1,EP2xTP2,VPP3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(case["family"], case["layout"], case["packed"]) for case in found["cases"]] == [
        ("qwen3_moe", layout, packed) for layout in ("TP1", "EP2xTP2") for packed in (False, True)
    ]
    for case in found["cases"]:
        assert 0 < case["max_logprob_diff"] == max(case["logprob_diff_by_sequence"]) < 1e-4
        assert 0 < case["max_grad_rel_diff"] == max(case["grad_rel_diff_by_layer"].values()) < 1e-3
        assert set(case["grad_rel_diff_by_layer"]) > {"layer 0", "layer 3", "lm_head.weight"}
    assert code == 1, "a requested layout is impossible"
    assert list(found["refused"]) == ["VPP3"] and "does not divide the layers" in found["refused"]["VPP3"]


@pytest.mark.parametrize(("family", "tied", "layout"), [("qwen3", True, "TP2"), ("qwen3_moe", False, "EP2xTP2")])
def test_a_folder_that_is_awkward_on_purpose(
    ranks: RankPool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    family: str,
    tied: bool,
    layout: str,
) -> None:
    """Two shards of different types, a stale shard beside their index, other forms of weights, and a vocabulary that TP
    does not divide: the policy sees the model that transformers sees."""
    folder = make_tiny_model(family, tmp_path, vocab_size=139, tie_word_embeddings=tied)
    make_awkward(folder)
    monkeypatch.setattr(rank_pool, "RankPool", lambda _: SimpleNamespace(run=ranks.run, close=lambda: None))
    code = main(["parity", str(folder), "--layouts", layout, "--json"])
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert code == 0 and [case["layout"] for case in cases] == [layout] * 2
    assert all(0 < case["max_logprob_diff"] < 1e-4 and case["max_grad_rel_diff"] < 1e-3 for case in cases)
