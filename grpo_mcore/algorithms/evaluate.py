"""Evaluate models: sample answers to prompts, score them, and average.

Consumes: the prompts of data.validation.
Produces: one line of samples.jsonl for each sample, written as soon as its prompt's group is scored; the scores follow
from these lines alone, so an evaluation that was interrupted goes on where it stopped and gives the same table.

Not here: exporting checkpoints, and the report (tools/evaluation.py).
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.base.text import replaced
from grpo_mcore.cluster import Cluster
from grpo_mcore.data import AllTaskProcessedDataset, DataError, DatumSpec
from grpo_mcore.driver.engines.sampling_config import sampling_of, turn_limits
from grpo_mcore.driver.rollouts.rollouts import Rollouts
from grpo_mcore.driver.run.run import open_sampler, prepare
from grpo_mcore.objective import majority_at_k, mean_interval, pass_at_k, pass_numbers
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.group import Group

logger = logging.getLogger(__name__)

IN_FLIGHT = 256
"""Prompts that are generated or scored at a time."""
PROGRESS_EVERY = 100
"""Prompts between two lines of progress."""

Sample = dict[str, Any]
"""A line of samples.jsonl, see `_samples`."""


class EvalError(ValueError):
    """An evaluation cannot be made, or not into this folder."""


class SampleLog:
    """The samples of an evaluation, in a JSONL file. A prompt's samples with one seed are written together."""

    def __init__(self, path: Path, samples_per_seed: int) -> None:
        """Read what the file holds, and drop groups that an interruption left incomplete. Of samples that were made
        again the last count."""
        self.path = path
        self.groups: dict[tuple[str, int, str], list[Sample]] = {}  # by (model, seed, uid)
        by_prompt: dict[tuple[str, int, str], dict[int, Sample]] = defaultdict(dict)
        for sample in _lines(path):
            by_prompt[sample["model"], sample["seed"], sample["uid"]][sample["index"]] = sample
        self.groups = {
            key: list(samples.values()) for key, samples in by_prompt.items() if len(samples) == samples_per_seed
        }
        partial = path.with_name(f"tmp_{path.name}")
        partial.write_text(
            "".join(_line(sample) for samples in self.groups.values() for sample in samples), encoding="utf-8"
        )
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, samples: Sequence[Sample]) -> None:
        """Write the samples of one prompt with one seed."""
        first = samples[0]
        self.groups[first["model"], first["seed"], first["uid"]] = list(samples)
        self._file.write("".join(map(_line, samples)))
        self._file.flush()

    def is_scored(self, model: str, seed: int, uid: str) -> bool:
        """Return whether the samples of a prompt are there, each with a reward: what failed is tried again."""
        samples = self.groups.get((model, seed, uid), ())
        return bool(samples) and all(sample["reward"] is not None for sample in samples)

    def close(self) -> None:
        self._file.close()


def _lines(path: Path) -> Iterator[Sample]:
    """Yield the lines of a file, if there is one. A line that was not written whole, or is damaged, is left out."""
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():  # a kill may have cut a letter
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _line(sample: Sample) -> str:
    return replaced(json.dumps(sample, ensure_ascii=False)) + "\n"


def evaluate_model(config: MasterConfig, name: str, log: SampleLog, logs: Path) -> set[str]:
    """Sample and score what `log` lacks of the model policy.model_name, or has without a reward. Return the uids of the
    prompts, of which an older log may have more. `name`: name of the model in `log`; `logs`: folder of the workers'
    logs.

    Raises what `prepare` raises, and EvalError if the log has samples of a prompt that is another one now.
    """
    evaluation = config.eval
    only = config.data.model_copy(update={"train": config.data.validation, "validation": []})
    prepared = prepare(config.model_copy(update={"data": only}), algorithm="eval")
    tokenizer = prepared.tokenizer
    assert isinstance(prepared.data.train, AllTaskProcessedDataset)
    prompts = list(prepared.data.train.usable_rows(evaluation.num_prompts))
    if not prompts:
        raise DataError("there is no usable prompt to evaluate on: check data.validation")
    seeds = range(evaluation.seed, evaluation.seed + evaluation.num_seeds)
    questions = {prompt["uid"]: _question(_of_prompt(prompt)) for prompt in prompts}
    missing = {seed: [p for p in prompts if not log.is_scored(name, seed, p["uid"])] for seed in seeds}
    dated = "strftime_now" in str(tokenizer.chat_template)  # prompts say the day, as Llama 3's and GPT-OSS's do
    for (model, _, uid), samples in log.groups.items() if not dated else ():
        if model == name and uid in questions and _question(samples[0]) != questions[uid]:
            raise EvalError(
                f"{log.path} has samples of another prompt {uid}: the data, a prompt file or the chat template was "
                "changed since; choose another eval.save_path, or delete that one"
            )
    count = sum(map(len, missing.values()))
    logger.info("%s: %d prompts x %d seeds, %d to do", name, len(prompts), len(seeds), count)
    if not count:
        return set(questions)
    with open_sampler(prepared, logs, prepared.env_names) as sampler:
        sampling = sampling_of(config.policy.generation, tokenizer, validation=True)
        done = 0
        for seed, unsampled in missing.items():
            rollouts = Rollouts(sampler.engines, sampler.task_to_env, tokenizer, turn_limits(config), seed=seed)
            tests = evaluation.num_tests_per_prompt
            for group in rollouts.each_group(unsampled, sampling, generations=tests, most=IN_FLIGHT):
                log.add(_samples(group, name, seed, sampler.cluster))
                done += 1
                if done % PROGRESS_EVERY == 0 or done == count:
                    logger.info("%s: %d of %d prompts", name, done, count)
    return set(questions)


