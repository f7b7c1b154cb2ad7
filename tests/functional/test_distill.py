"""`grpo-mcore distill`: on given answers, with the loss computed again by transformers, and on the policy's own samples
in NeMo RL's form."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.runs import Run, Task, finished, grpo_recipe, run_here, sft_recipe


def given_answers(task: Task, teacher: Path, **loss: Any) -> dict[str, Any]:
    """Return a recipe of six steps in which an untrained student learns a teacher's distribution at given answers."""
    recipe = sft_recipe(task)
    settings = recipe.pop("sft") | {"on_policy": False, "max_num_steps": 6}
    return recipe | {
        "distillation": settings,
        "loss_fn": {"kl_type": "forward"} | loss,
        "teacher": {"model_name": str(teacher)},
        "checkpointing": {"save_period": 3, "keep_top_k": 5},
    }


@pytest.fixture(scope="module")
def given(task: Task, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished("distill", tmp_path_factory.mktemp("given"), given_answers(task, model))


def test_given_answers_teach_the_teachers_distribution(given: Run, task: Task, model: Path) -> None:
    """The losses of both validations are those of transformers, in float64, of the student before and after."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    networks = {
        folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for folder in (model, task.untrained, given.checkpoints / "hf")
    }
    before, after = given.metrics("validation")
    for folder, line in ((task.untrained, before), (given.checkpoints / "hf", after)):
        losses = []
        for row in map(json.loads, task.val.read_text().splitlines()):
            text = f"<bos><user>{row['input']}<assistant>{row['output']}<eos>"
            tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                q_log, p_log = (
                    networks[name](tokens).logits[0, -3:-1].log_softmax(-1) for name in (model, folder)
                )  # at the digit and at the end
            losses += (q_log.exp() * (q_log - p_log)).sum(-1).tolist()
        assert len(losses) == line["num_tokens"]
        assert sum(losses) / len(losses) == pytest.approx(line["val_loss"], abs=1e-5)
    assert after["val_loss"] < 0.5 * before["val_loss"]
    steps = given.metrics()
    assert [step["step"] for step in steps] == list(range(1, 7))
    assert all(step["timing/teachers"] > 0 and step["num_valid_samples"] == 64 for step in steps)
    assert "Distillation of" in given.out and "Distillation is over" in given.out


def test_given_answers_resume_bit_for_bit(given: Run, task: Task, model: Path, tmp_path: Path) -> None:
    start = given.checkpoints / "step_3"
    resumed = finished("distill", tmp_path, given_answers(task, model), "--resume", str(start))
    assert resumed.outcome() == given.outcome()[3:]


def test_the_student_itself_teaches_nothing(task: Task, tmp_path: Path) -> None:
    recipe = given_answers(task, task.untrained, kl_type="reverse")
    words = ("distillation.max_num_steps=1", "distillation.val_at_start=false", "distillation.val_at_end=false")
    run = finished("distill", tmp_path, recipe, *words)
    (step,) = run.metrics()
    assert step["loss"] == 0 and step["grad_norm"] == 0


def test_own_samples_in_nemo_rls_form_are_a_grpo_run(task: Task, model: Path, tmp_path: Path) -> None:
    """Bit for bit; two optimizer steps, and no pass over log-probs that the loss does not read."""
    ours = grpo_recipe(task, task.untrained)
    ours["grpo"] |= {"max_num_steps": 2}
    theirs = {name: section for name, section in ours.items() if name not in ("grpo", "loss_fn")} | {
        "distillation": ours["grpo"] | {"topk_logits_k": 8},
        "loss_fn": {"kl_type": "mixed", "mixed_kl_weight": 0.5, "zero_outside_topk": False},
        "teacher": {"model_name": str(model), "megatron_cfg": {"tensor_model_parallel_size": 1}},
    }
    ours["grpo"]["adv_estimator"] = {"name": "opd"}
    ours["on_policy_distillation"] = {
        "enabled": True,
        "teacher_model_by_agent_name": {"teacher": str(model)},
        "divergence": {"enabled": True, "kl_type": "mixed", "topk_logits_k": 8},
    }
    runs = [
        run_here(verb, tmp_path / verb, recipe, "policy.train_global_batch_size=8", "checkpointing.enabled=false")
        for verb, recipe in (("train", ours), ("distill", theirs))
    ]
    for run in runs:
        assert run.code == 0, run.err
        assert "timing/logprobs" not in run.metrics()[0]
        assert f"== On-policy distillation of {task.untrained} =" in run.out
        assert re.search(rf"^  teachers +{re.escape(str(model))}$", run.out, re.MULTILINE)
    assert runs[0].outcome() == runs[1].outcome() and runs[1].metrics()[0]["loss"] > 0


def test_a_check_starts_nothing(task: Task, model: Path, tmp_path: Path) -> None:
    checked = run_here("distill", tmp_path, given_answers(task, model), "--check")
    assert checked.code == 0 and "all checks passed; 6 steps are left" in checked.out
