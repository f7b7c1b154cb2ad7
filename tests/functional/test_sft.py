"""Supervised fine-tuning from the command line, in process."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.functional.runs import Run, Task


def test_the_loss_falls(sft_run: Run) -> None:
    assert sft_run.code == 0, sft_run.err
    losses = [line["loss"] for line in sft_run.metrics()]
    assert len(losses) == 20
    assert losses[0] == pytest.approx(math.log(32), abs=0.3)  # a random model over 32 tokens
    assert losses[-1] < 0.6  # ln(2) / 2: the digit is open, the end after it is certain
    before, after = sft_run.metrics("validation")
    assert (before["step"], after["step"]) == (0, 20)
    assert before["num_tokens"] == after["num_tokens"] == 64  # 32 x (digit, end)
    assert after["val_loss"] < 0.6


def test_the_exported_model_has_the_loss_of_the_policy(sft_run: Run, task: Task) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder, line in zip((task.untrained, sft_run.checkpoints / "hf"), sft_run.metrics("validation"), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        losses = []
        for row in map(json.loads, task.val.read_text().splitlines()):
            text = f"<bos><user>{row['input']}<assistant>{row['output']}<eos>"
            tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = model(tokens).logits[0, -3:-1].log_softmax(-1)
            losses += (-logprobs.gather(-1, tokens[0, -2:, None])).flatten().tolist()
        assert len(losses) == line["num_tokens"]
        assert sum(losses) / len(losses) == pytest.approx(line["val_loss"], abs=1e-4)


def test_what_the_user_sees(sft_run: Run) -> None:
    for text in ("64 samples = DP 1 x 64 samples", "of 20  loss", "step 20: val_loss", str(sft_run.checkpoints / "hf")):
        assert text in sft_run.out
    assert sft_run.err == ""
