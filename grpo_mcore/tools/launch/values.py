"""Mounts and times, as a recipe writes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mount:
    """A folder `source` of the nodes, seen as `target` in the container."""

    source: str
    target: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Of "FROM:TO" or "FROM:TO:ro". Raises ValueError."""
        parts = text.split(":")
        if len(parts) not in (2, 3) or not all(parts[:2]) or parts[2:] not in ([], ["ro"], ["rw"]):
            raise ValueError(f'expected "FROM:TO" or "FROM:TO:ro", got "{text}"')
        if not parts[1].startswith("/"):
            raise ValueError(f'in "{text}" the folder in the container must be absolute')
        return cls(parts[0], parts[1], parts[2:] == ["ro"])

    def __str__(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


def seconds(limit: str) -> int:
    """Of "D-HH:MM:SS" or "HH:MM:SS"."""
    days, _, clock = limit.rpartition("-")
    hours, minutes, rest = clock.split(":")
    return ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(rest)
