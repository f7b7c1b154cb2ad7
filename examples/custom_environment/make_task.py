"""Make the model and the data of the calculator: `python -m examples.custom_environment.make_task FOLDER`.

FOLDER gets `untrained` (a small random Qwen3 with its tokenizer), `train.jsonl` and `val.jsonl` (questions and answers)
and `sft.jsonl` (demonstrations: half of them call the calculator, the others guess).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.custom_environment.calculator import CALL, calculate
from grpo_mcore.tools.demo.arithmetic import make_base_config, make_tokenizer


def make_task(folder: Path, seed: int = 0) -> None:
    """Write model, questions and demonstrations to `folder`; the same for the same seed."""
    make_tokenizer(folder / "tokenizer")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_layers": 3, "num_heads": 2, "num_kv_heads": 2}
    make_base_config(folder / "untrained", folder / "tokenizer", **sizes)
    draw = random.Random(seed)
    expressions = [f"{a}*{b}" for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(expressions)
    questions = [{"input": f"{one}=", "output": calculate(one)} for one in expressions]
    _write(folder / "train.jsonl", questions[:4000])
    _write(folder / "val.jsonl", questions[4000:4200])
    _write(folder / "sft.jsonl", [_demonstration(one, draw) for one in expressions[4200:]])


def _demonstration(expression: str, draw: random.Random) -> dict[str, Any]:
    turns = [f"{expression}="]
    if draw.random() < 0.5:
        turns += [f"{expression}{CALL}", calculate(expression), calculate(expression)]
    else:
        turns += [str(draw.randint(100, 9801))]
    roles = ("user", "assistant")  # the calculator's words come as the user's: the template has no role for tools
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make_task(Path(sys.argv[1]))
