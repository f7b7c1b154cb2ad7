"""Conversion of rollouts to pairs for DPO: {"prompt", "chosen", "rejected"} and their rewards.

Both answers of a pair are to the same prompt: the same whole input and, where the rollouts name one, the same task.
"""

from functools import partial
from pathlib import Path

from grpo_mcore.data.gym.grpo import CONTEXT_LEFT_OUT, NO_ANSWER, prompt_of
from grpo_mcore.data.gym.pairing import Answer, Chooser, PairIndex, best_and_worst, pair_index, stratified
from grpo_mcore.data.gym.rollout import (
    Filtered,
    Rollout,
    check_usable,
    encode,
    final_text,
    input_items,
    is_plain,
    output_items,
)
from grpo_mcore.data.gym.run import transformation
from grpo_mcore.data.gym.summary import Summary
from grpo_mcore.data.interfaces import DataError

NO_PAIR = "no pair: more rollouts of each prompt, a lower --min_gap or other thresholds give some"
NO_REWARD = "no reward to rank it by"
ANSWER_LEFT_OUT = "reasoning, calls or earlier turns of an answer are left out: pairs hold its last text"


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
    prompt = prompt_of(prompt_format, "prompt")
    choose: Chooser = partial(best_and_worst, min_gap=min_gap)
    if strategy == "stratified":
        choose = partial(
            stratified, min_gap=min_gap, high=high_threshold, low=low_threshold, most=max_pairs_per_prompt, seed=seed
        )
    with (
        transformation(source, target, unit="pairs", strict=strict) as run,
        pair_index(target.resolve().parent) as index,
    ):
        summary = run.summary

        def handle(rollout: Rollout, reward: float | None) -> tuple[int, float, bytes, bytes]:
            check_usable(rollout)
            if reward is None:
                raise Filtered(NO_REWARD)
            done = output_items(rollout)
            answer = final_text(done)
            if not answer.strip():
                raise Filtered(NO_ANSWER)
            text, params = encode(answer), rollout.responses_create_params
            items = input_items(params)
            row, whole = prompt(params, items)
            head = encode(row)[:-1]  # the answers are appended
            identity = hash(encode((rollout.task_index, items, params.instructions, params.tools)))
            if not whole:
                summary.notes[CONTEXT_LEFT_OUT] += 1
            if not is_plain(done):
                summary.notes[ANSWER_LEFT_OUT] += 1
            return identity, reward, head, text

        run.each(handle, index.add)
        summary.kept = 0
        for answers in index.groups():
            pairs, reasons = choose(answers)
            summary.kept += len({answer for pair in pairs for answer in pair})
            summary.filtered.update({reason: count for reason, count in reasons.items() if count})
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
