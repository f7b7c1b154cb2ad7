"""`grpo-mcore train RECIPE [key=value ...] [--resume [PATH]]`: trains with GRPO."""

from __future__ import annotations

import argparse

from grpo_mcore.recipe import MasterConfig, load_recipe


def run(args: argparse.Namespace) -> int:
    """Trains as the recipe says."""
    train(load_recipe(args.recipe, args.overrides).config, resume=args.resume)
    return 0


def train(config: MasterConfig, resume: str | bool | None = None) -> dict[str, object]:
    """One run from its recipe to its summary, which it returns. Ends everything that it started, also on errors."""
    from grpo_mcore.algorithms.grpo import grpo_train, setup
    from grpo_mcore.algorithms.setup import start_cluster, start_environments
    from grpo_mcore.data import build_task_data, load_tokenizer
    from grpo_mcore.observe import Logger

    tokenizer_config = config.policy.tokenizer
    tokenizer = load_tokenizer(
        tokenizer_config.name, tokenizer_config.chat_template, tokenizer_config.chat_template_kwargs
    )
    data = build_task_data(
        config.data.train, config.data.validation, tokenizer, config.data.max_input_seq_length
    )
    logger = Logger(config.logger, resume=bool(resume))
    with start_cluster(config, logger.log_dir) as cluster:
        policy, engines, _, dataloader, val_dataloader, loss_fn, _, checkpointer, save_state, _ = setup(
            config, tokenizer, data.train, data.validation, cluster=cluster, logger=logger, resume=resume
        )
        environments = start_environments(config, cluster, data.env_names | data.val_env_names)
        summary = grpo_train(
            policy, engines, dataloader, val_dataloader, tokenizer, loss_fn, environments, environments,
            logger, checkpointer, save_state, config,
        )  # fmt: skip
    logger.close()
    return summary
