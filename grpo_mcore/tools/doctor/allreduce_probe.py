"""One of two processes that all-reduce a tensor: `python -m ... BACKEND SECONDS PARENT_PID HOST:PORT RANK DEVICE`. Exit
code 0: the sum is correct."""

from __future__ import annotations

import sys
from datetime import timedelta

from grpo_mcore.processes import die_with_parent


def main(backend: str, seconds: str, parent: str, address: str, rank: str, device: str) -> None:
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
    tensor = torch.full((1 << 20,), float(int(rank) + 1), device=place)
    torch.distributed.all_reduce(tensor)
    right = bool((tensor == 3.0).all())
    torch.distributed.destroy_process_group()
    if not right:
        sys.exit("the sum over two processes is wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
