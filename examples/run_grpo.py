"""GRPO: the same as `grpo-mcore train`, with examples/configs/grpo_math_1B.yaml where no --config is given.

uv run examples/run_grpo.py --config RECIPE [key=value ...]
"""

import sys

from grpo_mcore.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("train", default="grpo_math_1B.yaml"))
