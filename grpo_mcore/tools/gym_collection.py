"""Collection of rollouts without training: samples a recipe's prompts, scores the samples and writes them to a file in
NeMo Gym's format.

Rollouts of a Gym's agents are written unchanged. Samples without a reward go to NAME_failures.jsonl. An interrupted
collection leaves its rollouts in NAME_unfinished.jsonl, from which the same command continues.
"""

import contextlib
import fcntl
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from grpo_mcore.base.text import replaced
from grpo_mcore.data import DataError
from grpo_mcore.data.gym.files import whole_file
from grpo_mcore.data.loader import FINGERPRINT_ROWS
from grpo_mcore.driver.engines.sampling_config import sampling_of, turn_limits
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.driver.run.run import open_sampler, prepare
from grpo_mcore.environments.agents.samples import AgentOutcome
from grpo_mcore.recipe import MasterConfig, scoring_settings
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.images import data_url, is_image
from grpo_mcore.rollout.trajectory import Score, Trajectory, content_ids

logger = logging.getLogger(__name__)

FAILURE = "_ng_failure_class"
STEPS_IN_FLIGHT = 4
"""Maximum number of prompts in flight, in multiples of grpo.num_prompts_per_step."""

_NOT_OF_THE_TASK = ("messages", "task_name", "uid", "tools", "unusable")  # fields of a row in chat format


@dataclass
class Collected:
    """The counts of a collection. `rewards` is the sum over all `rows`."""

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


