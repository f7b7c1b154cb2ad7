"""Results of a gym's rollout as its server sends them."""

from __future__ import annotations

from typing import Any


def item(prompt: list[int], generated: list[int], text: str = "a", **more: Any) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": [-0.5] * len(generated),
        **more,
    }


def result(*output: Any, **more: Any) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": "why?"}]}
    return {"responses_create_params": params, "response": {"output": list(output)}, "reward": 1.0, **more}


TWO = (
    item([1, 2], [3, 4], "one"),
    {"type": "function_call_output", "call_id": "c", "output": "seen"},
    item([1, 2, 3, 4, 5], [6], "two"),
)
