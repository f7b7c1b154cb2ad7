"""`grpo-mcore sft RECIPE [key=value ...]`: fine-tune a model on examples, and export it to a Hugging Face folder."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from grpo_mcore.recipe import MasterConfig, load_recipe


def run(args: argparse.Namespace) -> int:
    """Fine-tune as the recipe says."""
    fine_tune(load_recipe(args.recipe, args.overrides).config)
    return 0


def fine_tune(config: MasterConfig) -> Path:
    """Run once. Return the folder of the model in Hugging Face's format: `hf` in checkpointing.checkpoint_dir."""
    from grpo_mcore.algorithms.checkpointing.checkpoints import CheckpointManager
    from grpo_mcore.algorithms.lifecycle.checks import check_model
    from grpo_mcore.algorithms.setup import start_cluster, start_policy, wait_until_ready
    from grpo_mcore.algorithms.sft import sft_train
    from grpo_mcore.data import build_dataloader, build_task_data, build_train_dataloader, load_tokenizer
    from grpo_mcore.observe import Logger, RunConsole
    from grpo_mcore.recipe import batch_equation

    model = check_model(config)
    config.policy.generation.temperature = 1.0  # the log-probs of the data, not those of a sampler
    settings, tokenizer_config = config.sft, config.policy.tokenizer
    tokenizer = load_tokenizer(
        tokenizer_config.name, tokenizer_config.chat_template, tokenizer_config.chat_template_kwargs
    )
    data = build_task_data(
        config.data.train, config.data.validation, tokenizer, config.policy.max_total_sequence_length, "sft_processor"
    )
    train = build_train_dataloader(data.train, config.data, config.policy.train_global_batch_size, settings.seed)
    validation = data.validation and build_dataloader(
        data.validation, settings.val_global_batch_size, False, settings.seed, drop_last=False
    )
    logger, console = Logger(config.logger), RunConsole()
    target = Path(config.checkpointing.checkpoint_dir, "hf").resolve()
    with closing(logger), start_cluster(config, logger.log_dir) as cluster:
        policy = start_policy(config, cluster, model)
        wait_until_ready(config, cluster, policy.workers)
        console.banner(
            f"SFT of {config.policy.model_name}",
            {"batch": batch_equation(config, "sft"), "layout": policy.layout.describe(), "logs": logger.log_dir},
        )
        sft_train(policy, train, validation, logger, CheckpointManager(config.checkpointing), config, console)
        policy.export_hf(str(target))
    console.summary("SFT is over", {"model": target}, {"metrics": logger.log_dir / "metrics.jsonl"})
    return target
