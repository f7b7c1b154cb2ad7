"""The arithmetic task: disjoint problems, correct truths, wrong demonstrations, a tokenizer and a model."""

import json
import random
from pathlib import Path

import pytest
import torch

from grpo_mcore.data import build_task_data, load_tokenizer
from grpo_mcore.tools.demo.arithmetic import ArithmeticTask, demonstration, make_arithmetic_task, make_base_config


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> ArithmeticTask:
    return make_arithmetic_task(tmp_path_factory.mktemp("task"), seed=1, num_val=500, demonstrations_per_problem=2)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def total(row: dict[str, str]) -> int:
    first, second = row["input"].removesuffix("=").split("+")
    return int(first) + int(second)


def test_problems_are_complete_and_held_out_ones_are_not_trained_on(task):
    train, val, sft = ({row["input"] for row in rows(path)} for path in (task.train, task.val, task.sft))
    assert len(rows(task.train)) == len(train) == 9500 and len(rows(task.val)) == len(val) == 500
    assert not train & val and sft == train
    assert all(int(row["output"]) == total(row) for path in (task.train, task.val) for row in rows(path))
    sums, products = (rows(task.mixed)[part] for part in (slice(9500), slice(9500, None)))
    assert sums == rows(task.train) and len(products) == 9500 // 3
    assert all(int(a) * int(b) == int(row["output"]) for row in products for a, b in [row["input"][:-1].split("*")])


def test_wrong_share_of_the_demonstrations_have_independent_wrong_digits(tmp_path):
    task = make_arithmetic_task(tmp_path, seed=1, demonstrations_per_problem=2, wrong_share=0.55, off_by_one_share=0.0)
    shown = rows(task.sft)
    assert len(shown) == 2 * 9500
    misses = [[a != b for a, b in zip(row["output"], f"{total(row):03d}", strict=True)] for row in shown]
    assert abs(sum(map(any, misses)) / len(misses) - 0.55) < 0.02
    one_digit = 1 - 0.45 ** (1 / 3)
    for place in range(3):
        assert abs(sum(miss[place] for miss in misses) / len(misses) - one_digit) < 0.02
    assert abs(sum(map(all, misses)) / len(misses) - one_digit**3) < 0.01


def test_the_seed_determines_the_files(task, tmp_path):
    again = make_arithmetic_task(tmp_path / "again", seed=1, num_val=500, demonstrations_per_problem=2)
    other = make_arithmetic_task(tmp_path / "other", seed=2, num_val=500, demonstrations_per_problem=2)
    for name in ("train", "val", "sft"):
        assert getattr(again, name).read_bytes() == getattr(task, name).read_bytes()
        assert getattr(other, name).read_bytes() != getattr(task, name).read_bytes()


def test_most_demonstrations_are_wrong_by_one(task):
    misses = [int(row["output"]) - total(row) for row in rows(task.sft)]
    assert set(misses) == {0, 1}
    assert abs(misses.count(1) / len(misses) - 0.6) < 0.02, "the most likely answer is wrong"


def test_no_noise_means_right_answers():
    assert demonstration(47, 35, random.Random(0), 0.0) == "082"
    assert demonstration(47, 35, random.Random(0), 0.0, 1.0) == "083"
    assert demonstration(47, 35, random.Random(0), 1.0) != "082"


def test_text_has_one_token_per_character(task):
    tokenizer = load_tokenizer(str(task.tokenizer))
    data = build_task_data([{"data_path": str(task.val)}], [], tokenizer, 16).train
    prompt = data[0]["message_log"][0]
    problem = rows(task.val)[0]["input"]
    assert tokenizer.convert_ids_to_tokens(prompt["token_ids"].tolist()) == [
        "<bos>", "<user>", *problem, "<assistant>",
    ]  # fmt: skip
    assert data.excluded.count == 0
    answer = tokenizer("082<eos>", add_special_tokens=False)["input_ids"]
    assert len(answer) == 4 and answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer, skip_special_tokens=True) == "082"
    assert tokenizer.decode(tokenizer("1 + 2 = 3", add_special_tokens=False)["input_ids"]) == "1 + 2 = 3"


def test_the_base_model_loads_and_has_the_documented_size(task, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    count = make_base_config(tmp_path / "model", task.tokenizer, seed=3)
    assert 500_000 <= count <= 5_000_000
    config = AutoConfig.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (config.model_type, config.head_dim, config.tie_word_embeddings) == ("qwen3", 32, True)
    assert config.vocab_size == len(tokenizer) and config.eos_token_id == tokenizer.eos_token_id
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    assert (tmp_path / "model" / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert next(model.parameters()).dtype == torch.float32 and model.num_parameters() == count

    make_base_config(tmp_path / "again", task.tokenizer, seed=3)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "model" / "model.safetensors"
    ).read_bytes()
