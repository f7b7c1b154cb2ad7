"""The soak of benchmarks/verifier_soak.py, small: every fault has its reason, every other answer its reward."""

from __future__ import annotations

from benchmarks.faulty_verifier import FAULTS
from benchmarks.verifier_soak import soak


def test_soak() -> None:
    found = soak(90, 0.1, workers=4, timeout_s=2.0, memory_gb=0.5)
    # On a machine with no time for it a verification may run out of its own: no reward, but never a wrong one.
    assert [wrong for wrong in found.wrong if "reason='timed out" not in wrong] == []
    assert 9 <= sum(found.reasons.values()) <= 9 + len(found.wrong)
    assert found.faulty == len(FAULTS)
