"""Makes a small untrained Qwen3 model whose tokenizer has the words of the sliding puzzle:
`python -m examples.sliding_puzzle.make_model FOLDER`."""

from __future__ import annotations

import string
import sys
from pathlib import Path

from examples.sliding_puzzle.puzzle import DIRECTIONS
from grpo_mcore.tools.demo.arithmetic import make_base_config, make_tokenizer

CHARACTERS = string.digits + string.ascii_lowercase + "_ \n.,:;'<>/"
WORDS = ("<action>", "</action>", *DIRECTIONS)
_VOCABULARY = 64  # more than there are tokens, and divisible by tensor-parallel sizes


def make_puzzle_model(folder: str | Path, seed: int = 0) -> int:
    """Write the model and the tokenizer, which depend on the seed alone. Return the number of parameters (0.2 M)."""
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
