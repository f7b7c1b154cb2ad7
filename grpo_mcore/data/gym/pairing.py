"""The answers to each prompt in a temporary SQLite database, so that memory does not grow with the file, and the choice
of pairs among the answers to one prompt."""

import random
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from grpo_mcore.data.gym.rollout import ROUNDING
from grpo_mcore.data.interfaces import DataError

_COMBINATIONS = 10_000  # most pairs of a high and a low answer that are considered

# The database is private and deleted at the end: it needs neither a journal nor fsync. `reward` has no type, which
# would turn -0.0 into 0.0.
_SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA cache_size = -32768;
CREATE TABLE answers (position INTEGER PRIMARY KEY, prompt INTEGER, reward, text INTEGER, head BLOB, answer BLOB);
BEGIN;
"""


class Answer(NamedTuple):
    """One answer. `position` is the number of bytes of text before it, `text` a 64-bit hash of its text."""

    position: int
    reward: float
    text: int


class PairIndex:
    """Collects answers with `add`, then gives them back by prompt. Made by `pair_index`."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._database.executescript(_SCHEMA)
        self._size = 0

    def add(self, answer: tuple[int, float, bytes, bytes]) -> None:
        """Add (prompt's hash, reward, the prompt as it will be written, the answer's text)."""
        prompt, reward, head, text = answer
        row = (self._size, prompt, reward, hash(text), head, text)
        self._database.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)
        self._size += len(head) + len(text)

    def groups(self) -> Iterator[list[Answer]]:
        """Yield the answers of each prompt, in the order in which prompts first occur; best answer first, equally good
        ones in the order of the file."""
        self._database.execute("CREATE INDEX by_prompt ON answers (prompt, reward DESC, position, text)")
        prompts = self._database.execute("SELECT prompt FROM answers GROUP BY prompt ORDER BY min(position)")
        query = "SELECT position, reward, text FROM answers WHERE prompt = ? ORDER BY reward DESC, position"
        for prompt in prompts:
            yield [Answer(*row) for row in self._database.execute(query, prompt)]

    def texts(self, answer: Answer) -> tuple[bytes, bytes]:
        """Return the prompt and the text of an answer, as they were added."""
        query = "SELECT head, answer FROM answers WHERE position = ?"
        head, text = self._database.execute(query, (answer.position,)).fetchone()
        return head, text


@contextmanager
def pair_index(folder: Path) -> Iterator[PairIndex]:
    """Open an index in `folder`, deleted when the `with` block ends. An error of the database, such as a full disk,
    leaves the block as a DataError."""
    with tempfile.TemporaryDirectory(prefix=".pairs-", dir=folder) as name:
        path = Path(name, "pairs.sqlite")
        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as database:
                yield PairIndex(database)
        except sqlite3.Error as error:
            raise DataError(f"the temporary database {path} failed: {error}") from error


Choice = tuple[list[tuple[Answer, Answer]], dict[str, int]]
"""The pairs (chosen, rejected) of one prompt, and the number of its other answers by reason."""
Chooser = Callable[[Sequence[Answer]], Choice]
"""(answers to one prompt, best first) -> the choice"""


def _is_pair(chosen: Answer, rejected: Answer, min_gap: float) -> bool:
    gap = chosen.reward - rejected.reward
    return gap > 0 and gap >= min_gap - ROUNDING and chosen.text != rejected.text


def best_and_worst(answers: Sequence[Answer], *, min_gap: float) -> Choice:
    """Pair the best answer with the worst. Where both have the same text, pair one of them with the best or worst
    answer of another text, whichever differs more in reward."""
    count, best, worst = len(answers), answers[0], answers[-1]
    if count == 1:
        return [], {"the only answer to its prompt": 1}
    others = [answer for answer in answers if answer.text != best.text]
    if not others:
        return [], {"all answers to its prompt are the same text": count}
    pair = best, others[-1]
    if worst.text == best.text:
        pair = max(pair, (others[0], worst), key=lambda two: two[0].reward - two[1].reward)
    if not _is_pair(*pair, min_gap):
        return [], {f"rewards for its prompt differ by less than {min_gap:g}": count}
    return [pair], {"neither best nor worst of its prompt": count - 2}


def stratified(answers: Sequence[Answer], *, min_gap: float, high: float, low: float, most: int, seed: int) -> Choice:
    """Pair answers with a high reward with answers with a low one: at most `most` pairs, drawn at random by `seed`."""
    good = [answer for answer in answers if answer.reward >= high - ROUNDING]
    bad = [answer for answer in answers[len(good) :] if answer.reward <= low + ROUNDING]
    left_out = {"reward between the thresholds": len(answers) - len(good) - len(bad)}
    if not good or not bad:
        return [], left_out | {"no answer of the other stratum to its prompt": len(good) + len(bad)}
    draw = hash((seed, answers[0].position))
    combinations: Sequence[int] = range(len(good) * len(bad))
    if len(combinations) > _COMBINATIONS:
        combinations = random.Random(draw).sample(combinations, _COMBINATIONS)
    pairs = [(good[number // len(bad)], bad[number % len(bad)]) for number in combinations]
    fit = [pair for pair in pairs if _is_pair(*pair, min_gap)]
    if len(fit) > most:
        fit = [fit[number] for number in sorted(random.Random(draw).sample(range(len(fit)), most))]
    reason = f"no answer to its prompt of another text and a reward that differs by {min_gap:g}"
    unused = len(good) + len(bad) - len({answer for pair in fit for answer in pair})
    return fit, left_out | {"in no pair that was drawn" if fit else reason: unused}
