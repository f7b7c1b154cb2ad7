"""GRPO on math problems: the same as `grpo-mcore train`, with examples/configs/grpo.yaml where no --config is given.

uv run examples/run_grpo_math.py --config RECIPE [key=value ...]
"""

import sys

from grpo_mcore.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("train", default="grpo.yaml"))
