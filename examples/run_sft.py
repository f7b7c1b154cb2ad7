"""Supervised fine-tuning: the same as `grpo-mcore sft`, with examples/configs/sft.yaml where no --config is given.

uv run examples/run_sft.py --config RECIPE [key=value ...]
"""

import sys

from grpo_mcore.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("sft", default="sft.yaml"))
