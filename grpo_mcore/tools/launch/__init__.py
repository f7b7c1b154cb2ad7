"""From a recipe to a job: one `LaunchSpec`, and what each kind of cluster wants to read of it.

Pure text in, text out: nothing here talks to a cluster.
"""

from __future__ import annotations

from grpo_mcore.tools.launch.spec import LaunchSpec, Pool, launch_spec
from grpo_mcore.tools.launch.values import Mount

__all__ = ["LaunchSpec", "Mount", "Pool", "launch_spec"]
