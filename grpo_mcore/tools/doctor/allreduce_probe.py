"""One process of an all-reduce that checks the sum and measures the bandwidth:
`python -m ... BACKEND SECONDS PARENT_PID HOST:PORT RANK WORLD_SIZE DEVICE MEGABYTES`. It prints the GB/s in each
direction of the fastest of several repetitions. Exit code 0: the sum is correct."""

import sys
import time
from datetime import timedelta

from grpo_mcore.base.processes import die_with_parent

REPETITIONS = 6


def main(
    backend: str, seconds: str, parent: str, address: str, rank: str, world_size: str, device: str, megabytes: str
) -> None:
    die_with_parent(int(parent))
    import torch

    world = int(world_size)
    torch_device = torch.device("cuda", int(device)) if backend == "nccl" else torch.device("cpu")
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    torch.distributed.init_process_group(
        backend,
        init_method=f"tcp://{address}",
        rank=int(rank),
        world_size=world,
        timeout=timedelta(seconds=float(seconds)),
    )
    tensor = torch.full((int(megabytes) << 18,), float(int(rank) + 1), device=torch_device)
    torch.distributed.all_reduce(tensor)
    right = bool((tensor == world * (world + 1) / 2).all())
    tensor.zero_()
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
        times.append(time.perf_counter() - start)
    torch.distributed.destroy_process_group()
    if not right:
        sys.exit(f"the sum over {world} processes is wrong")
    print(2 * (world - 1) / world * tensor.nbytes / min(times) / 1e9)  # what a rank of a ring sends and receives


if __name__ == "__main__":
    main(*sys.argv[1:])
