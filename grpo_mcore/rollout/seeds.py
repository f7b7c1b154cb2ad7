"""Seeds of all random draws of a run (DESIGN law 5)."""

from __future__ import annotations

from hashlib import blake2b


def sample_seed(seed: int, step: int, uid: str, generation_index: int, turn: int = 0) -> int:
    """The seed of one turn of a sample, in 0 .. 2^63 - 1: a hash of (grpo.seed, step, prompt uid, generation index)
    and, after the first, of the turn."""
    text = f"{seed}/{step}/{uid}/{generation_index}" + (f"/{turn}" if turn else "")
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
