"""Peak memory and time of an export, by the size of its files: a checkpoint of a Qwen3 with random weights.

    .venv/bin/python benchmarks/export.py [--layers 12] [--hidden 1536] [--json]

Each export is a process of its own, whose memory before the weights are read is reported too: the libraries.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SHARD_MB = (64, 256, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # model, checkpoint, MB: one export, in this process
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_export(*args.one)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model, checkpoint = make(Path(scratch), args.layers, args.hidden)
        rows = []
        for size in SHARD_MB:
            command = [sys.executable, __file__, "--one", str(model), str(checkpoint), str(size)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]))
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'file MB':>8} {'model GB':>9} {'peak GB':>8} {'libraries GB':>13} {'seconds':>8}")
    for row in rows:
        print(
            f"{row['file_mb']:8} {row['model_gb']:9.3f} {row['peak_gb']:8.3f} {row['libraries_gb']:13.3f} "
            f"{row['seconds']:8.1f}"
        )


def make(folder: Path, layers: int, hidden: int) -> tuple[Path, Path]:
    """Write a config without weights, and a checkpoint of that model in bfloat16: (model, policy checkpoint)."""
    import torch
    from transformers import Qwen3Config

    from grpo_mcore.families import read_hf_config, shape_of
    from grpo_mcore.parallel.platform import Platform
    from grpo_mcore.parallel.weights.export import ONE_RANK, one_rank
    from grpo_mcore.recipe import MegatronConfig

    model, checkpoint = folder / "model", folder / "checkpoint"
    Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=3 * hidden, num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 256, head_dim=128, vocab_size=32000, tie_word_embeddings=False,
    ).save_pretrained(model)  # fmt: skip
    with one_rank():
        from megatron.core import dist_checkpointing

        from grpo_mcore.parallel.model import build_model

        shape = shape_of(read_hf_config(model))
        (network,) = build_model(shape, ONE_RANK, MegatronConfig(), torch.bfloat16, Platform("cpu"))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_()
        checkpoint.mkdir()
        dist_checkpointing.save(network.sharded_state_dict(), str(checkpoint))
    return model, checkpoint


def one_export(model: str, checkpoint: str, file_mb: str) -> dict[str, float]:
    import time

    from grpo_mcore.parallel.weights.export import export_merged, one_rank
    from grpo_mcore.recipe import PolicyConfig

    with one_rank():
        pass
    libraries, began = _peak(), time.perf_counter()
    target = Path(checkpoint).with_name(f"out-{file_mb}")
    config = PolicyConfig.model_validate({"model_name": model, "precision": "bfloat16"})
    export_merged(Path(checkpoint), config, Path(model), target, shard_bytes=int(file_mb) << 20)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors")) / 1e9
    return {
        "file_mb": int(file_mb),
        "model_gb": size,
        "peak_gb": _peak(),
        "libraries_gb": libraries,
        "seconds": time.perf_counter() - began,
    }


def _peak() -> float:
    """Return this process's peak resident memory in GB. (getrusage would count the parent's, from before exec.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e9


if __name__ == "__main__":
    main()
