"""NeMo Gym rollouts to prompts for GRPO: the same as `grpo-mcore data gym-to-grpo`.

python transform_gym_to_grpo.py --input rollouts.jsonl --output grpo_train.jsonl
"""

import sys

from grpo_mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", "gym-to-grpo", *sys.argv[1:]]))
