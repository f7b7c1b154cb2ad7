"""The demo's untrained models, and its end: the most likely answers of a model, asked from its folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mcore.cli.train.demo import DISTILL, FOLDERS, GRPO, VISION, make_untrained
from grpo_mcore.families import check_settings, read_hf_config, shape_of
from grpo_mcore.families.known import known_config
from grpo_mcore.recipe import layout_findings, load_recipe, teacher_policies, uses_images
from grpo_mcore.tools.demo.arithmetic import make_arithmetic_task, make_base_config
from grpo_mcore.tools.demo.colours import make_colour_task, named
from grpo_mcore.tools.demo.demo import Answers, Course, ask, courses_png, learned, read_course


def test_a_problem_that_only_the_later_model_solves_is_shown() -> None:
    problems = ["01+01=", "07+05=", "09+09="]
    before = Answers(problems, ["002", "002", "008"], [True, False, False])
    after = Answers(problems, ["002", "012", "018"], [True, True, True])
    assert learned(before, after) == ("07+05=", "002", "012")
    assert learned(after, before) is None
    assert (before.accuracy, after.accuracy) == (pytest.approx(1 / 3), 1.0)


def test_an_untrained_model_answers_every_problem(tmp_path: Path) -> None:
    task = make_arithmetic_task(tmp_path / "task", num_val=20)
    make_base_config(tmp_path / "model", task.tokenizer, num_layers=1)
    found = ask(tmp_path / "model", task.val)
    assert len(found.problems) == len(found.answers) == len(found.right) == 20
    assert found.accuracy < 0.3


@pytest.mark.parametrize("recipe", [recipe for recipe in FOLDERS if recipe != VISION])
def test_the_untrained_model_fits_its_recipe(tmp_path: Path, recipe: str) -> None:
    """The recipe trains what the demo makes, and counts its parameters as transformers does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = load_recipe(recipe).config
    assert Path(config.policy.model_name).is_relative_to(FOLDERS[recipe])
    task = make_arithmetic_task(tmp_path / "task", num_val=1)
    _, parameters = make_untrained(recipe, tmp_path / "untrained", task.tokenizer, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "untrained")
    biases = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert parameters == sum(value.numel() for value in (*model.parameters(), *biases))
    assert AutoTokenizer.from_pretrained(tmp_path / "untrained").vocab_size <= model.config.vocab_size
    shape = shape_of(read_hf_config(tmp_path / "untrained"))
    known = known_config(config.policy.model_name)
    assert known is not None and replace(shape_of(known), max_positions=shape.max_positions) == shape
    check_settings(shape, config.policy.megatron_cfg)
    assert not layout_findings(config, shape)
    assert (shape.mamba is not None) == (shape.experts is not None) == (recipe == "grpo-nano-v3-cpu")


def test_the_model_with_images_is_the_one_that_plan_knows(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = load_recipe(VISION).config
    assert Path(config.policy.model_name).is_relative_to(FOLDERS[VISION]) and uses_images(config)
    make_colour_task(tmp_path / "task", tmp_path / "base", rows=8)
    shape, known = shape_of(read_hf_config(tmp_path / "base")), known_config(config.policy.model_name)
    assert known is not None and shape_of(known) == shape and not layout_findings(config, shape)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "base")) <= shape.vocab_size
    rows = [json.loads(line) for line in (tmp_path / "task" / "train.jsonl").read_text().splitlines()]
    assert len({row["input"] for row in rows}) == 1 and len({row["image"] for row in rows}) == 8
    assert {named(f"{row['output']} ", row["output"]) for row in rows} == {1.0} and named("red", "blue") == 0.0


def test_a_course_says_what_it_took_to_reach_a_goal(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "prefix": "validation", "accuracy": 0.3},
        {"step": 1, "prefix": "train", "tokens": 100.0, "timing/total": 1.5},
        {"step": 2, "prefix": "train", "tokens": 50.0, "timing/total": 0.5},
        {"step": 2, "prefix": "validation", "accuracy": 0.9},
        {"step": 3, "prefix": "train", "tokens": 50.0, "timing/total": 1.0},
        {"step": 3, "prefix": "validation", "accuracy": 0.8},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    course = read_course(tmp_path / "metrics.jsonl")
    assert course == Course([0.0, 150.0, 200.0], [0.0, 2.0, 3.0], [0.3, 0.9, 0.8])
    assert course.until(0.9) == (150.0, 2.0) and course.until(0.95) is None
    courses_png(tmp_path / "curves.png", {"a": course, "b": course}, "two runs")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_distillation_and_grpo_start_from_the_same_student() -> None:
    """The demo's recipe reads what the first demo made, and validates on the same problems."""
    recipe, grpo = load_recipe(DISTILL).config, load_recipe(GRPO).config
    assert recipe.data.validation == grpo.data.validation
    assert teacher_policies(recipe)["teacher"].model_name == str(FOLDERS[GRPO] / "model")
    assert recipe.policy.model_name == str(FOLDERS[DISTILL] / "base" / "hf")
