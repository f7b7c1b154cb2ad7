"""Train a reward model: the same as `grpo-mcore rm`, with examples/configs/rm.yaml where no --config is given.

uv run examples/run_rm.py --config RECIPE [key=value ...]
"""

import sys

from grpo_mcore.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("rm", default="rm.yaml"))
