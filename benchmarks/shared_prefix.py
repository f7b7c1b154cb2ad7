"""Shared prefixes against the same samples computed whole: seconds and memory of a training step and a log-prob pass.

    python benchmarks/shared_prefix.py [--repeats 3] [--json FILE]

A Qwen3 of 27 M parameters in float32 on one rank. A row has the samples of one prompt (group), or of one conversation
that forks into two at each of three turns (agent). Whole and shared rows take turns in one process; a ratio is shared /
whole, of the median seconds, or, in steps of their own, of the peaks of resident memory (every 10 ms) above what the
process has before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.base import processes
from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows, share_prefixes
from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.platform import cpu_threads
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import PolicyConfig
from grpo_mcore.tools.demo.tiny_models import make_tiny_model

SHAPE = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
CASES = [("group", 512, 64), ("group", 256, 256), ("group", 64, 512), ("agent", 256, 128)]
"""Kind, tokens of the prompt, tokens of an answer or turn."""
SAMPLES = 8


class _GradientsTaken(Exception):
    """Ends a training step before its update."""


def samples_of(kind: str, prompt: int, answer: int) -> list[Tensor]:
    """Return 8 samples, int64 [length]: a group's, or the paths through three forks of two turns each."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randint(SHAPE["vocab_size"], (count,), generator=draw)

    paths = [tokens(prompt)]
    for _ in range(3 if kind == "agent" else 1):
        branches = 2 if kind == "agent" else SAMPLES
        paths = [torch.cat([path, tokens(answer)]) for path in paths for _ in range(branches)]
    return paths


def row_of(samples: list[Tensor], prompt: int) -> PackedBatch:
    columns = [
        {
            "token_mask": (torch.arange(len(ids)) >= prompt).float(),
            "sample_mask": torch.tensor(1.0),
            "advantages": torch.tensor((-1.0) ** index),
        }
        for index, ids in enumerate(samples)
    ]
    return pack_rows(samples, columns, names=[str(index) for index in range(len(samples))])


def train(policy: Policy, row: PackedBatch) -> dict[str, Tensor]:
    """Run a training step up to its update. Return the gradients by parameter."""

    def stop() -> None:
        raise _GradientsTaken

    policy.before_update = stop
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0), prev_equals_curr=True)
    try:
        policy.train_step([row], loss_fn, global_valid_seqs=SAMPLES, global_valid_toks=int(row.tokens.numel()))
    except _GradientsTaken:
        pass
    chunks = (chunk.module.named_parameters() for chunk in policy.chunks)
    return {name: parameter.main_grad for parameters in chunks for name, parameter in parameters}


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak(work: Callable[[], Any]) -> int:
    """Return the peak bytes of resident memory above those before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, so that it is seen when it is used again
    done, seen = threading.Event(), [_resident()]

    def watch() -> None:
        while not done.wait(0.01):
            seen.append(_resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(seen) - seen[0]


def _resident() -> int:
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])


def measure(policy: Policy, kind: str, prompt: int, answer: int, repeats: int) -> dict[str, Any]:
    """Return the ratios of a case, and the largest differences of log-probs and, relative to its norm, of a parameter's
    gradient."""
    whole = row_of(samples_of(kind, prompt, answer), prompt)
    shared = share_prefixes(whole)
    assert shared.shared is not None
    rows = (whole, shared)
    (first,), (second,) = (policy.logprobs([row]) or [] for row in rows)
    expected, found = ({name: value.clone() for name, value in train(policy, row).items()} for row in rows)
    errors = [((found[name] - value).norm() / value.norm()).item() for name, value in expected.items()]
    ratios = {}
    for name, work in (("train", train), ("logprob", lambda policy, row: policy.logprobs([row]))):
        turns = [[seconds(lambda row=row, work=work: work(policy, row)) for row in rows] for _ in range(repeats)]
        apart, together = (median(turn[i] for turn in turns) for i in (0, 1))
        ratios |= {f"{name}_seconds": round(apart, 3), f"{name}_ratio": round(together / apart, 3)}
    peaks = [max(peak(lambda row=row: train(policy, row)) for _ in range(2)) for row in rows]
    ratios["peak_ratio"] = round(peaks[1] / peaks[0], 3)
    return {
        "kind": kind,
        "prompt": prompt,
        "answer": answer,
        "group": SAMPLES,
        "tokens_ratio": round(sum(shared.shared.new_tokens) / sum(whole.lengths), 3),
        **ratios,
        "max_logprob_diff": (first - second).abs().max().item(),
        "max_grad_rel_diff": max(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="turns that are counted")
    parser.add_argument("--json", nargs="?", const=Path("/dev/stdout"), type=Path, help="print the figures, or to FILE")
    args = parser.parse_args()
    torch.set_num_threads(cpu_threads(1))
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model("qwen3", Path(folder), **SHAPE)
        rates = {"optimizer": {"min_lr": 0.0}, "scheduler": {"lr_warmup_init": 0.0}}
        config = PolicyConfig.model_validate({"model_name": folder, "precision": "float32", "megatron_cfg": rates})
        address = Address(0, 1, 0, "127.0.0.1", processes.free_port())
        policy = Policy(config, address, seed=0, timeout_s=60, reference=False)
        cases = [measure(policy, *case, args.repeats) for case in CASES]
        policy.shutdown()
    names = list(cases[0])
    print("  ".join(f"{name:>16}" for name in names))
    for case in cases:
        values = (f"{value:.2g}" if name.endswith("diff") else str(value) for name, value in case.items())
        print("  ".join(f"{value:>16}" for value in values))
    if args.json:
        args.json.write_text(json.dumps({"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
