"""How one response is verified: by math-verify, or by a function of the user's. No torch here: workers stay
small.

A verifier is `fn(response, truth) -> bool | float | (bool | float, answer)`, named by import path.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_mcore.environments.registry import import_by_path

HF_MATH_VERIFY = "hf_math_verify"
_SHOWN = 200  # characters of an answer or an error in a reason: enough to recognise it


@dataclass(frozen=True)
class Verdict:
    """`reward` None: the verification itself failed, and `reason` says how."""

    reward: float | None
    answer: str | None
    reason: str
    seconds: float


def verify_one(verifier: Callable[[str, str], Any], response: str, truth: str) -> Verdict:
    """The verdict on one response. An exception of the verifier becomes the reason."""
    start = time.perf_counter()
    try:
        outcome = verifier(response, truth)
        reward, answer = outcome if isinstance(outcome, tuple) else (outcome, None)
        reward = float(reward)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return Verdict(None, None, f"crashed: {shorten(detail)}", time.perf_counter() - start)
    return Verdict(reward, answer, reason_for(reward, answer, truth), time.perf_counter() - start)


def reason_for(reward: float, answer: str | None, truth: str) -> str:
    """Why a response got its reward, in words."""
    if reward == 1.0:
        return "correct"
    if reward != 0.0:
        return f"partly correct: {reward:g}"
    if answer is None:
        return "no answer found"
    return f"wrong: {shorten(answer)} != {shorten(truth)}"


@functools.cache
def load_verifier(verifier: str) -> Callable[[str, str], Any]:
    """The function behind `hf_math_verify` or an import path."""
    return hf_math_verify if verifier == HF_MATH_VERIFY else import_by_path(verifier, what="math verifier")


def hf_math_verify(response: str, truth: str) -> tuple[bool, str | None]:
    """(correct, extracted answer) by math-verify, without its own limits: the pool has a harder one."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    boxed = truth if "\\boxed" in truth else f"\\boxed{{{truth}}}"
    gold = parse(boxed, [LatexExtractionConfig()], parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"the ground truth {truth!r} is not a mathematical expression")
    targets = [ExprExtractionConfig(), LatexExtractionConfig()]
    found = parse(response, targets, parsing_timeout=None, raise_on_error=True)
    if not found:
        return False, None
    # The last entry is the answer as written; an expression could take for ever to print.
    answer = found[-1] if isinstance(found[-1], str) else None
    return bool(verify(gold, found, timeout_seconds=None, raise_on_error=True)), answer


def shorten(text: str) -> str:
    """On one line, and not much more."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."
