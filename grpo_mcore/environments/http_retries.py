"""When a failed request is repeated: one policy for Gyms, the policy's endpoint and asynchronous reward functions."""

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential

T = TypeVar("T")

_MISTAKES = (TypeError, NameError, AttributeError, ImportError, SyntaxError, MemoryError)
LONGEST_WAIT_S = 60.0
"""Maximum seconds between two attempts."""
_TOO_EARLY_OR_BUSY = (408, 425, 429)


def is_transient(status: int) -> bool:
    """Return whether the same request may succeed later: time-outs, rate limits, and failures of the server."""
    return status in _TOO_EARLY_OR_BUSY or status >= 500


def retry_after_s(headers: Any) -> float:
    """Return the seconds that a reply's Retry-After asks to wait, a minute at most; 0 if it asks for nothing.
    `headers`: a mapping or pairs, of any library."""
    try:
        pairs = dict(headers or {}).items()
    except (TypeError, ValueError):
        return 0.0
    value = next((str(value) for name, value in pairs if str(name).lower() == "retry-after"), "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, IndexError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT_S) if math.isfinite(seconds) else 0.0


def failure_of(error: BaseException) -> tuple[int | None, float]:
    """Return the HTTP status of an exception, as aiohttp, httpx, requests, urllib and openai raise it, and the seconds
    that the server asks to wait. The status is None for an exception that is no HTTP failure, such as a broken
    connection or a page of HTML with status 200."""
    while isinstance(error, BaseExceptionGroup):  # a TaskGroup raises one
        error = error.exceptions[0]
    reply = _attribute(error, "response")
    for source in (error, reply):
        for name in ("status", "status_code", "code"):
            status = _attribute(source, name)
            if isinstance(status, int) and 400 <= status < 600:
                headers = _attribute(source, "headers") or _attribute(reply, "headers")
                return status, retry_after_s(headers)
    return None, 0.0


def _attribute(source: object, name: str) -> Any:
    """Return an attribute, None if there is none. A property of a library's exception may raise anything."""
    try:
        return getattr(source, name, None)
    except Exception:
        return None


def repetition_wait_s(error: BaseException) -> float | None:
    """Return the seconds that a server asks to wait before the same request is repeated, 0 if it asks for nothing.
    None: a repetition would fail as well, because the server refuses the request or the caller's code is wrong."""
    status, wait_s = failure_of(error)
    if status is None:
        return None if isinstance(error, _MISTAKES) else 0.0
    return wait_s if is_transient(status) else None


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is repeated. The wait before the first repetition is `backoff_s`, then twice as long each
    time, a minute at most, and no less than the server has asked for."""

    retries: int
    backoff_s: float

    async def run(
        self, attempt: Callable[[], Awaitable[T]], wait_s: Callable[[BaseException], float | None] = repetition_wait_s
    ) -> T:
        """Return the result of the first attempt that succeeds. Raises the last one's error. `wait_s(error)`: the least
        seconds to wait; None if the error is final."""
        backoff = wait_exponential(self.backoff_s, max=LONGEST_WAIT_S)

        def is_repeated(error: BaseException) -> bool:
            return isinstance(error, Exception) and wait_s(error) is not None

        def wait(state: RetryCallState) -> float:
            error = state.outcome and state.outcome.exception()
            return max(backoff(state), (error and wait_s(error)) or 0.0)

        stop = stop_after_attempt(self.retries + 1)
        return await AsyncRetrying(stop=stop, wait=wait, retry=retry_if_exception(is_repeated), reraise=True)(attempt)
