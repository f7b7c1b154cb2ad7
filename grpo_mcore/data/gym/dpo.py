"""Conversion of rollouts to pairs for DPO: {"prompt", "chosen", "rejected"} and their rewards.

Both answers of a pair are to the same prompt: the same whole input and, where the rollouts name one, the same task.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from grpo_mcore.data.gym.grpo import CONTEXT_LEFT_OUT, NO_ANSWER, prompt_of
from grpo_mcore.data.gym.pair_index import Answer, PairIndex
from grpo_mcore.data.gym.pairing import SamePrompt, Stratified
from grpo_mcore.data.gym.parts import Part
from grpo_mcore.data.gym.rollout import (
    Filtered,
    RolloutParser,
    TextItem,
    encode,
    final_text,
    input_items,
    is_plain,
    output_items,
)
from grpo_mcore.data.gym.run import Transformation
from grpo_mcore.data.gym.sft import MASKED
from grpo_mcore.data.gym.summary import Summary
from grpo_mcore.data.interfaces import DataError

_REMEMBERED = 1024  # prompts
_SHORT = 16 << 10  # bytes of a prompt that is remembered
NO_PAIR = "no pair: more rollouts of each prompt, a lower --min_gap or other thresholds give some"
NO_REWARD = "no reward to rank it by"
ANSWER_LEFT_OUT = "thoughts, calls or earlier turns of an answer are left out: pairs hold its last text"


def gym_to_dpo(
    source: Path,
    target: Path,
    *,
    min_gap: float = 0.2,
    strategy: str = "same_prompt",
    high_threshold: float = 0.7,
    low_threshold: float = 0.4,
    max_pairs_per_prompt: int = 8,
    seed: int = 0,
    prompt_format: str = "text",
    strict: bool = False,
) -> Summary:
    """Pair answers whose rewards differ by at least `min_gap`, in the order in which their prompts first occur.

    The strategy "same_prompt" pairs the best and the worst answer of each prompt; "stratified" pairs answers with a
    reward of at least `high_threshold` with those of at most `low_threshold`, at most `max_pairs_per_prompt` pairs of a
    prompt, drawn by `seed`.
    Two answers of the same text are never paired. Memory does not grow with the file: the answers lie in a temporary
    database beside the output, about as large as the input. Raises DataError.
    """
    if min_gap < 0 or low_threshold > high_threshold or max_pairs_per_prompt < 1:
        raise DataError(
            "min_gap must not be negative, low_threshold not above high_threshold, max_pairs_per_prompt at least 1"
        )
    parse = RolloutParser(output=TextItem, raw_params=True)
    prompt = _Prompts(parse, prompt_format)
    chooser = (
        SamePrompt(min_gap)
        if strategy == "same_prompt"
        else Stratified(min_gap, high_threshold, low_threshold, max_pairs_per_prompt, seed)
    )
    with Transformation(source, target, what="pairs", strict=strict) as run, PairIndex(run.out.target.parent) as index:
        summary = run.summary

        def handle(rollout: Any, reward: float | None, part: Part) -> tuple[int, float, int, bytes, bytes]:
            if rollout.mask_sample is True:
                raise Filtered(MASKED)
            if reward is None:
                raise Filtered(NO_REWARD)
            done = output_items(rollout)
            answer = final_text(done)
            if not answer.strip():
                raise Filtered(NO_ANSWER)
            asked, text = prompt(rollout), encode(answer)
            if not asked.whole:
                part.notes[CONTEXT_LEFT_OUT] += 1
            if not is_plain(done):
                part.notes[ANSWER_LEFT_OUT] += 1
            return asked.identity, reward, hash(text), asked.head, text

        run.each(parse, handle, index.add)
        summary.kept = 0
        for group in index.groups():
            pairs, used, reasons = chooser(group)
            summary.kept += used
            for why, count in reasons.items():
                if count:
                    summary.filtered[why] += count
            for chosen, rejected in pairs:
                run.write(_pair(index, chosen, rejected))
        if not summary.kept and summary.rewards.total:
            summary.notes[NO_PAIR] = summary.rows
    return summary


def _pair(index: PairIndex, chosen: Answer, rejected: Answer) -> bytes:
    head, better = index.texts(chosen)
    _, worse = index.texts(rejected)
    numbers = {
        "reward_gap": chosen.reward - rejected.reward,
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
    }
    return b"".join((head, b',"chosen":', better, b',"rejected":', worse, b",", encode(numbers)[1:]))


class _Prompt(NamedTuple):
    """A rollout's prompt. `identity` hashes what answers must share to be compared. `head` is {"prompt": ...} as JSON
    without its closing brace; the answers are appended to it. `whole`: it holds all of the input."""

    identity: int
    head: bytes
    whole: bool


class _Prompts:
    """Reads the prompts of rollouts. The latest are cached: the rollouts of one prompt mostly stand close together."""

    def __init__(self, parse: RolloutParser, prompt_format: str) -> None:
        self._parse = parse
        self._row = prompt_of(prompt_format, "prompt")
        self._remembered = functools.lru_cache(maxsize=_REMEMBERED)(self._read)

    def __call__(self, rollout: Any) -> _Prompt:
        """Return the rollout's prompt. Raises BadRow, and Filtered where there is no question."""
        raw = bytes(rollout.responses_create_params)
        return (self._remembered if len(raw) <= _SHORT else self._read)(raw, rollout.task_index)

    def _read(self, raw: bytes, task: int | str | None) -> _Prompt:
        params = self._parse.params(raw)
        asked = input_items(params)
        row, whole = self._row(params, asked)
        identity = hash(encode((task, asked, params.instructions, params.tools)))
        return _Prompt(identity, encode(row)[:-1], whole)
