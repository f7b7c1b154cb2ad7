"""A small run of benchmarks/verifier_soak.py: each faulty answer gets its reason, each other answer its reward."""

from __future__ import annotations

from benchmarks.faulty_verifier import FAULTS
from benchmarks.verifier_soak import soak


def test_each_faulty_answer_gets_its_reason_and_each_other_its_reward() -> None:
    found = soak(90, 0.1, workers=4, timeout_s=6.0, memory_gb=0.5)
    assert found.wrong == []
    assert sum(found.reasons.values()) == found.faulty == len(FAULTS)
