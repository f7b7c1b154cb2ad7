"""Rollouts without training: the model's samples on a recipe's prompts, scored, as a rollouts file of NeMo Gym's form.

What a Gym's agents play is written as they send it. Samples without a reward go to NAME_failures.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.algorithms.engines.policy_endpoint import open_endpoint
from grpo_mcore.algorithms.engines.sampling_config import sampling_of, turn_limits
from grpo_mcore.algorithms.rollouts.rollouts import Rollouts
from grpo_mcore.algorithms.setup import check_run, start_cluster, start_engines, start_environments, wait_until_ready
from grpo_mcore.data import DataError, build_task_data, load_tokenizer
from grpo_mcore.data.gym.collected import failure, rollout_line
from grpo_mcore.data.gym.whole_file import WholeFile
from grpo_mcore.environments.nemo_gym import GymOutcome
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.group import Group

IN_FLIGHT = 4
"""Steps' worth of prompts that are under way at a time."""

OWN = ("messages", "task_name", "uid", "tools", "unusable")


@dataclass
class Collected:
    """What came out. `rewards`: their sum over `rows`."""

    output: Path
    failures: Path
    prompts: int = 0
    rows: int = 0
    failed: int = 0
    rewards: float = 0.0
    first_failure: str = ""

    def __str__(self) -> str:
        mean = f", mean reward {self.rewards / self.rows:.4g}" if self.rows else ""
        text = f"{self.prompts} prompts, {self.rows} rollouts in {self.output}{mean}"
        if self.failed:
            text += f"\n{self.failed} without a reward, in {self.failures}; the first: {self.first_failure}"
        return text


def collect(
    config: MasterConfig,
    output: Path,
    *,
    num_prompts: int | None = None,
    generations: int | None = None,
    validation: bool = False,
    token_ids: bool = False,
    on_group: Callable[[Group], None] = lambda group: None,
) -> Collected:
    """Samples of policy.model_name on the first `num_prompts` training prompts (None: all), or validation prompts with
    the sampling of validation; `generations` of each, None: as many as the recipe says.

    The file appears whole or not at all. Raises what a run's start raises, DataError where there is no prompt.
    """
    model = check_run(config)
    names = config.policy.tokenizer
    tokenizer = load_tokenizer(names.name, names.chat_template, names.chat_template_kwargs)
    longest = min(config.data.max_input_seq_length, config.policy.generation.vllm_cfg.max_model_len)
    data = build_task_data(config.data.train, config.data.validation, tokenizer, longest)
    dataset, env_names = (data.validation, data.val_env_names) if validation else (data.train, data.env_names)
    if dataset is None:
        raise DataError("there is no validation data: set data.validation, or leave --validation out")
    grpo = config.grpo
    count = generations or (grpo.val_num_generations_per_prompt if validation else grpo.num_generations_per_prompt)
    failures = output.with_name(output.stem + "_failures.jsonl")
    found = Collected(output, failures)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collect-")))
        cluster = stack.enter_context(start_cluster(config, logs))
        environments = start_environments(config, cluster, env_names)
        engines = start_engines(config, cluster, model, None)
        workers = {worker.name: worker for worker in environments.values()}
        wait_until_ready(
            config, cluster, [*engines.all_hosts(), *workers.values()], "start of engines and environments"
        )
        engines.endpoint = open_endpoint(config, engines, logs)
        stack.enter_context(closing(engines))
        results: dict[tuple[str, int], GymOutcome] = {}
        rollouts = Rollouts(
            engines,
            environments,
            tokenizer,
            turn_limits(config),
            seed=grpo.seed,
            on_outcome=lambda outcome: results.update({(outcome.uid, outcome.generation_index): outcome}),
        )
        sampling = sampling_of(config.policy.generation, tokenizer.eos_token_id, validation=validation)
        kept, lost = stack.enter_context(WholeFile(output)), stack.enter_context(WholeFile(failures))
        prompts = _usable(dataset, num_prompts)
        under_way = 0
        while True:
            while under_way < IN_FLIGHT * grpo.num_prompts_per_step and (prompt := next(prompts, None)) is not None:
                rollouts.dispatch([prompt], sampling, generations=count, step=0)
                under_way += 1
            if not under_way:
                break
            group = rollouts.next_group()
            under_way -= 1
            found.prompts += 1
            agent = env_names[group.prompt["task_name"]] or ""
            shown = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            row = dataset.dataset[group.prompt["idx"]]
            for line in _lines(group, row, results, engines, agent, shown, config.policy.model_name, token_ids):
                _note(found, line, kept, lost)
            on_group(group)
        if not found.prompts:
            raise DataError("there is no usable prompt to collect rollouts of")
        if not found.failed:
            lost.discard()
    return found


def _usable(dataset: Any, limit: int | None) -> Iterator[DatumSpec]:
    count = 0
    for index in range(len(dataset)):
        if limit is not None and count >= limit:
            return
        if dataset.usable(index):
            count += 1
            yield dataset[index]


def _lines(
    group: Group,
    row: Mapping[str, Any],
    results: dict[tuple[str, int], GymOutcome],
    engines: EngineGroup,
    agent: str,
    sampling: Mapping[str, float],
    model: str,
    token_ids: bool,
) -> Iterator[dict[str, Any]]:
    """A line for each sample of a group; `row`: that of its prompt."""
    for index, (sample, score) in enumerate(zip(group.samples, group.scores, strict=True)):
        outcome = results.pop((group.uid, index), None)
        if outcome is not None:
            task = group.prompt["extra_env_info"]["gym_task"]
            indices = {"_ng_task_index": group.prompt["idx"], "_ng_rollout_index": index}
            yield outcome.result if outcome.result is not None else {**task, **indices, **failure(score)}
            continue
        messages = row["messages"]
        if messages[-1]["role"] == "assistant":  # its answer, which is the truth
            messages = messages[:-1]
        truth = group.prompt["extra_env_info"].get("ground_truth")
        task = {key: value for key, value in row.items() if key not in OWN}
        task |= {} if truth is None else {"expected_answer": truth}
        yield rollout_line(
            messages,
            engines.cluster.fetch(sample.ref),
            score,
            task=task,
            task_index=group.prompt["idx"],
            agent=agent,
            sampling=sampling,
            model=model,
            token_ids=token_ids,
        )


def _note(found: Collected, line: dict[str, Any], kept: WholeFile, lost: WholeFile) -> None:
    text = json.dumps(line, ensure_ascii=False).encode() + b"\n"
    if line.get("_ng_failure_class") is None:
        kept.write(text)
        found.rows += 1
        found.rewards += line["reward"]
        return
    lost.write(text)
    found.failed += 1
    found.first_failure = found.first_failure or str(line.get("_ng_failure_message"))
