"""Train on pairs of answers: the same as `grpo-mcore dpo`, with examples/configs/dpo.yaml where no --config is given.

uv run examples/run_dpo.py --config RECIPE [key=value ...]
"""

import sys

from grpo_mcore.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("dpo", default="dpo.yaml"))
