"""Make the model and the demonstrations of the products: `python -m examples.verifiers_task.make_task FOLDER`.

FOLDER gets `untrained` (a small random Qwen3 with its tokenizer) and `sft.jsonl`. Half of the demonstrations call the
tool, the others guess; half of those that write a note for another context write down the tool's result, the others any
number. What pays is for GRPO to find out.
"""

import json
import random
import sys
from pathlib import Path

from grpo_mcore.tools.demo.arithmetic import make_base_config, make_tokenizer


def make_task(folder: Path, seed: int = 0) -> None:
    """Write model and demonstrations to `folder`; the same for the same seed."""
    make_tokenizer(folder / "tokenizer", "0123456789*=?#")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_layers": 3, "num_heads": 2, "num_kv_heads": 2}
    make_base_config(folder / "untrained", folder / "tokenizer", **sizes)
    draw, rows = random.Random(seed), []
    for number in range(6000):
        a, b, guess = draw.randint(10, 99), draw.randint(10, 99), str(draw.randint(100, 9801))
        value, question = str(a * b), [f"{a}*{b}=", f"{a}*{b}?"]
        note = draw.choice((value, guess))
        rows += [
            [question[0], guess],
            [*question, value, value],
            [*question, f"{value}#", note],
            [f"{guess}=", guess],
        ][number % 4 :][:1]
    conversations = [
        [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(row)] for row in rows
    ]
    (folder / "sft.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in conversations))


if __name__ == "__main__":
    make_task(Path(sys.argv[1]))