def _of_prompt(prompt: DatumSpec) -> Sample:
    """Return what the lines of a prompt's samples have in common."""
    truth = prompt["extra_env_info"].get("ground_truth")
    text = "".join(message["content"] for message in prompt["message_log"])
    return {"prompt": text, "truth": None if truth is None else str(truth)}


def _question(sample: Sample) -> tuple[str, str]:
    """Return the prompt and the truth of a sample as a file has them."""
    return replaced(sample["prompt"]), replaced(str(sample["truth"]))


def _samples(group: Group, name: str, seed: int, cluster: Cluster) -> list[Sample]:
    prompt = _of_prompt(group.prompt)
    lines = []
    for index, (sample, score) in enumerate(zip(group.samples, group.scores, strict=True)):
        response = cluster.store.fetch(sample.ref).generated_text if sample.ref is not None else None
        lines.append(
            {
                "model": name,
                "task": group.prompt["task_name"],
                "uid": group.uid,
                "seed": seed,
                "index": index,
                "prompt": prompt["prompt"],
                "response": response,
                "answer": score.answer,
                "truth": prompt["truth"],
                "reward": score.reward,
                "solved": score.solved,
                "reason": score.reason,
                "tokens": sample.generated_length,
                "truncated": sample.truncated,
            }
        )
    return lines


@dataclass(frozen=True)
class TaskScore:
    """The scores of one model on one task. `accuracy`: (mean, lower, upper end of the 95 % interval); `metrics`:
    pass@k and cons@k by name; None where too few samples were scored, or where rewards are graded."""

    model: str
    task: str
    prompts: int
    samples: int
    accuracy: tuple[float, float, float] | None
    reward: float | None
    metrics: Mapping[str, float | None]
    failed: int
    truncated: float
    tokens: float

    def plain(self) -> dict[str, Any]:
        """Return it for report.json."""
        mean, low, high = self.accuracy or (None, None, None)
        return {
            "model": self.model,
            "task": self.task,
            "num_prompts": self.prompts,
            "num_samples": self.samples,
            "num_failed_samples": self.failed,
            "accuracy": mean,
            "accuracy_low": low,
            "accuracy_high": high,
            "reward": self.reward,
            **self.metrics,
            "truncation_rate": self.truncated,
            "generated_length": self.tokens,
        }


def task_scores(samples: Iterable[Sample], samples_per_prompt: int, k: int) -> list[TaskScore]:
    """Return the scores of each model on each task, in order of appearance. `k`: eval.k_value."""
    by_task: dict[tuple[str, str], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        by_task[sample["model"], sample["task"]][sample["uid"]].append(sample)
    return [_score(model, task, groups, samples_per_prompt, k) for (model, task), groups in by_task.items()]


def _score(model: str, task: str, groups: Mapping[str, list[Sample]], number: int, k: int) -> TaskScore:
    ordered = [sorted(groups[uid], key=lambda sample: (sample["seed"], sample["index"])) for uid in sorted(groups)]
    scored = [[sample for sample in group if sample["reward"] is not None] for group in ordered]
    graded = any(sample["solved"] is None for group in scored for sample in group)
    right = [] if graded else [[sample["solved"] for sample in group] for group in scored]
    votes = [
        [(sample["answer"], correct) for sample, correct in zip(group, marks, strict=True)]
        for group, marks in zip(scored, right, strict=False)  # `right` is empty for graded rewards
    ]
    everything = [sample for group in ordered for sample in group]
    rewards = [sample["reward"] for group in scored for sample in group]
    numbers = sorted({*pass_numbers(number), k})
    return TaskScore(
        model=model,
        task=task,
        prompts=len(ordered),
        samples=len(everything),
        accuracy=mean_interval([[float(mark) for mark in marks] for marks in right]),
        reward=sum(rewards) / len(rewards) if rewards else None,
        metrics={f"pass@{n}": pass_at_k(right, n) for n in numbers}
        | {f"cons@{n}": majority_at_k(votes, n) for n in numbers},
        failed=len(everything) - len(rewards),
        truncated=sum(sample["truncated"] for sample in everything) / len(everything),
        tokens=sum(sample["tokens"] for sample in everything) / len(everything),
    )
