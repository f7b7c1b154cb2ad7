"""Find what is wrong with a machine in under a minute: probes (`probes.py`) look at it, and pure checks (`checks.py`)
turn what they saw into findings."""

from __future__ import annotations

from grpo_mcore.tools.doctor.checks import Finding
from grpo_mcore.tools.doctor.examine import Needs, examine

__all__ = ["Finding", "Needs", "examine"]
