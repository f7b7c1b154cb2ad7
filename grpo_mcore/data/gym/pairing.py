"""The choice of pairs among the answers to one prompt. The answers come best first and are not all held in memory."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from grpo_mcore.data.gym.pair_index import Answer
from grpo_mcore.data.gym.rollout import ROUNDING

_STRATUM = 1000  # answers of one stratum of one prompt that are held; of more, a random part
_COMBINATIONS = 10_000  # most pairs of a high and a low answer that are considered


class Choice(NamedTuple):
    """The pairs (chosen, rejected) of one prompt, the number of its answers in them, and the number of the others by
    reason."""

    pairs: list[tuple[Answer, Answer]]
    used: int
    reasons: dict[str, int]


def _is_pair(chosen: Answer, rejected: Answer, min_gap: float) -> bool:
    gap = chosen.reward - rejected.reward
    return gap > 0 and gap >= min_gap - ROUNDING and chosen.text != rejected.text


class SamePrompt:
    """Pairs the best answer with the worst. Where both have the same text, pairs one of them with the best or worst
    answer of another text, whichever differs more in reward."""

    def __init__(self, min_gap: float) -> None:
        self.min_gap = min_gap
        self.too_close = f"rewards for its prompt differ by less than {min_gap:g}"

    def __call__(self, answers: Iterable[Answer]) -> Choice:
        count = 0
        best = worst = other_best = other_worst = None  # other: among those whose text is not the best one's
        for worst in answers:
            count += 1
            if best is None:
                best = worst
            elif worst.text != best.text:
                other_best = other_best or worst
                other_worst = worst
        if count == 1:
            return Choice([], 0, {"the only answer to its prompt": 1})
        if best is None or worst is None or other_best is None or other_worst is None:
            return Choice([], 0, {"all answers to its prompt are the same text": count})
        pair = best, other_worst
        if worst.text == best.text:
            pair = max(pair, (other_best, worst), key=lambda two: two[0].reward - two[1].reward)
        if not _is_pair(*pair, self.min_gap):
            return Choice([], 0, {self.too_close: count})
        return Choice([pair], 2, {"neither best nor worst of its prompt": count - 2})


class Stratified:
    """Pairs answers with a high reward with answers with a low one: at most `most` pairs, drawn at random by `seed`."""

    def __init__(self, min_gap: float, high: float, low: float, most: int, seed: int) -> None:
        self.min_gap, self.high, self.low, self.most, self.seed = min_gap, high, low, most, seed
        self.between = "reward between the thresholds"
        self.too_close = f"no answer to its prompt of another text and a reward that differs by {min_gap:g}"

    def __call__(self, answers: Iterable[Answer]) -> Choice:
        rng: random.Random | None = None  # made only when needed, which is seldom
        high: list[Answer] = []
        low: list[Answer] = []
        highs = lows = between = 0
        seed: int | None = None
        for answer in answers:
            if seed is None:
                seed = hash((self.seed, answer.place))
            if answer.reward >= self.high - ROUNDING:
                stratum, seen = high, (highs := highs + 1)
            elif answer.reward <= self.low + ROUNDING:
                stratum, seen = low, (lows := lows + 1)
            else:
                between += 1
                continue
            if seen <= _STRATUM:
                stratum.append(answer)
            else:  # reservoir sampling: every answer so far is held with the same probability
                rng = rng or random.Random(seed)
                if (held := rng.randrange(seen)) < _STRATUM:
                    stratum[held] = answer
        if not high or not low:
            return Choice([], 0, {self.between: between, "no answer of the other stratum to its prompt": highs + lows})
        pairs = self._draw(high, low, seed)
        used = len({id(answer) for pair in pairs for answer in pair})
        why = "in no pair that was drawn" if pairs else self.too_close
        return Choice(pairs, used, {self.between: between, why: highs + lows - used})

    def _draw(self, high: list[Answer], low: list[Answer], seed: int | None) -> list[tuple[Answer, Answer]]:
        combinations: Sequence[int] = range(len(high) * len(low))
        if len(combinations) > _COMBINATIONS:
            combinations = random.Random(seed).sample(combinations, _COMBINATIONS)
        pairs = [(high[number // len(low)], low[number % len(low)]) for number in combinations]
        fit = [pair for pair in pairs if _is_pair(*pair, self.min_gap)]
        if len(fit) <= self.most:
            return fit
        return [fit[number] for number in sorted(random.Random(seed).sample(range(len(fit)), self.most))]