class UnfinishedCollection:
    """The rollouts so far, in a file next to the output: first the settings that they depend on, then a line a
    prompt."""

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        """Go on with the file of a collection that was interrupted. Raises DataError for one of other settings, and if
        it cannot be written."""
        self.path = output.with_name(output.stem + "_unfinished.jsonl")
        if output.is_dir():
            raise DataError(f"{output}: the output must be a file")
        self._uids: set[str] = set()  # prompts that have their rollouts
        self.is_done = False
        head: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._lock()
            whole = 0  # bytes: a kill may have cut the last line off
            for line in self._whole_lines():
                try:
                    content = json.loads(line)
                except ValueError:  # damaged: it is sampled again, with those behind it
                    break
                if not whole:
                    self._refuse_other(content, head)
                else:
                    self._uids.add(content["uid"])
                whole += len(line)
            self._file.truncate(whole)
            if not whole:
                self._write(head)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written: {error.strerror}") from error
        if self._uids:
            logger.info("%d prompts are there from an interrupted collection, in %s", len(self._uids), self.path)

    def _lock(self) -> None:
        """Raise DataError while another collection writes the file. A file system without locks has none."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{self.path}: another collection writes it; wait for its end, or choose another --output"
            ) from error
        except OSError as error:
            logger.info("%s cannot be locked: %s", self.path, error.strerror)

    def _whole_lines(self) -> Iterator[bytes]:
        """Yield the lines that were written whole, if the file is there."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                yield from itertools.takewhile(lambda line: line.endswith(b"\n"), file)

    def _refuse_other(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        if different := ", ".join(name for name in now if saved.get(name) != now[name]):
            raise DataError(
                f"{self.path} has rollouts of an interrupted collection that differ in {different}; delete it, or "
                "choose another --output"
            )

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(_encoded(line))
        self._file.flush()

    def add(self, uid: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the rollouts of a prompt."""
        self._write({"uid": uid, "lines": lines})
        self._uids.add(uid)

    def missing(self, prompts: Iterable[DatumSpec], uids: dict[str, None]) -> Iterator[DatumSpec]:
        """Yield the prompts that have no rollouts yet. `uids` gets those of all."""
        for prompt in prompts:
            uids[prompt["uid"]] = None
            if prompt["uid"] not in self._uids:
                yield prompt

    def groups(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield the uid and the rollouts of each prompt."""
        for line in map(json.loads, itertools.islice(self._whole_lines(), 1, None)):
            yield line["uid"], line["lines"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Delete the file where the collection is done, or has got nothing; else say what it is for."""
        self._file.close()
        if self.is_done or not self._uids:
            self.path.unlink(missing_ok=True)
        elif error is not None:
            error.add_note(f"{len(self._uids)} prompts are done, in {self.path}: the same command goes on from there")


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
    """Sample policy.model_name on the first `num_prompts` training prompts (None: all), or with `validation` on the
    validation prompts with their sampling. Each prompt gets `generations` samples (None: the recipe's number).

    The file appears whole or not at all. Raises what the start of a run raises, and DataError where there is no prompt,
    or where an interrupted collection had other settings.
    """
    prepared = prepare(config, algorithm="eval")
    tokenizer, data = prepared.tokenizer, prepared.data
    dataset, env_names = (data.validation, data.val_env_names) if validation else (data.train, data.env_names)
    if dataset is None:
        raise DataError("there is no validation data: set data.validation, or leave --validation out")
    assert not isinstance(dataset, Mapping), "the training datasets are joined"
    grpo = config.grpo
    count = generations or (grpo.val_num_generations_per_prompt if validation else grpo.num_generations_per_prompt)
    failures = output.with_name(output.stem + "_failures.jsonl")
    collected = Collected(output, failures)
    sampling = sampling_of(config.policy.generation, tokenizer, validation=validation)
    settings = {
        "policy.model_name": config.policy.model_name,
        "the rows of the data": dataset.fingerprint(FINGERPRINT_ROWS),
        "env": scoring_settings(config.env),
        "the sampling": asdict(sampling),
        "grpo.seed": grpo.seed,
        "grpo.max_rollout_turns": grpo.max_rollout_turns,
        "--num_repeats": count,
        "--token_ids": token_ids,
    }
    with contextlib.ExitStack() as stack:
        unfinished = stack.enter_context(UnfinishedCollection(output, settings))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collect-")))
        sampler = stack.enter_context(open_sampler(prepared, logs, env_names))
        results: dict[tuple[str, int], AgentOutcome] = {}
        rollouts = Rollouts(
            sampler.engines,
            sampler.task_to_env,
            tokenizer,
            turn_limits(config),
            seed=grpo.seed,
            hooks=RolloutHooks(on_outcome=lambda done: results.update({(done.uid, done.generation_index): done})),
        )
        uids: dict[str, None] = {}
        prompts = unfinished.missing(dataset.usable_rows(num_prompts), uids)
        most = STEPS_IN_FLIGHT * grpo.num_prompts_per_step
        for group in rollouts.each_group(prompts, sampling, generations=count, most=most):
            lines = _lines(
                group,
                dataset.dataset[group.prompt["idx"]],
                results,
                sampler.cluster.store.fetch,
                agent=env_names[group.prompt["task_name"]] or "",
                sampling={"temperature": sampling.temperature, "top_p": sampling.top_p},
                model=config.policy.model_name,
                token_ids=token_ids,
            )
            unfinished.add(group.uid, list(lines))
            on_group(group)
        if not uids:
            raise DataError("there is no usable prompt to collect rollouts of")
        with whole_file(output) as kept, whole_file(failures) as failed:
            for uid, rollout_lines in unfinished.groups():
                if uid in uids:
                    del uids[uid]
                    collected.prompts += 1
                    for line in rollout_lines:
                        write_rollout(collected, line, kept, failed)
        unfinished.is_done = True
    return collected


def _lines(
    group: Group,
    row: Mapping[str, Any],
    results: dict[tuple[str, int], AgentOutcome],
    fetch: Callable[[Any], Trajectory],
    **shown: Any,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each sample of a group. `row` is its prompt's row of the dataset; `shown` is as in
    `rollout_line`."""
    for index, (sample, score) in enumerate(zip(group.samples, group.scores, strict=True)):
        outcome = results.pop((group.uid, index), None)
        if outcome is not None:
            task = group.prompt["extra_env_info"]["agent_task"]
            indices = {"_ng_task_index": group.prompt["idx"], "_ng_rollout_index": index}
            yield outcome.result if outcome.result is not None else {**task, **indices, **failure(score)}
            continue
        messages = row["messages"]
        if messages[-1]["role"] == "assistant":  # the answer, which is the truth
            messages = messages[:-1]
        truth = group.prompt["extra_env_info"].get("ground_truth")
        task = {key: value for key, value in row.items() if key not in _NOT_OF_THE_TASK}
        task |= {} if truth is None else {"expected_answer": truth}
        yield rollout_line(
            messages,
            fetch(sample.ref),
            score,
            tools=row.get("tools"),
            task=task,
            task_index=group.prompt["idx"],
            **shown,
        )


def _as_item(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a prompt as NeMo Gym has it: images as data URLs."""
    if not isinstance(parts := message.get("content"), list):
        return dict(message)
    shown = [
        {"type": "input_image", "image_url": data_url(part["image"]), "detail": "auto"}
        if is_image(part)
        else {**part, "type": "input_text"}
        for part in parts
    ]
    return {**message, "content": shown}


def _encoded(line: Mapping[str, Any]) -> bytes:
    return replaced(json.dumps(line, ensure_ascii=False, default=str)).encode() + b"\n"


def write_rollout(collected: Collected, line: dict[str, Any], kept: BinaryIO, failed: BinaryIO) -> None:
    """Write a rollout to the file `kept`, or to `failed` if it has no reward, and count it."""
    text = _encoded(line)
    if line.get(FAILURE) is None:
        kept.write(text)
        collected.rows += 1
        collected.rewards += line["reward"]
        return
    failed.write(text)
    collected.failed += 1
    collected.first_failure = collected.first_failure or str(line.get("_ng_failure_message"))


def rollout_line(
    messages: Sequence[Mapping[str, Any]],
    trajectory: Trajectory,
    score: Score,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    task: Mapping[str, Any],
    task_index: int,
    agent: str,
    sampling: Mapping[str, float],
    model: str,
    token_ids: bool,
) -> dict[str, Any]:
    """Return a sample as NeMo Gym writes it. `messages` and `tools` are the prompt, `task` the row's fields for the
    verifier. With `token_ids`, the tokens and log-probs of every turn are included.

    A sample without a reward gets the fields of a failed rollout: `_ng_failure_class` and the reason. Raises DataError
    for an image in an environment's answer, whose file is not at hand.
    """
    output: list[dict[str, Any]] = []
    seen: list[int] = []
    for turn in trajectory.turns:
        ids = content_ids([turn]).tolist()
        if not turn.loss_mask:
            if output and turn.images:
                raise DataError(f"{trajectory.name}: images in an environment's answers cannot be collected yet")
            if output:  # turns before the first answer are the prompt
                output.append({"type": "message", "role": "user", "content": turn.text})
            seen += ids
            continue
        text = {"type": "output_text", "text": turn.text, "annotations": []}
        item: dict[str, Any] = {
            "id": f"msg_{trajectory.generation_index}_{len(output)}",
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if trajectory.truncated and turn is trajectory.turns[-1] else "completed",
            "content": [text],
        }
        if token_ids:
            assert turn.logprobs is not None
            item["prompt_token_ids"] = list(seen)
            item["generation_token_ids"] = ids
            item["generation_log_probs"] = turn.logprobs.tolist()
        output.append(item)
        seen += ids
    line = {
        **task,
        "responses_create_params": {"input": [_as_item(message) for message in messages], **sampling}
        | ({"tools": tools} if tools else {}),
        "response": {
            "id": f"resp_{trajectory.name}",
            "object": "response",
            "model": model,
            "output": output,
            "incomplete_details": {"reason": "max_output_tokens"} if trajectory.truncated else None,
        },
        "reward": score.reward,
        "extracted_answer": score.answer,
        "reward_components": score.rewards_by_name or None,
        "_ng_task_index": task_index,
        "_ng_rollout_index": trajectory.generation_index,
        "agent_ref": {"type": "responses_api_agents", "name": agent},
    }
    return line if score.reward is not None else line | failure(score)


def failure(score: Score) -> dict[str, Any]:
    """Return the fields that mark the line of a sample without a reward."""
    return {"reward": None, FAILURE: "no_reward", "_ng_failure_message": score.reason}
