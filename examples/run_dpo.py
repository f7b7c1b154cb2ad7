"""Train a model on pairs of answers: the same as `grpo-mcore dpo`.

python examples/run_dpo.py --config recipes/dpo.yaml [key=value ...]
"""

import sys

from grpo_mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["dpo", *sys.argv[1:]]))
