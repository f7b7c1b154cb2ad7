"""Token log-probs in chunks against full float32 logits: peak memory and time, forward and backward.

    python benchmarks/logprob.py [--tokens 8192] [--vocabulary 151936] [--hidden 512] [--dtype bfloat16|float32]
                                 [--device cpu|cuda] [--json FILE]

Each path runs in its own process, so that their peaks do not mix: resident memory on CPU, allocated memory on CUDA,
minus inputs and gradients. The full path of 8,192 tokens takes about 20 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.families.activations import TILES
from grpo_mcore.parallel.logprobs import token_scores

TEMPERATURE, CHUNK, REPEATS = 0.8, 1024, 2


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_scores(
        hidden,
        weight,
        targets,
        group=None,
        vocab_start=0,
        vocab_size=weight.size(0),
        temperature=TEMPERATURE,
        chunk=CHUNK,
        tile=TILES["gpu" if hidden.is_cuda else "cpu"],
    )


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float() / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)


def run(path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one path: {seconds (the best of the repeats), peak_bytes, checksum of the log-probs and gradients}."""
    device = torch.device(arguments.device)
    draw = torch.Generator().manual_seed(0)
    dtype = getattr(torch, arguments.dtype)

    def leaf(rows: int) -> Tensor:
        return (torch.randn(rows, arguments.hidden, generator=draw) * 0.1).to(device, dtype).requires_grad_()

    hidden, weight = leaf(arguments.tokens), leaf(arguments.vocabulary)
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,), generator=draw).to(device)
    for tensor in (hidden, weight):  # allocated in both paths, and not part of the comparison
        tensor.grad = torch.zeros_like(tensor)
    compute = {"chunked": chunked, "full": full}[path]
    before = _allocated(device)
    seconds = []
    for _ in range(REPEATS):
        hidden.grad.zero_(), weight.grad.zero_()
        _synchronize(device)
        began = time.perf_counter()
        logprobs = compute(hidden, weight, targets)
        logprobs.mean().backward()
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    sums = [logprobs.detach().double().sum(), hidden.grad.double().square().sum(), weight.grad.double().square().sum()]
    return {
        "seconds": min(seconds),
        "peak_bytes": _peak(device) - before,
        "checksum": [value.item() for value in sums],
    }


def _allocated(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", nargs="?", const=Path("/dev/stdout"), type=Path, help="print the figures, or to FILE")
    parser.add_argument("--only", choices=["chunked", "full"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run(arguments.only, arguments)))
        return
    found = {}
    for path in ("full", "chunked"):
        command = [sys.executable, __file__, "--only", path]
        for name in ("tokens", "vocabulary", "hidden", "device", "dtype"):
            command += [f"--{name}", str(getattr(arguments, name))]
        found[path] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{path:8} {found[path]['seconds']:8.2f} s forward + backward   "
            f"peak {found[path]['peak_bytes'] / 2**30:6.2f} GiB",
            flush=True,
        )
    for ours, theirs in zip(found["chunked"]["checksum"], found["full"]["checksum"], strict=True):
        tolerance = 1e-2 if arguments.dtype == "bfloat16" else 1e-4
        assert abs(ours - theirs) <= tolerance * abs(theirs), (found["chunked"]["checksum"], found["full"]["checksum"])
    ratios = {
        "peak_ratio": found["chunked"]["peak_bytes"] / found["full"]["peak_bytes"],
        "time_ratio": found["chunked"]["seconds"] / found["full"]["seconds"],
    }
    print(
        f"{arguments.tokens} tokens, vocabulary {arguments.vocabulary}, hidden {arguments.hidden}, "
        f"{arguments.dtype}, {arguments.device}: chunked takes {ratios['peak_ratio']:.3f} of the memory and "
        f"{ratios['time_ratio']:.2f} of the time"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(ratios | found, indent=1))


if __name__ == "__main__":
    main()
