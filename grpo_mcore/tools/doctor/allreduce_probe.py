"""One of two processes that all-reduce a tensor, check the sum and measure the bandwidth:
`python -m ... BACKEND SECONDS PARENT_PID HOST:PORT RANK DEVICE MEGABYTES`. It prints the GB/s of the fastest of several
repetitions, in each direction. Exit code 0: the sum is correct."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from grpo_mcore.base.processes import die_with_parent

REPETITIONS = 6


def main(backend: str, seconds: str, parent: str, address: str, rank: str, device: str, megabytes: str) -> None:
    die_with_parent(int(parent))
    import torch

    place = torch.device("cuda", int(device)) if backend == "nccl" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    torch.distributed.init_process_group(
        backend,
        init_method=f"tcp://{address}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=float(seconds)),
    )
    tensor = torch.full((int(megabytes) << 18,), float(int(rank) + 1), device=place)
    torch.distributed.all_reduce(tensor)
    right = bool((tensor == 3.0).all())
    tensor.zero_()
    took = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        took.append(time.perf_counter() - began)
    torch.distributed.destroy_process_group()
    if not right:
        sys.exit("the sum over two processes is wrong")
    print(tensor.nbytes / min(took) / 1e9)  # each of two ranks sends and receives the whole tensor once


if __name__ == "__main__":
    main(*sys.argv[1:])
