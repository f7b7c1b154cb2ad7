"""`grpo-mcore train RECIPE [key=value ...] [--resume [PATH]]`: trains with GRPO."""

from __future__ import annotations

import argparse
from contextlib import closing

from grpo_mcore.recipe import MasterConfig, load_recipe

STOPPED_EARLY = 75
"""Exit code of a run that was asked to stop and has saved: the same command with --resume goes on (EX_TEMPFAIL)."""


def run(args: argparse.Namespace) -> int:
    """Trains as the recipe says."""
    summary = train(load_recipe(args.recipe, args.overrides).config, resume=args.resume)
    return STOPPED_EARLY if summary["stopped_early"] else 0


def train(config: MasterConfig, resume: str | bool | None = None) -> dict[str, object]:
    """One run from its recipe to its summary, which it returns. Ends everything that it started, also on errors.

    What can be wrong with model, data and checkpoint shows before anything starts.
    """
    from grpo_mcore.algorithms.checkpoints import CheckpointManager
    from grpo_mcore.algorithms.grpo import grpo_train, setup
    from grpo_mcore.algorithms.setup import (
        check_engines,
        check_model,
        start_cluster,
        start_environments,
        wait_until_ready,
    )
    from grpo_mcore.algorithms.stopping import on_signal, sigterm_interrupts
    from grpo_mcore.data import TurnTemplate, build_task_data, load_tokenizer
    from grpo_mcore.observe import Logger

    _, shape, _ = check_model(config)
    check_engines(config, shape)
    checkpoints = CheckpointManager(config.checkpointing)
    found = checkpoints.find(resume)
    if found is None:
        checkpoints.refuse_to_mix()
    resume = str(found) if found else None
    tokenizer_config = config.policy.tokenizer
    tokenizer = load_tokenizer(
        tokenizer_config.name, tokenizer_config.chat_template, tokenizer_config.chat_template_kwargs
    )
    longest = min(config.data.max_input_seq_length, config.policy.generation.vllm_cfg.max_model_len)
    data = build_task_data(
        config.data.train, config.data.validation, tokenizer, longest, separate=config.data.use_multiple_dataloader
    )
    if config.grpo.max_rollout_turns > 1:
        TurnTemplate(tokenizer)
    with on_signal() as stop, closing(Logger(config.logger, run=checkpoints.log_run(found))) as logger:
        print(f"starting policy and engines (logs: {logger.log_dir}) ...", flush=True)
        try:
            with start_cluster(config, logger.log_dir) as cluster, sigterm_interrupts():
                environments = start_environments(config, cluster, data.env_names | data.val_env_names)
                policy, engines, _, dataloader, val_dataloader, loss_fn, _, checkpointer, save_state, _ = setup(
                    config, tokenizer, data.train, data.validation, cluster=cluster, logger=logger, resume=resume
                )
                distinct = {worker.name: worker for worker in environments.values()}  # tasks may share one
                wait_until_ready(config, cluster, list(distinct.values()), "start of the environments")
                with closing(engines):
                    return grpo_train(
                        policy, engines, dataloader, val_dataloader, tokenizer, loss_fn, environments, environments,
                        logger, checkpointer, save_state, config, stop=stop,
                    )  # fmt: skip
        except BaseException as error:
            if (newest := checkpoints.latest()) is not None:
                error.add_note(f"the last checkpoint is {newest}; `--resume` goes on from there")
            raise
