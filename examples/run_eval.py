"""Evaluate a model: the same as `grpo-mcore eval`, with recipes/eval.yaml where no --config is given.

uv run examples/run_eval.py [--config RECIPE] [generation.model_name=... key=value ...]
"""

import sys

from grpo_mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
