"""Answers with programs, and what an environment says to them."""

from __future__ import annotations

from typing import Any

from grpo_mcore.environments.code.environment import CodeEnvironment


def said(*programs: str) -> list[list[dict[str, Any]]]:
    return [[{"role": "assistant", "content": f"So:\n```python\n{program}\n```\nDone."}] for program in programs]


def judge(env: CodeEnvironment, program: str, **row: Any) -> tuple[float | None, str]:
    result = env.step(said(program), [row])
    return result.rewards[0], result.reasons[0]
