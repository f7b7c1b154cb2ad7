"""A small run of benchmarks/verifier_soak.py: each faulty answer gets its reason, each other answer its reward."""

import pytest


@pytest.mark.every_state  # of these faults one by one: tests/unit/environments
def test_each_faulty_answer_gets_its_reason_and_each_other_its_reward() -> None:
    from benchmarks.faulty_verifier import FAULTS  # verifies as it is imported
    from benchmarks.verifier_soak import soak

    found = soak(90, 0.1, workers=4, timeout_s=6.0, memory_gb=0.5)
    assert found.wrong == []
    assert sum(found.reasons.values()) == found.faulty == len(FAULTS)
