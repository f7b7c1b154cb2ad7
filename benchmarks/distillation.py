"""Divergence from a teacher's hidden states in chunks and tiles: peak memory against full float32 logits of both
models, time against the log-prob pass of the same sizes, payload against the teacher's logits. Forward and backward.

    python benchmarks/distillation.py [--tokens 8192] [--vocabulary 151936] [--hidden 2048] [--teacher-hidden 2560]
        [--kind reverse] [--top-k K] [--dtype bfloat16|float32] [--device cpu|cuda] [--skip-full] [--json FILE]

The default widths are those of Qwen3-1.7B and Qwen3-4B. On CPU fewer tokens and words (--tokens 512 --vocabulary 16384)
give the same ratio of times in a minute. Each path runs in its own process, so that their peaks do not mix: resident
memory on CPU, allocated memory on CUDA, minus inputs and their gradients. What is left has the output layer's gradient
once more, in float32, until autograd adds it: `peak_beside_gradient_over_logits` leaves it out. The full path of 8,192
tokens takes about 40 GB: --skip-full leaves it out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from logprob import CHUNK, _allocated, _peak, _synchronize
from torch import Tensor

from grpo_mcore.families.activations import TILES
from grpo_mcore.objective import Divergence
from grpo_mcore.parallel.divergence import divergences
from grpo_mcore.parallel.logprobs import token_scores

REPEATS = 2
SIZES = ("tokens", "vocabulary", "hidden", "teacher_hidden", "kind", "top_k", "dtype", "device")


def run(path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one path: {seconds, processor_seconds (each the least of the repeats), peak_bytes, loss}. Processor seconds
    are those of all threads: on a machine with other work they say more."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    draw = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=draw) * 0.1).to(device, dtype)

    hidden = random(arguments.tokens, arguments.hidden).requires_grad_()
    weight = random(arguments.vocabulary, arguments.hidden).requires_grad_()
    teacher = random(arguments.tokens, arguments.teacher_hidden), random(arguments.vocabulary, arguments.teacher_hidden)
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,), generator=draw).to(device)
    for tensor in (hidden, weight):  # allocated in all paths, and not part of the comparison
        tensor.grad = torch.zeros_like(tensor)
    divergence = Divergence(arguments.kind, 0.5, arguments.top_k)
    how: dict[str, Any] = {
        "group": None, "vocab_start": 0, "vocab_size": arguments.vocabulary, "temperature": 1.0, "chunk": CHUNK,
        "tile": TILES["gpu" if device.type == "cuda" else "cpu"],
    }  # fmt: skip

    def compute() -> Tensor:
        if path == "logprobs":
            return token_scores(hidden, weight, targets, **how)[0]
        if path == "chunked":
            return divergences(hidden, weight, *teacher, targets, divergence=divergence, **how)[1]
        p = (hidden @ weight.T).float().log_softmax(-1)
        q = (teacher[0] @ teacher[1].T).float().log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)  # the reverse KL

    before, seconds, processor = _allocated(device), [], []
    for _ in range(REPEATS):
        _synchronize(device)
        began, used = time.perf_counter(), time.process_time()
        values = compute()
        values.mean().backward()
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
    return {
        "seconds": min(seconds),
        "processor_seconds": min(processor),
        "peak_bytes": _peak(device) - before,
        "loss": values.detach().double().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--teacher-hidden", type=int, default=2560)
    parser.add_argument("--kind", choices=["forward", "reverse", "mixed", "jsd"], default="reverse")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--skip-full", action="store_true")
    parser.add_argument("--json", nargs="?", const=Path("/dev/stdout"), type=Path, help="print the figures, or to FILE")
    parser.add_argument("--only", choices=["logprobs", "chunked", "full"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run(arguments.only, arguments)))
        return
    paths: dict[str, dict[str, Any]] = {}
    compares = arguments.kind == "reverse" and arguments.top_k is None and not arguments.skip_full
    for path in ("logprobs", "chunked", *(["full"] if compares else [])):
        command = [sys.executable, __file__, "--only", path]
        for name in SIZES:
            if (value := getattr(arguments, name)) is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        paths[path] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{path:8} {paths[path]['seconds']:8.2f} s forward + backward   peak "
            f"{paths[path]['peak_bytes'] / 2**30:6.2f} GiB",
            flush=True,
        )
    if compares:
        ours, theirs = (paths[path]["loss"] for path in ("chunked", "full"))
        assert abs(ours - theirs) <= (1e-2 if arguments.dtype == "bfloat16" else 1e-4) * abs(theirs), (ours, theirs)
    logits = 4 * arguments.tokens * arguments.vocabulary
    element = 2 if arguments.dtype == "bfloat16" else 4
    peak, gradient = paths["chunked"]["peak_bytes"], 4 * arguments.vocabulary * arguments.hidden
    ratios = {
        "peak_over_one_models_logits": peak / logits,
        "peak_beside_gradient_over_logits": (peak - gradient) / logits,
        "time_over_logprobs": paths["chunked"]["seconds"] / paths["logprobs"]["seconds"],
        "processor_time_over_logprobs": paths["chunked"]["processor_seconds"] / paths["logprobs"]["processor_seconds"],
        "logits_over_payload": arguments.vocabulary * element / (arguments.teacher_hidden * element),
    }
    print("  ".join(f"{name} {value:.3g}" for name, value in ratios.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(ratios | paths, indent=1))


if __name__ == "__main__":
    main()
