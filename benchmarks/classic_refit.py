"""The classic refit, the baseline of benchmarks/refit.py: whole tensors by a tensor-parallel all-gather, broadcast to
every engine rank (both Gloo, in buckets, one pipeline stage after the other), then vLLM's `load_weights` within its
layerwise reload."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.families import Split, Stage, params_of, pieces, read_hf_config, shape_of


def run_classic(policy: list[Any], engine: Any, folder: str, bucket_bytes: int, version: int) -> dict[str, Any]:
    """The largest tensor decides the bucket: the classic path cannot cut one."""
    shape = shape_of(read_hf_config(folder))
    largest = max(2 * sum(tensor.numel for tensor in param.hf) for param in params_of(shape))
    bucket_bytes = max(bucket_bytes, largest)
    began = time.perf_counter()
    sending = [worker.call("send_classic", bucket_bytes) for worker in policy]
    loaded = engine.call("receive_classic", folder, bucket_bytes, version).result()
    sent = [call.result() for call in sending]
    return {
        "seconds": time.perf_counter() - began,
        "moved": sum(one["moved"] for one in sent),
        "buffer": sum(one["buffer"] for one in sent) + bucket_bytes,
        # The stages' gathers overlap, their broadcasts follow each other.
        "stages": {
            "gather": max(one["seconds"]["gather"] for one in sent),
            "wire": sum(one["seconds"]["wire"] for one in sent),
        }
        | loaded,
    }


def join_wire(address: tuple[str, int], rank: int, size: int) -> Any:
    """(a Gloo group beside torch's default one, its store: the master's end must live as long)."""
    store = torch.distributed.TCPStore(*address, size, is_master=rank == 0, timeout=timedelta(seconds=120))
    prefix = torch.distributed.PrefixStore("wire", store)
    return torch.distributed.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=300)), store


@torch.no_grad()
def send_classic(rank: Any, bucket_bytes: int) -> dict[str, Any]:
    """Gathers whole tensors in the tensor-parallel group; its first rank broadcasts them, bucket by bucket. Every
    pipeline stage does so with its own."""
    from megatron.core import parallel_state

    tensor_group = parallel_state.get_tensor_model_parallel_group()
    local = {(param.megatron, param.layer): tensor.detach() for param, tensor in rank.weights.local}
    seconds = {"gather": 0.0, "wire": 0.0}
    moved = 0
    flat = torch.empty(bucket_bytes // 2, dtype=torch.bfloat16)
    if rank.group is not None:
        _broadcast(rank.group, flat[:1])  # the engine is done with the stages before: not this one's time
    for stage, bucket in classic_buckets(rank.shape, bucket_bytes, rank.pp):
        if stage != rank.here.pipeline:
            continue
        began, at = time.perf_counter(), 0
        for param in bucket:
            mine = local[param.megatron, param.layer]
            parts = [mine]
            if rank.tp > 1 and param.split is not Split.REPLICATED:
                parts = [torch.empty_like(mine) for _ in range(rank.tp)]
                torch.distributed.all_gather(parts, mine, group=tensor_group)
                moved += mine.nbytes * (rank.tp - 1) * rank.tp if rank.here.tensor == 0 else 0
            if rank.here.tensor == 0:
                at = _to_whole(param, rank.shape, parts, flat, at)
        seconds["gather"] += time.perf_counter() - began
        if rank.group is not None:
            began = time.perf_counter()
            _broadcast(rank.group, flat[:at])
            seconds["wire"] += time.perf_counter() - began
            moved += at * 2 * (rank.group.size() - 1)
    return {"seconds": seconds, "moved": moved, "buffer": flat.nbytes if rank.here.tensor == 0 else 0}


def classic_buckets(shape: Any, bucket_bytes: int, stages: int) -> list[tuple[int, list[Any]]]:
    """(pipeline stage, its parameters), whole tensors of at most `bucket_bytes` together; the same on every side."""
    found: list[tuple[int, list[Any]]] = []
    room = 0
    for param in params_of(shape):
        if param.copy:
            continue
        ends = {Stage.FIRST: 0, Stage.LAST: stages - 1}
        stage = param.layer * stages // shape.num_layers if param.stage is Stage.LAYER else ends[param.stage]
        nbytes = 2 * sum(tensor.numel for tensor in param.hf)
        if nbytes > room or found[-1][0] != stage:
            found.append((stage, []))
            room = bucket_bytes
        found[-1][1].append(param)
        room -= nbytes
    return sorted(found, key=lambda bucket: bucket[0])


def _to_whole(param: Any, shape: Any, parts: list[Tensor], flat: Tensor, at: int) -> int:
    """Fused slices of all ranks -> Hugging Face tensors, one after the other in `flat`."""
    views = {}
    for tensor in param.hf:
        views[tensor.name] = flat[at : at + tensor.numel].view(tensor.shape)
        at += tensor.numel
    for rank, part in enumerate(parts):
        for piece in pieces(param, shape, rank, len(parts)):
            place = tuple(slice(*span) for span in piece.hf_box)
            views[piece.hf][place] = part[tuple(slice(*span) for span in piece.local_box)]
    return at


def _broadcast(group: Any, values: Tensor) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([values], options).wait()


def join_wires(worker: Any, addresses: list[tuple[str, int]], first: int, size: int) -> None:
    worker.benchmark_wires = [join_wire(address, first + worker.rank, size) for address in addresses]


@torch.no_grad()
def receive_classic(worker: Any, folder: str, bucket_bytes: int) -> dict[str, float]:
    """Every engine rank receives every tensor whole, and vLLM's `load_weights` keeps what is its own."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, shape = worker.model_runner.model, shape_of(read_hf_config(folder))
    seconds = {"load": 0.0, "commit": 0.0}
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        begun = -1
        for stage, bucket in classic_buckets(shape, bucket_bytes, len(worker.benchmark_wires)):
            wire, _ = worker.benchmark_wires[stage]
            if stage > begun:
                _broadcast(wire, torch.empty(1, dtype=torch.bfloat16))
                begun = stage
            flat = torch.empty(sum(t.numel for param in bucket for t in param.hf), dtype=torch.bfloat16)
            _broadcast(wire, flat)
            began, at, named = time.perf_counter(), 0, []
            for tensor in (tensor for param in bucket for tensor in param.hf):
                named.append((tensor.name, flat[at : at + tensor.numel].view(tensor.shape)))
                at += tensor.numel
            model.load_weights(iter(named))
            seconds["load"] += time.perf_counter() - began
        began = time.perf_counter()
        finalize_layerwise_reload(model, worker.model_config)
        if shape.tied_embeddings:  # vLLM packs the head only when it is loaded by its own name
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        seconds["commit"] += time.perf_counter() - began
    return seconds
