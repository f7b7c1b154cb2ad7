"""What is wrong with a machine, found in under a minute: thin probes look, and pure judges (`judge.py`) say ok or what
to do."""

from __future__ import annotations

from grpo_mcore.cluster.doctor.examine import Needs, examine
from grpo_mcore.cluster.doctor.judge import Finding

__all__ = ["Finding", "Needs", "examine"]
