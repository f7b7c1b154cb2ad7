"""How much longer a product of matrices takes in bfloat16 than in float32 on one core, by the instructions that torch
and oneDNN may use: python -m benchmarks.bfloat16_cpu

On an Intel Xeon at 2.8 GHz with AVX-512 and without avx512_bf16 and amx_bf16 (November 2026, a loaded machine,
processor time, [512, 1024] x [1024, 1024]): AVX-512 9.3 ms in float32, 35.7 in bfloat16 (3.9 x); AVX2 15.4 ms and
2,081 (135 x).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

LEVELS = {
    "all": {},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""Limits of the instructions, as variables that the libraries read when they are loaded."""
ROUNDS = 5


def measure() -> None:
    """Print the least milliseconds of processor time of the product, in float32 and in bfloat16."""
    import torch

    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(512, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
        least = float("inf")
        for _ in range(ROUNDS):
            started_at = time.process_time()
            left @ right
            least = min(least, time.process_time() - started_at)
        print(f"  {str(dtype).removeprefix('torch.'):<9} {1e3 * least:9.2f} ms", flush=True)


if __name__ == "__main__":
    if "measure" in sys.argv:
        measure()
    else:
        for level, limits in LEVELS.items():
            print(f"instructions: {level}", flush=True)
            words = [sys.executable, "-m", "benchmarks.bfloat16_cpu", "measure"]
            subprocess.run(words, env={**os.environ, **limits}, check=True)
