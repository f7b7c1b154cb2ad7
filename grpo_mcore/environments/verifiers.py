"""How one response is verified: by math-verify, by rules on strings, or by a function of the user's. No torch here:
workers stay small.

A verifier is `fn(response, truth) -> bool | float | (bool | float, answer)`, known by name or import path. One that
keeps no thread, file or connection may have an attribute `learns = True`: then its first verifications are done again
in the process that others are forked from, whose caches are warm from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mcore.environments.pool_worker import shorten
from grpo_mcore.environments.registry import import_by_path

Verifier = Callable[[str, str], Any]

HF_MATH_VERIFY = "hf_math_verify"
DAPO_MATH_VERIFY = "dapo_math_verify"
ENGLISH_MULTICHOICE = "english_multichoice"
MULTILINGUAL_MULTICHOICE = "multilingual_multichoice"

_BY_NAME = {
    HF_MATH_VERIFY: "grpo_mcore.environments.verifiers:hf_math_verify",
    DAPO_MATH_VERIFY: "grpo_mcore.environments.dapo:dapo_math_verify",
    ENGLISH_MULTICHOICE: "grpo_mcore.environments.multiple_choice:english_choice",
    MULTILINGUAL_MULTICHOICE: "grpo_mcore.environments.multiple_choice:multilingual_choice",
}
_OF_EVERY_KIND = (
    ("x^2 + 3x + 2", "(x+1)(x+2)"),
    (r"\sqrt{2}+1", r"1+\sqrt{2}"),
    (r"\frac{\pi}{4}", "0.785"),
    ("x=3", "3"),
    ("(3,4)", "(4,3)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"(0,1)\cup[2,3)", r"[2,3)\cup(0,1)"),
    (r"x\in[0,1]", "x<3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"e^{i\pi}", "-1"),
    (r"\log_2 8", r"\binom{5}{2}"),
    (r"\int_0^1 x dx", r"\sum_{k=1}^{3} k"),
)


@dataclass(frozen=True)
class Verdict:
    """`reward` None: the verification itself failed, and `reason` says how."""

    reward: float | None
    answer: str | None
    reason: str
    seconds: float


def make_verifier(name: str) -> Callable[[str, str], tuple[float, str | None]]:
    """(response, truth) -> (reward, answer) by the verifier of this name or import path, with its libraries loaded."""
    verifier: Verifier = import_by_path(_BY_NAME.get(name, name), what="verifier")
    if name == HF_MATH_VERIFY:
        _warm_up()

    def verify(response: str, truth: str) -> tuple[float, str | None]:
        outcome = verifier(response, truth)
        reward, answer = outcome if isinstance(outcome, tuple) else (outcome, None)
        return float(reward), answer

    verify.learns = name in _BY_NAME or getattr(verifier, "learns", False)  # type: ignore[attr-defined]
    return verify


def reason_for(reward: float, answer: str | None, truth: str) -> str:
    """Why a response got its reward, in words. Wrong is 0, or less where a verifier punishes it."""
    if reward == 1.0:
        return "correct"
    if reward > 0.0:
        return f"partly correct: {reward:g}"
    if answer is None:
        return "no answer found"
    return f"wrong: {shorten(answer)} != {shorten(truth)}"


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


def _warm_up() -> None:
    """Has sympy load what it loads late, ahead of deadlines: a first polynomial takes 0.2 s, others 4 ms."""
    for answer, truth in _OF_EVERY_KIND:
        hf_math_verify(f"so ${answer}$", truth)


def ground_truth(metadata: Mapping[str, Any], environment: str) -> str:
    """Raises ValueError where a prompt has none."""
    if metadata.get("ground_truth") is None:
        raise ValueError(
            f"the {environment} environment needs 'ground_truth' in extra_env_info, got {sorted(metadata)}; "
            f"check the dataset's output_key and its processor"
        )
    return str(metadata["ground_truth"])
