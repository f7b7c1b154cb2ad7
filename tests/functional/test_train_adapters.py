"""GRPO with LoRA: the engine generates from merged weights, or applies the adapters itself; the reference is the model
without adapters; a run resumes from its checkpoint."""

from pathlib import Path

from tests.functional.runs import Task, finished, grpo_recipe


def test_adapters_are_trained_refitted_and_resumed(tmp_path: Path, task: Task) -> None:
    recipe = grpo_recipe(task, task.untrained)
    recipe["policy"] |= {"precision": "float32", "refit_verify": "full"}
    recipe["loss_fn"] = {"reference_policy_kl_penalty": 0.1}
    megatron = recipe["policy"]["megatron_cfg"]
    megatron["peft"] = {"enabled": True, "dim": 4, "alpha": 8.0}
    megatron["optimizer"] |= {"lr": 3.0e-2, "min_lr": 3.0e-2}
    megatron["scheduler"] |= {"lr_warmup_init": 3.0e-2}
    recipe["env"] = {"tests.functional.worlds:Talkative": {"each": 1.0}}
    short = finished("train", tmp_path / "a", recipe, "grpo.max_num_steps=2", "checkpointing.save_period=2")
    first, second = short.metrics()
    # The adapters add nothing before the first update. After it engine and policy agree, and differ from the reference.
    assert first["grad_norm"] > 0 and abs(first["kl_penalty"]) < 1e-6 < second["kl_penalty"]
    assert max(line["token_mult_prob_error"] for line in (first, second)) < 1.0001
    megatron["peft"]["refit"] = "adapters"
    longer = finished("train", tmp_path / "a", recipe, "grpo.max_num_steps=3", "--resume")
    last = longer.metrics()[-1]
    assert last["step"] == 3 and last["token_mult_prob_error"] < 1.0001 and last["kl_penalty"] > 0
