"""Truths verified against themselves: one that its own verifier does not accept is reached by no answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_mcore.base.text import shorten
from grpo_mcore.environments.math.verifiers import (
    HF_MATH_VERIFY,
    compare_plain_numbers,
    ground_truths,
    is_built_in,
    verifier_modules,
)
from grpo_mcore.environments.verifier_pool import VerifierPool, WorkerSpec

Rows = Sequence[Mapping[str, Any]]

_COLLECTION = re.compile(r"\s*[{\[]\s*['\"]")  # JSON or Python, of texts


def truth_problems(verifier: str, rows: Rows, environment: str, timeout_s: float = 5.0) -> list[str | None]:
    """Return for each prompt, given by its `extra_env_info`, why no answer could be right; None where one could. The
    form of the answers that a verifier of one's own reads is not known: of its truths only the kind is checked."""
    problems: list[str | None] = [None] * len(rows)
    asked: list[tuple[int, str]] = []
    for place, row in enumerate(rows):
        try:
            truths = ground_truths(row, environment)
        except ValueError as error:
            problems[place] = str(error)
        else:
            if is_built_in(verifier):
                if written := next(filter(_COLLECTION.match, truths), None):
                    kind = "dict" if written.lstrip().startswith("{") else "list"
                    problems[place] = f"the ground truth {shorten(written)!r} is a {kind} that became a text"
                    continue
                asked += [(place, truth) for truth in truths if not _is_plain(verifier, truth)]
    if not asked:
        return problems
    pool = VerifierPool(
        WorkerSpec(
            what=f"verifier {verifier!r}",
            loader="grpo_mcore.environments.math.verifiers:make_verifier",
            arguments=(verifier,),
            num_workers=2,
            timeout_s=timeout_s,
            memory_gb=2.0,
            preload=verifier_modules(verifier),
        )
    )
    try:
        results = pool.run([(_as_answer(verifier, truth), truth) for _, truth in asked])
    finally:
        pool.close()
    for (place, truth), result in zip(asked, results, strict=True):
        if result.failure is not None:
            problems[place] = f"{verifier} fails on the ground truth {shorten(truth)!r}: {result.failure}"
        elif result.value[0] <= 0:
            problems[place] = f"{verifier} does not accept the ground truth {shorten(truth)!r} as an answer to itself"
    return problems


def _is_plain(verifier: str, truth: str) -> bool:
    return verifier == HF_MATH_VERIFY and compare_plain_numbers(truth, truth) is not None


def _as_answer(verifier: str, truth: str) -> str:
    """Return a response that gives the truth as its answer."""
    if verifier == HF_MATH_VERIFY:
        return truth if "\\boxed" in truth or "answer" in truth.lower() else f"\\boxed{{{truth}}}"
    return f"Answer: {truth}"
