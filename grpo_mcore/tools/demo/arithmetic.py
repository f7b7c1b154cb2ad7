"""A task that needs no download: two-digit addition, its tokenizer, and a small untrained Qwen3 model.

Answers have a fixed width ("37+45=" -> "082"), so that the model always generates the same number of digits; verifiers
read 082 as 82.
"""

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
ROLE_TOKENS = ("<system>", "<user>", "<assistant>")
CHARACTERS = "0123456789+-*/=().,:?%^ \n"  # with the 7 special tokens 32, divisible by tensor-parallel sizes
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_WIDTH = 3
_OF_A_LEVEL = 2000


@dataclass(frozen=True)
class ArithmeticTask:
    """The paths of the task's files."""

    train: Path
    """Prompts for GRPO: {"input": "37+45=", "output": "82"}."""
    val: Path
    """Held-out problems, none of which is in `train` or `sft`."""
    sft: Path
    """Demonstrations, some of them wrong: {"input": "37+45=", "output": "082"}."""
    tokenizer: Path
    """A folder that AutoTokenizer and vLLM load."""
    levels: Path
    """Prompts of three levels, for a curriculum: {"input": "37+45=", "output": ["82"], "level": "medium"}."""
    mixed: Path
    """`train` with a third as many products, which the demo's model never solves: for a critic to tell apart."""


def make_arithmetic_task(
    folder: str | Path,
    seed: int = 0,
    *,
    num_val: int = 500,
    highest: int = 99,
    demonstrations_per_problem: int = 4,
    wrong_share: float = 0.0,
    off_by_one_share: float = 0.6,
) -> ArithmeticTask:
    """Write the files of an `ArithmeticTask` into `folder`; `seed` determines their contents.

    The problems are all sums 0..`highest` + 0..`highest`, `num_val` of them held out. Demonstrations are wrong in two
    ways. A share `off_by_one_share` is too high by one: above a half, the most likely answer is wrong, and no lower
    temperature makes it right. Besides, a share `wrong_share` of all has wrong digits. Each level has 2000 prompts:
    sums for which an answer that is up to 20 off counts as well (easy), sums (medium), and products (hard).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    problems = [(a, b) for a in range(highest + 1) for b in range(highest + 1)]
    draw.shuffle(problems)
    held_out, seen = problems[:num_val], problems[num_val:]
    shown = seen * demonstrations_per_problem
    draw.shuffle(shown)

    task = ArithmeticTask(
        folder / "train.jsonl",
        folder / "val.jsonl",
        folder / "sft.jsonl",
        folder / "tokenizer",
        folder / "levels.jsonl",
        folder / "mixed.jsonl",
    )
    sums = [{"input": f"{a:02d}+{b:02d}=", "output": str(a + b)} for a, b in seen]
    products = [{"input": f"{a:02d}*{b:02d}=", "output": str(a * b)} for a, b in seen[: len(seen) // 3]]
    _write(task.train, sums)
    _write(task.mixed, sums + products)
    _write(task.val, ({"input": f"{a:02d}+{b:02d}=", "output": str(a + b)} for a, b in held_out))
    _write(
        task.sft,
        (
            {"input": f"{a:02d}+{b:02d}=", "output": demonstration(a, b, draw, wrong_share, off_by_one_share)}
            for a, b in shown
        ),
    )
    easy, medium, hard = (seen[first : first + _OF_A_LEVEL] for first in range(0, 3 * _OF_A_LEVEL, _OF_A_LEVEL))
    levels = [
        *({"input": f"{a:02d}+{b:02d}=", "output": _near(a + b), "level": "easy"} for a, b in easy),
        *({"input": f"{a:02d}+{b:02d}=", "output": [str(a + b)], "level": "medium"} for a, b in medium),
        *({"input": f"{a:02d}*{b:02d}=", "output": [str(a * b)], "level": "hard"} for a, b in hard),
    ]
    _write(task.levels, levels)
    make_tokenizer(task.tokenizer)
    return task


def _near(answer: int) -> list[str]:
    """Return the numbers that are at most 20 off."""
    return [str(number) for number in range(max(0, answer - 20), answer + 21)]


def demonstration(a: int, b: int, draw: random.Random, wrong_share: float, off_by_one_share: float = 0.0) -> str:
    """Return the answer to a + b in fixed width: too high by one with probability `off_by_one_share`, and then with
    wrong digits with probability `wrong_share`.

    Each digit is wrong independently, so a model that fits these answers perfectly samples them with probability
    1 - `wrong_share`, and always finds them when it takes the most likely digit.
    """
    total = a + b + (draw.random() < off_by_one_share)
    keep = (1.0 - wrong_share) ** (1.0 / _WIDTH)
    return "".join(
        digit if draw.random() < keep else draw.choice([other for other in "0123456789" if other != digit])
        for digit in f"{total:0{_WIDTH}d}"
    )


def make_tokenizer(
    folder: str | Path,
    characters: str = CHARACTERS,
    words: Sequence[str] = (),
    *,
    marks: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Save a tokenizer with one token per character and per word of `words`, role tokens and a chat template. `marks`:
    further special tokens, in front of these."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL_TOKENS.values(), *marks, *ROLE_TOKENS, *characters, *words]
    pieces = "|".join([*map(re.escape, words), r"[\s\S]"])
    tokenizer = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=SPECIAL_TOKENS["unk_token"])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # characters joined without spaces
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **SPECIAL_TOKENS,
        additional_special_tokens=[*marks, *ROLE_TOKENS],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )
    fast.save_pretrained(str(folder))


def make_base_config(
    folder: str | Path,
    tokenizer_folder: str | Path,
    seed: int = 0,
    *,
    hidden_size: int = 128,
    intermediate_size: int = 576,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    max_positions: int = 512,
    initializer_range: float = 0.02,
    vocab_size: int | None = None,
) -> int:
    """Write a Hugging Face folder with a randomly initialised Qwen3 model (float32) and the tokenizer. Return the
    number of parameters (0.5 M with the defaults). `vocab_size` is at least the tokenizer's."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # not worth it for a few MB
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    config = Qwen3Config(
        vocab_size=max(vocab_size or 0, len(tokenizer)),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return model.num_parameters()


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
