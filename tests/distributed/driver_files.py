"""The files of a checkpoint that the driver writes."""

import json
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.recipe import MegatronConfig
from grpo_mcore.tools.parity.rank import LayoutCase, policy_config
from tests.distributed.adapter_cases import PEFT
from tests.recipes import small_recipe

TEMPLATE = "{% for m in messages %}w9 {{ m.content }} w7 {% endfor %}{% if add_generation_prompt %}w9 {% endif %}"


def driver_files(
    folder: Path, model: Path, case: LayoutCase, peft: dict[str, Any] | None = None, tokenizer: Path | None = None
) -> Path:
    """Write the files of a checkpoint that the driver writes."""
    policy = policy_config(model, case)
    if tokenizer is not None:
        policy.tokenizer.name, policy.tokenizer.chat_template = str(tokenizer), TEMPLATE
    plain = MegatronConfig()
    policy.megatron_cfg.optimizer, policy.megatron_cfg.scheduler = plain.optimizer, plain.scheduler
    policy.megatron_cfg.peft = policy.megatron_cfg.peft.model_copy(update=(PEFT | peft) if peft is not None else {})
    recipe = small_recipe(
        4, 2,
        policy=policy.model_dump() | {"train_global_batch_size": 8, "train_micro_batch_size": 1},
        data={"train": [{"data_path": "data.jsonl"}]},
        env={"math": {}},
        cluster={"num_nodes": 1, "gpus_per_node": case.world_size},
    )  # fmt: skip
    target = folder / "step_1"
    target.mkdir(parents=True)
    info = {"save_state": {"current_step": 1}, "metrics": {"loss": 0.5, "val:accuracy": 0.25}}
    (target / "training_info.json").write_text(json.dumps(info))
    (target / "config.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    return target
