"""What is wrong with a machine, found in under a minute: thin probes look, and pure checks (`checks.py`) say ok or what
to do."""

from __future__ import annotations

from grpo_mcore.tools.doctor.checks import Finding
from grpo_mcore.tools.doctor.examine import Needs, examine

__all__ = ["Finding", "Needs", "examine"]
