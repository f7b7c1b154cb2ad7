"""A GRPO run under Ray for families that the other whole runs do not train: engine and policy agree after each refit,
and transformers reads the export."""

from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model
from tests.functional.runs import Task, grpo_recipe, run_command

FAMILIES = (
    "glm4_moe",
    "moonlight",
    "glm4_moe_lite",
    "nemotron_h_latent",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "minimax_m2",
    "gemma3_text",
    "gemma3",
    "gpt_oss",
)


@pytest.mark.every_state
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_under_ray_keeps_engine_and_policy_together(tmp_path: Path, task: Task, family: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    make_tiny_model(family, folder, **ENGINE_SIZES.get(family, {}) | {"vocab_size": 32, "eos_token_id": 2})
    make_tokenizer(folder)
    recipe = grpo_recipe(task, folder)
    recipe["policy"] |= {"refit_verify": "full"}
    recipe["env"] = {"tests.functional.worlds:Talkative": {"each": 1.0}}
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 1}
    run = run_command("train", tmp_path, recipe, "grpo.max_num_steps=3", "checkpointing.save_period=3")
    assert run.code == 0, run.err
    lines = run.metrics()
    errors = [line["token_mult_prob_error"] for line in lines]
    assert len(lines) == 3 and max(errors) <= 1.001
    assert any(line["grad_norm"] > 0 for line in lines)
    out = tmp_path / "exported"
    assert main(["export", str(run.checkpoints), "--output", str(out)]) == 0
    _, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not found["missing_keys"] and not found["mismatched_keys"]
