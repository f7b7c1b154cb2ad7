"""Bounds of a chat template, which is a program of the model's author: `{{ 'a' * 10**10 }}` is a valid one."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_mcore.data.interfaces import DataError

log = logging.getLogger(__name__)

RENDER_S = 60.0
"""Time in which a conversation must be rendered. Templates take milliseconds; a machine may be slow."""
RENDER_BYTES = 2 << 30
"""Memory that the first rendering may take."""


class TemplateTime(DataError):
    """A chat template that does not come to an end."""


@contextlib.contextmanager
def in_time(seconds: float | None = None) -> Iterator[None]:
    """Raise TemplateTime in the block after `seconds`, RENDER_S by default. In the main thread only, where signals
    arrive."""
    seconds = RENDER_S if seconds is None else seconds
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: Any) -> None:
        raise TemplateTime(f"the chat template is not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def in_memory(more_bytes: int = RENDER_BYTES) -> Iterator[None]:
    """Let the process take `more_bytes` more than it has, in the block: MemoryError beyond. It is meant for the start,
    while no other thread maps memory."""
    status = Path("/proc/self/statm")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not status.exists():  # not Linux
        yield
        return
    limit = int(status.read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + more_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def try_template(tokenizer: Any, name: str) -> None:
    """Render a short conversation. Raises DataError where that takes too long or too much memory, and where it shows
    nothing of the question; what else a template refuses is said where its text is needed."""
    asked = [{"role": "user", "content": "question"}]
    try:
        with in_time(), in_memory():
            shown = tokenizer.apply_chat_template(asked, tokenize=False)
            prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "answer"}], tokenize=False)
    except (TemplateTime, MemoryError) as error:
        why = str(error) or f"it takes more than {RENDER_BYTES >> 30} GiB"
        raise DataError(
            f"the chat template of {name!r} cannot be used: {why}; set another policy.tokenizer.chat_template"
        ) from error
    except Exception:  # it may want other messages
        return
    if not all(isinstance(text, str) for text in (shown, prompt, whole)):
        return
    header = whole.removeprefix(prompt).partition("answer")[0].strip()
    if shown == prompt and whole.startswith(prompt) and header:
        log.warning(
            "the chat template of %r has no generation prompt: the policy has to write %r before each answer",
            name,
            header,
        )
    if "question" not in shown:
        raise DataError(f"the chat template of {name!r} does not show a question; set policy.tokenizer.chat_template")
