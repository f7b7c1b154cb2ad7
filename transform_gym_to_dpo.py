"""NeMo Gym rollouts to pairs of answers for DPO: the same as `grpo-mcore data gym-to-dpo`.

python transform_gym_to_dpo.py --input rollouts.jsonl --output dpo_train.jsonl
"""

import sys

from grpo_mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", "gym-to-dpo", *sys.argv[1:]]))
