"""Training of a reward model from the command line, in process: it ranks pairs that it has not seen, and transformers
and the environment read the same scores from its export."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.environments.reward_model.reward_model_worker import Classifier
from grpo_mcore.tools.report.run_files import recorded_run
from tests.functional.runs import Run, Task, assert_one_message, finished, run_here, sft_recipe, write_recipe

SEEN, HELD_OUT = 1000, 200


def pair(draw: random.Random) -> dict[str, Any]:
    """Return a pair of two numbers: the larger one is chosen, its margin is a thousandth of the difference."""
    low, high = sorted(draw.sample(range(100, 1000), 2))
    return {"prompt": f"{draw.randrange(10)}%2=", "chosen": str(high), "rejected": str(low)} | {
        "margin": (high - low) / 1000
    }


def scored(draw: random.Random) -> dict[str, Any]:
    number = draw.randrange(100, 1000)
    return {"input": "1%2=", "output": str(number), "score": str(number / 1000)}  # as text, as of a CSV file


def rm_recipe(task: Task, folder: Path, row: Callable[[random.Random], dict[str, Any]], **rm: Any) -> dict[str, Any]:
    """Return a recipe on rows drawn by chance, 20 steps of 50 an epoch."""
    base, draw, data = sft_recipe(task), random.Random(1), {}
    del base["sft"]
    for part, size in (("train", SEEN), ("validation", HELD_OUT)):
        path = folder / f"{part}.jsonl"
        path.write_text("".join(json.dumps(row(draw)) + "\n" for _ in range(size)))
        data[part] = {"data_path": str(path)} | ({"dataset_name": "BinaryPreferenceDataset"} if row is pair else {})
    settings = {"max_num_epochs": 20, "val_period": 0, "val_at_end": True, "val_batches": None}
    return base | {
        "rm": settings | rm,
        "policy": base["policy"] | {"train_global_batch_size": 50},
        "data": data,
        "checkpointing": {"save_period": 1000},
    }


@pytest.fixture(scope="module")
def ranked(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("rm")
    return finished("rm", folder, rm_recipe(task, folder, pair, max_num_steps=30))


def held_out(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "validation.jsonl").read_text().splitlines()]


def test_held_out_pairs_are_ranked(ranked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = ranked.metrics("validation")
    losses = [math.log1p(math.exp(row["margin"])) for row in held_out(ranked)]
    assert before["loss"] == pytest.approx(sum(losses) / HELD_OUT, abs=1e-6), "the head begins at 0"
    assert before["accuracy"] == 0.0 and after["num_valid_samples"] == after["num_valid_tokens"] / 2 == HELD_OUT
    assert after["accuracy"] >= 0.9
    for text in ("50 pairs = DP 1 x 50 pairs", "bradley-terry", "RM is over"):
        assert text in ranked.out
    assert main(["watch", str(ranked.folder), "--once"]) == 0
    assert "samples of step 30, with their scores" in capsys.readouterr().out
    assert main(["replay", str(ranked.logs), "--step", "30"]) == 1
    assert "is a run of rm: only GRPO" in capsys.readouterr().err
    assert recorded_run(ranked.logs)[1].rm.max_num_steps == 30, "its record has the sections of other algorithms too"


def test_transformers_and_the_environment_read_the_same_scores(ranked: Run) -> None:
    """By which accuracy and loss of the last validation are computed again."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = ranked.checkpoints / "hf"
    served = Classifier(str(model), None, False, None, 40, "cpu", "float32")
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    margins = []
    for row in held_out(ranked):
        chats = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]
            for answer in ("chosen", "rejected")
        ]
        with torch.no_grad():
            chosen, rejected = (network(torch.tensor([served.tokens(chat)])).logits.item() for chat in chats)
        assert served(chats) == pytest.approx([chosen, rejected], abs=1e-5)
        margins.append((chosen - rejected, row["margin"]))
    last = ranked.metrics("validation")[-1]
    assert last["accuracy"] == pytest.approx(sum(margin > 0 for margin, _ in margins) / HELD_OUT)
    assert last["rewards_margin_mean"] == pytest.approx(sum(margin for margin, _ in margins) / HELD_OUT, abs=1e-5)
    losses = [math.log1p(math.exp(wanted - margin)) for margin, wanted in margins]
    assert last["val_loss"] == pytest.approx(sum(losses) / HELD_OUT, abs=1e-5)


@pytest.mark.every_state  # test_dpo.py resumes the same loop
def test_it_goes_on_from_a_checkpoint_bit_for_bit(ranked: Run, task: Task, tmp_path: Path) -> None:
    recipe = rm_recipe(task, tmp_path, pair, max_num_steps=4)
    finished("rm", tmp_path, recipe, "rm.max_num_steps=2")
    resumed = finished("rm", tmp_path, recipe, "--resume")
    assert resumed.outcome() == ranked.outcome()[:4]


