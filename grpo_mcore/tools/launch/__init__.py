"""Turn a recipe into a job: one `LaunchSpec`, rendered for Slurm, Kubernetes or NeMo-Run.

Text in, text out: nothing here talks to a cluster.
"""

from grpo_mcore.tools.launch.spec import LaunchSpec, Pool, launch_spec
