"""Random cases of `parity` find silent faults of layouts, and none in the product."""

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest

from grpo_mcore.tools.parity import rank_pool
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.fuzz_cases import FAULTS
from tests.parity_fuzz import Draw, Fuzzer, draws, main

FAMILY, WITHIN, TRIES = "qwen3_moe", 200, 6


@pytest.fixture(scope="module")
def fuzzer(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(FAMILY, {}, ranks, tmp_path_factory.mktemp("fuzz"))


def drawn(fuzzer: Fuzzer) -> Iterator[Draw]:
    """The first draws that `python -m tests.parity_fuzz tiny:qwen3_moe` computes."""
    return islice(filter(fuzzer.fits, draws(0, FAMILY, {}, ranks=2)), WITHIN)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_within_200_draws(fuzzer: Fuzzer, fault: str) -> None:
    """Only draws that could show it are computed."""
    may_show = islice((draw for draw in drawn(fuzzer) if FAULTS[fault][2](draw)), TRIES)
    seen = (fuzzer.failure(draw, f"tests.distributed.fuzz_cases:{fault}") for draw in may_show)
    what = next(filter(None, seen), None)
    assert what is not None and "fails" not in what


def test_the_product_has_none_and_a_case_can_be_computed_again(
    ranks: RankPool, fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_pool, "RankPool", lambda _: SimpleNamespace(run=ranks.run, close=lambda: None))
    assert main(["tiny:qwen3", "--seed", "1", "--draws", "4"]) == 0
    assert capsys.readouterr().out == "4 cases of tiny:qwen3: none differs\n"
    case = next(draw for draw in drawn(fuzzer) if draw.layout.expert > 1)
    assert main([f"tiny:{FAMILY}", "--case", case.to_json()]) == 0
    assert capsys.readouterr().out == f"1 cases of tiny:{FAMILY}: none differs\n"
    monkeypatch.setattr("tests.parity_fuzz.LOGPROB_LIMIT", 0.0)
    assert main([f"tiny:{FAMILY}", "--case", case.to_json()]) == 1
    printed = capsys.readouterr().out
    assert "log-probs of sequence" in printed and printed.endswith(f"'{case.to_json()}'\n")
