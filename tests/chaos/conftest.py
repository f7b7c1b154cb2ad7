from __future__ import annotations

from tests.functional.conftest import model, sft_run, task

__all__ = ["model", "sft_run", "task"]
