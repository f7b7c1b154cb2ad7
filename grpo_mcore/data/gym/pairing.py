"""Which answers to one prompt become pairs. The answers come best first and are not all held in memory."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from grpo_mcore.data.gym.disk_sort import Record
from grpo_mcore.data.gym.pair_index import Entry, Pair
from grpo_mcore.data.gym.rollout import ROUNDING

_TEXT = Entry._fields.index("text")
_STRATUM = 1000  # answers of one stratum of one prompt that are held; of more, a random part
_COMBINATIONS = 10_000  # of high and low answers that are looked at


class Choice(NamedTuple):
    """The pairs of one prompt, how many of its answers are in them, and why the others are not, by reason."""

    pairs: list[Pair]
    used: int
    reasons: dict[str, int]


def _is_pair(chosen: Entry, rejected: Entry, min_gap: float) -> bool:
    gap = chosen.reward - rejected.reward
    return gap > 0 and gap >= min_gap - ROUNDING and chosen.text != rejected.text


class SamePrompt:
    """The best answer against the worst. Where the two are the same text, one of them against the best or worst
    that is another text, whichever differs more in reward."""

    def __init__(self, min_gap: float) -> None:
        self.min_gap = min_gap
        self.too_close = f"rewards for its prompt differ by less than {min_gap:g}"

    def __call__(self, answers: Iterable[Record]) -> Choice:
        count = 0
        best = worst = other_best = other_worst = None  # other: of those whose text is not the best one's
        best_text = first = 0
        for worst in answers:
            _, _, place, text, _, _ = worst
            count += 1
            if best is None:
                best, best_text, first = worst, text, place
            elif text != best_text:
                other_best = other_best or worst
                other_worst = worst
            if place < first:
                first = place
        if count == 1:
            return Choice([], 0, {"the only answer to its prompt": 1})
        if best is None or worst is None or other_best is None or other_worst is None:
            return Choice([], 0, {"all answers to its prompt are the same text": count})
        pair = Entry(*best), Entry(*other_worst)
        if worst[_TEXT] == best_text:
            pair = max(pair, (Entry(*other_best), Entry(*worst)), key=lambda two: two[0].reward - two[1].reward)
        if not _is_pair(*pair, self.min_gap):
            return Choice([], 0, {self.too_close: count})
        return Choice([(first, *pair)], 2, {"neither best nor worst of its prompt": count - 2})


class Stratified:
    """Answers with a high reward against answers with a low one, at most `most` pairs, drawn at random by `seed`."""

    def __init__(self, min_gap: float, high: float, low: float, most: int, seed: int) -> None:
        self.min_gap, self.high, self.low, self.most, self.seed = min_gap, high, low, most, seed
        self.between = "reward between the thresholds"
        self.too_close = f"no answer to its prompt of another text and a reward that differs by {min_gap:g}"

    def __call__(self, answers: Iterable[Record]) -> Choice:
        rng: random.Random | None = None  # made when it is needed, which is seldom
        high: list[Entry] = []
        low: list[Entry] = []
        highs = lows = between = 0
        first = seed = -1
        for answer in answers:
            _, lowness, place, _, _, _ = answer
            if first < 0:
                first, seed = place, hash((self.seed, place))
            elif place < first:
                first = place
            if -lowness >= self.high - ROUNDING:
                stratum, seen = high, (highs := highs + 1)
            elif -lowness <= self.low + ROUNDING:
                stratum, seen = low, (lows := lows + 1)
            else:
                between += 1
                continue
            if seen <= _STRATUM:
                stratum.append(Entry(*answer))
            else:  # reservoir sampling: every answer so far is held with the same probability
                rng = rng or random.Random(seed)
                if (held := rng.randrange(seen)) < _STRATUM:
                    stratum[held] = Entry(*answer)
        if not high or not low:
            return Choice([], 0, {self.between: between, "no answer of the other stratum to its prompt": highs + lows})
        pairs = self._draw(high, low, seed)
        used = len({id(answer) for pair in pairs for answer in pair})
        why = "in no pair that was drawn" if pairs else self.too_close
        return Choice([(first, *pair) for pair in pairs], used, {self.between: between, why: highs + lows - used})

    def _draw(self, high: list[Entry], low: list[Entry], seed: int) -> list[tuple[Entry, Entry]]:
        everything: Sequence[int] = range(len(high) * len(low))
        if len(everything) > _COMBINATIONS:
            everything = random.Random(seed).sample(everything, _COMBINATIONS)
        pairs = [(high[number // len(low)], low[number % len(low)]) for number in everything]
        fit = [pair for pair in pairs if _is_pair(*pair, self.min_gap)]
        if len(fit) <= self.most:
            return fit
        return [fit[number] for number in sorted(random.Random(seed).sample(range(len(fit)), self.most))]
