"""The endpoint's memory: the weights and the engine that generated each completion, and the count of equal requests."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from grpo_mcore.rollout.seeds import sample_seed

Spans = tuple[tuple[int, int, int], ...]

KEPT = 200_000
"""Maximum number of remembered completions (about 50 MB): more than are ever in flight."""


class ChatRecord:
    """Remembers completions. Several threads may use it. `seed`: seed of the run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._generated: OrderedDict[str, tuple[Spans, int]] = OrderedDict()
        self._asked: Counter[bytes] = Counter()
        self._version = 0

    def seed(self, body: Any, weight_version: int) -> int:
        """Derive a seed for a request from the run's seed, the weight version, the request and the number of equal
        requests before it. So the samples of a prompt differ, and a rerun draws the same ones."""
        key = blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16)
        with self._lock:
            if weight_version != self._version:
                self._asked.clear()
                self._version = weight_version
            number = self._asked[key.digest()]
            self._asked[key.digest()] += 1
        return sample_seed(self._seed, weight_version, key.hexdigest(), number)

    def note(self, fingerprint: str, spans: Spans, engine: int) -> None:
        """Remember a completion. `fingerprint`: of its prompt and answer together."""
        with self._lock:
            self._generated[fingerprint] = spans, engine
            while len(self._generated) > KEPT:
                self._generated.popitem(last=False)

    def weight_versions(self, fingerprints: Sequence[str]) -> list[Spans | None]:
        """Return the weight versions of each completion; None for tokens that were not generated here."""
        with self._lock:
            found = [self._generated.get(fingerprint) for fingerprint in fingerprints]
        return [known and known[0] for known in found]

    def engine_of(self, fingerprint: str) -> int | None:
        """Return the engine that generated a completion, and so may have it in its prefix cache."""
        with self._lock:
            known = self._generated.get(fingerprint)
        return known and known[1]
