"""What `check.check_file` found, as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from grpo_mcore.data.gym.histogram import Histogram

_NAMED = 5  # rows that are named for each kind of problem
_FIELDS = 20
_LONGEST_SAMPLE = 3000  # characters


@dataclass
class CheckReport:
    """Counts over a file. `usable`: whether a run can use every row."""

    file: str
    read_as: str = ""
    rows: int = 0
    """Lines that are not blank."""
    usable_rows: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=dict)
    """The first rows of each kind of problem; `counts` has all."""
    counts: Counter[str] = field(default_factory=Counter)
    lengths: Histogram = field(default_factory=Histogram)
    """Tokens of the prompts, or of whole conversations where answers are trained on."""
    limit: int | None = None
    longest_sequence: int | None = None
    repeated: int = 0
    """Rows whose prompt an earlier row has."""
    with_other_answers: int = 0
    """Prompts that occur with different answers."""
    first_repeated: list[int] = field(default_factory=list)
    """Lines of the first prompt that is repeated."""
    rewards: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    samples: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return self.rows > 0 and self.usable_rows == self.rows

    def add_problem(self, kind: str, where: str) -> None:
        self.counts[kind] += 1
        named = self.problems.setdefault(kind, [])
        if len(named) < _NAMED:
            named.append(where)

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.rows:,} rows, {self.usable_rows:,} usable"]
        if self.read_as:
            lines.append(f"read as {self.read_as}")
        shown = [f"{name} {count:,}" for name, count in self.fields.most_common(_FIELDS)]
        if shown:
            lines.append("fields: " + ", ".join(shown) + (", ..." if len(self.fields) > _FIELDS else ""))
        lines += self._length_lines()
        if self.repeated:
            lines.append(
                f"repeated: {self.repeated:,} rows have the prompt of an earlier row, the first of them in lines "
                f"{', '.join(map(str, self.first_repeated))}; {self.with_other_answers:,} prompts have several answers"
            )
        for name, rewards in self.rewards.items():
            lines.append(f"{name}: {rewards.low:.4g} to {rewards.high:.4g}, mean {rewards.mean:.4g}")
            lines += ["    " + line for line in rewards.lines()]
        for kind, count in self.counts.most_common():
            lines.append(f"cannot be used, {count:,} rows: {kind}")
            lines += [f"    {where}" for where in self.problems[kind]]
            if count > len(self.problems[kind]):
                lines.append("    ...")
        if not self.rows:
            lines.append("cannot be used: there is no row in it")
        for number, sample in enumerate(self.samples, start=1):
            cut = sample if len(sample) <= _LONGEST_SAMPLE else sample[:_LONGEST_SAMPLE] + " ..."
            lines.append(f"\nsample {number}, {cut}")
        return "\n".join(lines)

    def _length_lines(self) -> list[str]:
        lengths = self.lengths
        if not lengths.total or self.limit is None or self.longest_sequence is None:
            return []
        steps = ", ".join(f"{name} {lengths.quantile(share):,.0f}" for name, share in (("median", 0.5), ("p95", 0.95)))
        lines = [f"tokens: {lengths.low:,.0f} to {lengths.high:,.0f}, {steps}; the limit is {self.limit:,}"]
        room = self.longest_sequence - int(min(lengths.high, self.limit))
        if self.longest_sequence > self.limit or room > 0:
            lines.append(f"the longest of them leaves {room:,} of {self.longest_sequence:,} tokens")
        return lines + ["    " + line for line in lengths.lines()]
