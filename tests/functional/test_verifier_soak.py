"""The soak of benchmarks/verifier_soak.py, small: every fault has its reason, every other answer its reward."""

from __future__ import annotations

from benchmarks.faulty_verifier import FAULTS
from benchmarks.verifier_soak import soak


def test_soak() -> None:
    found = soak(90, 0.1, workers=2, timeout_s=2.0, memory_gb=0.5, rounds=1)
    assert found.wrong == []
    assert (found.answers, found.faulty, sum(found.reasons.values())) == (90, 9, 9)
    assert found.faulty == len(FAULTS)
