"""The wire of a disaggregated refit between two GPUs: NCCL send and receive, bit for bit."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch

from grpo_mcore.base.addresses import LOOPBACK
from grpo_mcore.refit.transport.network import Network

MESSAGES, MESSAGE_MIB = 16, 256  # 4 GiB
TIMEOUT_S = 120.0


def values(number: int, device: int) -> torch.Tensor:
    """bfloat16: every bit pattern, the same in every process."""
    count = MESSAGE_MIB * 2**20 // 2
    pattern = torch.arange(number, count + number, device=f"cuda:{device}", dtype=torch.int32)
    return (pattern & 0xFFFF).to(torch.int16).view(torch.bfloat16)


def receive(pipe: Any) -> None:
    """The engines' node, on the second GPU."""
    torch.cuda.set_device(1)
    network = Network(pipe.recv(), 1)
    places = [torch.empty(MESSAGE_MIB * 2**20, dtype=torch.uint8, device="cuda:1") for _ in range(MESSAGES)]
    network.exchange((), [(place, 0) for place in places])
    torch.cuda.synchronize()
    pipe.send([torch.equal(place, values(i, 1).view(torch.uint8)) for i, place in enumerate(places)])
    network.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of its ranks: two are needed")
def test_what_is_sent_arrives() -> None:
    torch.cuda.set_device(0)
    network = Network.host(2, [1], [-1], TIMEOUT_S, torch.device("cuda", 0), LOOPBACK)
    assert network.description["kind"] == "nccl" and network.device.type == "cuda"
    pipe, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
    process.start()
    pipe.send(network.description)
    messages = [(network.message(values(i, 0), torch.bfloat16), 1) for i in range(MESSAGES)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    network.exchange(messages, ())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert pipe.poll(TIMEOUT_S) and pipe.recv() == [True] * MESSAGES
    print(f"\nover NCCL {MESSAGES * MESSAGE_MIB * 2**20 / seconds / 1e9:.1f} GB/s, the group's start included")
    process.join(30)
    network.close()
