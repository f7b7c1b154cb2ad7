"""The summary of a transformation: the fate of every line, and a histogram of the rewards."""

import math
from collections import Counter
from dataclasses import dataclass, field

_SHOWN = 600  # characters of the first row
_LISTED = 10  # lines of a printed histogram
_BAR = 40  # characters of its longest bar


class Histogram:
    """Counts of values, which are rounded to four significant digits unless they are whole numbers. `mean` is exact."""

    def __init__(self) -> None:
        self.counts: Counter[float] = Counter()
        self.total = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a finite number."""
        self.total += 1
        self.sum += value
        self.counts[value if value % 1 == 0 else float(f"{value:.4g}")] += 1

    @property
    def low(self) -> float:
        return min(self.counts)

    @property
    def high(self) -> float:
        return max(self.counts)

    @property
    def mean(self) -> float:
        return self.sum / self.total

    def quantile(self, share: float) -> float:
        """Return the smallest value that at least this share of all values does not exceed."""
        left = share * self.total
        for value, count in sorted(self.counts.items()):
            left -= count
            if left <= 0:
                return value
        return self.high

    def bins(self) -> list[tuple[str, int]]:
        """Return (label, count) of each value where they are few, else of ten ranges of equal width."""
        if len(self.counts) <= _LISTED:
            return [(f"{value:.4g}", count) for value, count in sorted(self.counts.items())]
        low, width = self.low, self.high / _LISTED - self.low / _LISTED
        counts = [0] * _LISTED
        for value, count in self.counts.items():
            counts[min(int(value / width - low / width), _LISTED - 1)] += count
        edges = [low + width * number for number in range(_LISTED + 1)]
        return [(f"{edges[number]:.4g} to {edges[number + 1]:.4g}", count) for number, count in enumerate(counts)]

    def lines(self) -> list[str]:
        """Return a line with a bar for each bin."""
        bins = self.bins()
        label = max((len(text) for text, _ in bins), default=0)
        most = max((count for _, count in bins), default=1)
        return [f"{text:>{label}}  {count:>11,}  {'#' * math.ceil(_BAR * count / most)}" for text, count in bins]


@dataclass
class Summary:
    """Counts of one transformation. Every row in is one of: kept, filtered, malformed."""

    source: str
    target: str
    unit: str = "rows"
    """The unit of `written`."""
    rows: int = 0
    """Lines of the source that are not blank."""
    blank: int = 0
    kept: int = 0
    """Rows that the output is made of."""
    written: int = 0
    """Lines of the output: one for each kept row, or the pairs."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Rows that were left out, by reason."""
    malformed: int = 0
    rejected: str | None = None
    """The file that lists the malformed lines."""
    without_ground_truth: int | None = None
    """Kept rows without a ground truth; None where it is not asked for."""
    ground_truth_from: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """Notes for the user, with the number of rows that each concerns."""
    rewards: Histogram = field(default_factory=Histogram)
    """The rewards of all readable rows that have one."""
    example: bytes | None = None
    """The first line of the output."""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target if self.written else 'nothing written'}"]
        lines += _row("rows in", self.rows, f"{self.blank:,} blank lines skipped" if self.blank else "")
        pairs = f"in {self.written:,} {self.unit}" if self.unit != "rows" else ""
        lines += _row("kept", self.kept, pairs)
        lines += _row("filtered", self.filtered.total(), "")
        lines += [f"{count:>27,}  {reason}" for reason, count in self.filtered.most_common()]
        lines += _row("malformed", self.malformed, f"listed in {self.rejected}" if self.rejected else "")
        if self.without_ground_truth is not None:
            lines += _row("without ground truth", self.without_ground_truth, "of those kept")
        for name, count in self.ground_truth_from.most_common():
            lines += _row("ground truth from", count, name)
        if self.rewards.total:
            low, high = f"{self.rewards.low:.4g}", f"{self.rewards.high:.4g}"
            lines += _row("with a reward", self.rewards.total, f"{low} to {high}, mean {self.rewards.mean:.4g}")
            lines += ["    " + line for line in self.rewards.lines()]
        lines += [f"note, {count:,} rows: {text}" for text, count in self.notes.most_common()]
        if self.example is not None:
            text = self.example.decode(errors="ignore")
            lines += ["first row: " + (text if len(text) <= _SHOWN else text[:_SHOWN] + " ...")]
        lines += [f"{self.seconds:.1f} s, {self.rows / max(self.seconds, 1e-9):,.0f} rows/s"]
        return "\n".join(lines)


def _row(name: str, count: int, remark: str) -> list[str]:
    return [f"{name:<20} {count:>12,}" + (f"  {remark}" if remark else "")]