def test_a_checkpoint_is_exported_and_a_run_goes_on_from_it(
    ranked: Run, task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, exported = ranked.checkpoints / "step_30", tmp_path / "exported"
    assert main(["export", str(saved), "--output", str(exported)]) == 0
    assert main(["export", str(saved), "--output", str(tmp_path / "adapter"), "--adapter"]) != 0
    assert "the head of one output was trained beside the adapters" in capsys.readouterr().err
    weights = [(folder / "model.safetensors").read_bytes() for folder in (exported, ranked.checkpoints / "hf")]
    assert weights[0] == weights[1] and "bradley-terry of the score" in (exported / "README.md").read_text()
    recipe = rm_recipe(task, tmp_path, pair, max_num_steps=1, val_at_end=False)
    words = ("checkpointing.enabled=false", f"policy.model_name={exported}")
    (begun,) = finished("rm", tmp_path, recipe, *words).metrics("validation")
    assert begun["accuracy"] == ranked.metrics("validation")[-1]["accuracy"]


def test_scores_are_learnt_by_regression(task: Task, tmp_path: Path) -> None:
    words = ("rm.reward_model_type=regression", "rm.max_num_steps=20", "checkpointing.enabled=false")
    words += ("checkpointing.save_hf=last",)
    run = finished("rm", tmp_path, rm_recipe(task, tmp_path, scored), *words)
    before, after = run.metrics("validation")
    squares = [float(row["score"]) ** 2 / 2 for row in held_out(run)]
    assert before["loss"] == pytest.approx(sum(squares) / HELD_OUT, abs=1e-6)
    assert before["num_valid_samples"] == before["num_valid_tokens"] == HELD_OUT and "accuracy" not in before
    assert after["reward_error_mean"] < 0.2 < before["reward_error_mean"]
    assert "50 samples = DP 1 x 50 samples" in run.out and "regression" in run.out
    assert (run.checkpoints / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("row", "word", "message"),
    [
        (pair, "rm.reward_model_type=regression", "holds pairs of answers for DPO and Bradley-Terry reward models"),
        (scored, "rm.val_period=0", "has no pairs of answers"),
        (lambda draw: pair(draw) | {"margin": "much"}, "rm.val_period=0", "its 'margin' must be a finite number"),
        (lambda draw: scored(draw) | {"score": None}, "rm.reward_model_type=regression", "its 'score' must be a fini"),
        (pair, "data.default.processor=preference_processor", "a reward model reads whole conversations"),
    ],
)
def test_bad_input_is_one_message(
    task: Task, tmp_path: Path, row: Callable[[random.Random], dict[str, Any]], word: str, message: str
) -> None:
    recipe = rm_recipe(task, tmp_path, row)
    if "margin" in row(random.Random(0)):
        for part in recipe["data"].values():
            part["dataset_name"] = "BinaryPreferenceDataset"
    run = run_here("rm", tmp_path, recipe, word)
    assert_one_message(run, run.code, message)
    assert run.code != 0 and not (tmp_path / "checkpoints" / "hf").exists()


def test_its_recipe_is_for_no_other_algorithm(task: Task, tmp_path: Path) -> None:
    run = run_here("sft", tmp_path, rm_recipe(task, tmp_path, scored))
    assert_one_message(run, 1, "policy.head: a recipe with a section rm, and none for grpo or dpo, trains a reward")


def test_a_family_without_a_classifier_is_refused_before_the_start(task: Task, tmp_path: Path) -> None:
    from grpo_mcore.tools.demo.tiny_models import make_tiny_model

    make_tiny_model("nemotron_h", tmp_path / "model")
    run = run_here("rm", tmp_path, rm_recipe(task, tmp_path, pair), f"policy.model_name={tmp_path / 'model'}")
    assert_one_message(run, 1, "policy.model_name: transformers has no sequence classifier")


def test_data_check_reads_rows_as_the_run_does(task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path, rm_recipe(task, tmp_path, pair))
    assert main(["data", "check", str(path), "--samples", "1"]) == 0
    out = capsys.readouterr().out
    for text in ("tokens: 12 to 12", "--- prompt, 11 tokens", "--- trained on, 1 tokens"):
        assert text in out
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([rows[0].replace('"margin": ', '"margin": "x", "n": '), *rows[1:]]))
    main(["data", "check", str(path)])
    assert "its 'margin' must be a finite number, got 'x'" in capsys.readouterr().out
