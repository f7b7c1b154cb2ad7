"""The TRL side of `learning.py`: train with TRL's GRPOTrainer and print accuracy by step as a line of JSON.

Runs in the environment that `learning.py` makes. Imports nothing of grpo_mcore, so that the two sides share no code.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Row = dict[str, str]


def right(answer: str, truth: str) -> float:
    return float(answer.isdecimal() and int(answer) == int(truth))


class Validation(TrainerCallback):
    """Samples one answer to each held-out problem every so many steps. A step is `updates` optimizer steps."""

    def __init__(self, tokenizer: Any, rows: list[Row], settings: dict[str, Any]) -> None:
        self.tokenizer, self.rows, self.settings = tokenizer, rows, settings
        self.accuracy: dict[int, float] = {}
        self.seconds: dict[int, float] = {}  # of training, without validations
        self.spent, self.since = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.validate(0, given["model"])
        self.since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        step, rest = divmod(state.global_step, self.settings["updates"])
        if rest == 0 and step % self.settings["every"] == 0:
            self.spent += time.perf_counter() - self.since
            self.validate(step, given["model"])
            self.since = time.perf_counter()

    def validate(self, step: int, model: Any) -> None:
        chats = [[{"role": "user", "content": row["input"]}] for row in self.rows]
        texts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        prompts = self.tokenizer(texts, add_special_tokens=False, return_tensors="pt")  # all of one length
        was_training = model.training
        model.eval()
        with torch.inference_mode():
            found = model.generate(
                **prompts, do_sample=True, temperature=self.settings["temperature"], top_p=1.0, top_k=0,
                max_new_tokens=self.settings["max_new_tokens"],
            )  # fmt: skip
        model.train(was_training)
        answers = self.tokenizer.batch_decode(found[:, prompts["input_ids"].size(1) :], skip_special_tokens=True)
        scores = [right(answer, row["output"]) for answer, row in zip(answers, self.rows, strict=True)]
        self.accuracy[step], self.seconds[step] = sum(scores) / len(scores), self.spent


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train as the settings say. Return {accuracy, seconds}, each by step."""
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    validation = Validation(tokenizer, _rows(settings["validation"]), settings)
    rows = [
        {"prompt": [{"role": "user", "content": row["input"]}], "output": row["output"]}
        for row in _rows(settings["prompts"])
    ]

    def reward(completions: list[Any], output: list[str], **_: Any) -> list[float]:
        return [right(answer[0]["content"], truth) for answer, truth in zip(completions, output, strict=True)]

    batch = settings["optimizer_batch"]
    config = GRPOConfig(
        output_dir=settings["work"],
        seed=settings["seed"],
        shuffle_dataset=False,  # the prompts come in our run's order
        max_steps=settings["steps"] * settings["updates"],
        num_generations=settings["generations"],
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        steps_per_generation=settings["updates"],
        num_iterations=1,
        max_completion_length=settings["max_new_tokens"],
        temperature=settings["temperature"],
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=settings["clip"],
        loss_type="bnpo",  # the mean over the tokens of an optimizer step
        scale_rewards="group",
        max_grad_norm=settings["clip_grad"],
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=settings["betas"], eps=settings["eps"])
    rates = [rate for rate in settings["rates"] for _ in range(settings["updates"])]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rates[min(update, len(rates) - 1)])
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[validation],
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    return {"accuracy": validation.accuracy, "seconds": validation.seconds}


def _rows(path: str) -> list[Row]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
