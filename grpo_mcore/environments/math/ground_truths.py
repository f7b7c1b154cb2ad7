"""Ground truths verified against themselves: where its own verifier does not accept one, no answer can be right."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_mcore.base.text import shorten
from grpo_mcore.environments.math.verifiers import (
    HF_MATH_VERIFY,
    ground_truths,
    is_built_in,
    verifier_modules,
)
from grpo_mcore.environments.verifier_pool import VerifierPool, WorkerSpec

Rows = Sequence[Mapping[str, Any]]

_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,6})?")
"""A ground truth that hf_math_verify accepts: data with others alone need no worker processes for this check."""
_COLLECTION = re.compile(r"\s*[{\[]\s*['\"]")  # JSON or Python, of texts
_MISSING = re.compile(r"None|null|NaN|nan|NaT|<NA>")  # of Python, JSON and pandas


def ground_truth_problems(verifier: str, rows: Rows, environment: str, timeout_s: float = 5.0) -> list[str | None]:
    """Return for each prompt, given by its `extra_env_info`, why no answer could be right; None where one could. The
    answers that a custom verifier reads are not known: of its ground truths only the kind is checked."""
    problems: list[str | None] = [None] * len(rows)
    jobs: list[tuple[int, str]] = []
    for index, row in enumerate(rows):
        try:
            texts = ground_truths(row, environment)
        except ValueError as error:
            problems[index] = str(error)
            continue
        if not is_built_in(verifier):
            continue
        if collection := next(filter(_COLLECTION.match, texts), None):
            kind = "dict" if collection.lstrip().startswith("{") else "list"
            problems[index] = f"the ground truth {shorten(collection)!r} is a {kind} that became a text"
            continue
        if missing := next(filter(_MISSING.fullmatch, texts), None):
            problems[index] = f"the ground truth {missing!r} is a missing value that became a text"
            continue
        jobs += [(index, text) for text in texts if verifier != HF_MATH_VERIFY or not _NUMBER.fullmatch(text)]
    if not jobs:
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
        results = pool.run([(_as_answer(verifier, text), text) for _, text in jobs])
    finally:
        pool.close()
    for (index, text), result in zip(jobs, results, strict=True):
        if result.failure is not None:
            problems[index] = f"{verifier} fails on the ground truth {shorten(text)!r}: {result.failure}"
        elif result.value[0] <= 0:
            problems[index] = f"{verifier} does not accept the ground truth {shorten(text)!r} as an answer to itself"
    return problems


def _as_answer(verifier: str, ground_truth: str) -> str:
    """Return a response that gives the ground truth as its answer."""
    if verifier != HF_MATH_VERIFY:
        return f"Answer: {ground_truth}"
    is_a_solution = "\\boxed" in ground_truth or "answer" in ground_truth.lower()
    return ground_truth if is_a_solution else f"\\boxed{{{ground_truth}}}"
