from pathlib import Path
from typing import Any

import pytest

from examples.sliding_puzzle.make_model import CHARACTERS, WORDS, make_tokenizer
from grpo_mcore.data import load_tokenizer


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, CHARACTERS, WORDS)
    return load_tokenizer(str(folder))
