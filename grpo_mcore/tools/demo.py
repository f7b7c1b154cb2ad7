"""Asks an exported model for its answers to the demo's held-out sums, with transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ANSWER_TOKENS = 4
"""Three digits and the end of the answer."""


@dataclass(frozen=True)
class Answers:
    """The most likely answer to each problem. `right`: whether it is the truth."""

    problems: list[str]
    answers: list[str]
    right: list[bool]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


def ask(model: Path, problems: Path) -> Answers:
    """Answer every problem of a JSONL file with transformers, by the most likely tokens. `model`: a Hugging Face
    folder, `problems`: rows {"input": "37+45=", "output": "82"}."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    network = AutoModelForCausalLM.from_pretrained(str(model))
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").split("\n") if line]
    chats = [[{"role": "user", "content": row["input"]}] for row in rows]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(texts, add_special_tokens=False, return_tensors="pt")["input_ids"]  # all of one length
    start = tokens.size(1)
    with torch.inference_mode():
        for _ in range(ANSWER_TOKENS):
            chosen = network(tokens).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, chosen], 1)
    ends = tokenizer.eos_token
    answers = [text.partition(ends)[0] for text in tokenizer.batch_decode(tokens[:, start:])]
    right = [
        answer.isdecimal() and int(answer) == int(row["output"]) for answer, row in zip(answers, rows, strict=True)
    ]
    return Answers([row["input"] for row in rows], answers, right)


def learned(before: Answers, after: Answers) -> tuple[str, str, str] | None:
    """Return (problem, answer before, answer after) of the first problem that only the later model solves, or None."""
    pairs = enumerate(zip(before.right, after.right, strict=True))
    first = next((index for index, (was, now) in pairs if now and not was), None)
    return None if first is None else (before.problems[first], before.answers[first], after.answers[first])
