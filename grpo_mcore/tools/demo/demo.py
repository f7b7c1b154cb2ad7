"""Results of the demos: the answers of an exported model to the held-out sums, by transformers, and the curves of
several runs in one picture."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_mcore.observe import read_metrics

ANSWER_TOKENS = 4
"""Three digits and the end of the answer."""


@dataclass(frozen=True)
class Answers:
    """The most likely answer to each problem. `right` says whether it is correct."""

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


@dataclass(frozen=True)
class Course:
    """Held-out accuracy at each validation of a run, with the tokens (of prompts and answers) that it had trained on by
    then, and its seconds without start and validations."""

    tokens: list[float]
    seconds: list[float]
    accuracy: list[float]

    def until(self, goal: float) -> tuple[float, float] | None:
        """Return tokens and seconds until a validation had this accuracy; None if none had."""
        rows = zip(self.tokens, self.seconds, self.accuracy, strict=True)
        return next(((tokens, seconds) for tokens, seconds, accuracy in rows if accuracy >= goal), None)


def read_course(metrics: Path) -> Course:
    """Return the course of the run with this metrics.jsonl."""
    tokens, seconds = {0: 0.0}, {0: 0.0}
    for row in read_metrics(metrics, "train"):
        step = row["step"]
        tokens[step] = tokens[step - 1] + row["tokens"]
        seconds[step] = seconds[step - 1] + row["timing/total"]
    rows = read_metrics(metrics, "validation")
    steps = [row["step"] for row in rows]
    return Course(
        [tokens[step] for step in steps], [seconds[step] for step in steps], [row["accuracy"] for row in rows]
    )


def courses_png(path: Path, courses: Mapping[str, Course], title: str) -> None:
    """Draw the accuracy of runs by tokens and by seconds, side by side. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for run, course in courses.items():
        left.plot([tokens / 1000 for tokens in course.tokens], course.accuracy, "o-", markersize=3, label=run)
        right.plot(course.seconds, course.accuracy, "o-", markersize=3, label=run)
    left.set(xlabel="thousand tokens trained on", ylabel="held-out accuracy", ylim=(-0.03, 1.03))
    right.set(xlabel="seconds")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
