"""A small untrained Qwen3 model whose tokenizer has the words of the sliding puzzle:
`python -m grpo_mcore.data.puzzle_model FOLDER`."""

from __future__ import annotations

import string
import sys
from pathlib import Path

from grpo_mcore.data.arithmetic import make_base_config, make_tokenizer
from grpo_mcore.rollout.sliding_puzzle import DIRECTIONS

CHARACTERS = string.digits + string.ascii_lowercase + "_ \n.,:;'<>/"
WORDS = ("<action>", "</action>", *DIRECTIONS)
_VOCABULARY = 64  # more than there are tokens, and a number that tensor parallelism divides


def make_puzzle_model(folder: str | Path, seed: int = 0) -> int:
    """Writes model and tokenizer; the same for the same seed. Returns the number of parameters (0.2 M)."""
    folder = Path(folder)
    make_tokenizer(folder, CHARACTERS, WORDS)
    return make_base_config(
        folder,
        folder,
        seed,
        hidden_size=64,
        intermediate_size=256,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        vocab_size=_VOCABULARY,
    )


if __name__ == "__main__":
    make_puzzle_model(sys.argv[1])
