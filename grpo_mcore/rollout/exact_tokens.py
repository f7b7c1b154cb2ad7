"""What keeps a conversation of several turns exact in its tokens. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def fingerprint(token_ids: Sequence[int]) -> str:
    """A name for a sequence of tokens: equal for equal ones."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


def said_already(ids: Sequence[int], end: Sequence[int], stop_token: int | None, eos_token_id: int | None) -> int:
    """Return how many of `ids`, the tokens that the chat template puts after an answer, the generated turn has already.

    `end`: tokens that end every answer. `stop_token`: the token that ended the turn, None where none did.
    """
    if stop_token is None or stop_token not in end:
        return 0
    count = list(end).index(stop_token) + 1
    is_marker = count == 1 or stop_token == eos_token_id
    return count if is_marker and list(ids[:count]) == list(end[:count]) else 0
