"""Find what is wrong with a machine (`checks.py`), or with every node of a cluster (`nodes.py`), in under a minute."""

from grpo_mcore.tools.doctor.checks import CheckResult, Needs, examine
