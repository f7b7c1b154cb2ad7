"""Let a larger model teach: the same as `grpo-mcore distill`, with examples/configs/distillation_math.yaml where no
--config is given.

uv run examples/run_distillation.py --config RECIPE [key=value ...]
"""

import sys

from grpo_mcore.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("distill", default="distillation_math.yaml"))
