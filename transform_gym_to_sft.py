"""NeMo Gym rollouts to demonstrations for SFT: the same as `grpo-mcore data gym-to-sft`.

python transform_gym_to_sft.py --input rollouts.jsonl --output sft_train.jsonl
"""

import sys

from grpo_mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", "gym-to-sft", *sys.argv[1:]]))
