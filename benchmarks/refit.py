"""A refit by plan beside the classic one, on real parts, on CPU.

    python benchmarks/refit.py [--model FOLDER] [--train tp=2,pp=1] [--engine tp=2]
                               [--mode colocated|disaggregated] [--rounds 3] [--json]

Policy ranks are processes with a Megatron-Core model in bfloat16, the engine is vLLM with its ranks. Ours: each policy
rank copies its blocks into shared memory (disaggregated: sends them to the engine's node over Gloo), each engine rank
takes its slices beside the weights in use, then all are exchanged at once.
Classic: tensor-parallel all-gather to whole tensors, broadcast to every engine rank (both Gloo, in buckets, one
pipeline stage after the other), then `load_weights` within vLLM's layerwise reload; generation stands still throughout.
Without --model: the shape of Qwen2.5-0.5B (0.49 B parameters) with random weights. Seconds are medians over the rounds,
which alternate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.algorithms.engine_group import EngineWorker
from grpo_mcore.families import Split, Stage, parameter_count, params_of, pieces, read_hf_config, shape_of
from grpo_mcore.generation import EngineConfig, engine_environment
from grpo_mcore.refit import EngineLayout, EngineNodes, RefitSender, TrainerLayout, plan_refit, refit

GIB = 2**30
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
    "tie_word_embeddings": True, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


class Remote:
    """An object in a process of its own, as the driver of a refit sees it."""

    def __init__(self, name: str, cls: type, *args: Any, env: dict[str, str] | None = None) -> None:
        self.name = name
        self._pipe, there = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, cls, args))
        before = dict(os.environ)
        os.environ.update(env or {})
        self._process.start()
        os.environ.clear()
        os.environ.update(before)
        self._sent, self._answers = 0, {}

    def call(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> Any:
        self._sent += 1
        self._pipe.send((self._sent, method, args))
        return SimpleNamespace(result=lambda number=self._sent: self._result(number, what or method, timeout_s or 600))

    def _result(self, number: int, what: str, timeout_s: float) -> Any:
        while number not in self._answers:
            if not self._pipe.poll(timeout_s):
                raise TimeoutError(f"{what}: no answer from {self.name} within {timeout_s:g} s")
            done, ok, value = self._pipe.recv()
            self._answers[done] = (ok, value)
        ok, value = self._answers.pop(number)
        if not ok:
            raise RuntimeError(f"{self.name}: {what}: {value}")
        return value

    def end(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.terminate()


def _serve(pipe: Connection, cls: type, args: tuple[Any, ...]) -> None:
    target: Any = None
    while True:
        try:
            number, method, arguments = pipe.recv()
        except EOFError:
            break
        try:
            if method == "start":
                target, value = cls(*args), None
            else:
                value = getattr(target, method)(*arguments)
            pipe.send((number, True, value))
        except Exception as error:
            pipe.send((number, False, f"{type(error).__name__}: {error}"))
    if hasattr(target, "shutdown"):
        target.shutdown()


def join_wire(address: tuple[str, int], rank: int, size: int) -> Any:
    """(a Gloo group beside torch's default one, its store: the master's end must live as long)."""
    store = torch.distributed.TCPStore(*address, size, is_master=rank == 0, timeout=timedelta(seconds=120))
    prefix = torch.distributed.PrefixStore("wire", store)
    return torch.distributed.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=300)), store


class PolicyRank:
    """One rank of a Megatron-Core policy without an optimizer."""

    def __init__(self, folder: str, layout: dict[str, int], rank: int, port: int) -> None:
        from grpo_mcore.parallel.mesh import Address, Layout, join_mesh
        from grpo_mcore.parallel.model import build_model
        from grpo_mcore.parallel.weights import ShardedWeights
        from grpo_mcore.recipe import MegatronConfig

        self.shape = shape_of(read_hf_config(folder))
        mesh = Layout(layout["tp"], layout["pp"], 1)
        self.device = join_mesh(mesh, Address(rank, mesh.world_size, 0, "127.0.0.1", port), 0, 120.0)
        self.here = mesh.coordinates(rank)
        networks = build_model(self.shape, mesh, MegatronConfig(), torch.bfloat16)
        (self.network,) = (network.to(torch.bfloat16) for network in networks)
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02, generator=generator)
        self.weights = ShardedWeights([self.network], self.shape, mesh, self.here)
        self.sender = RefitSender(self.weights, rank)
        self.tp, self.pp, self.group = layout["tp"], layout["pp"], None

    def open_refit(self, *args: Any) -> Any:
        return self.sender.open_refit(*args)

    def host_link(self, *args: Any) -> Any:
        return self.sender.host_link(*args)

    def close_refit(self) -> None:
        self.sender.close_refit()

    def fill_bucket(self, *args: Any) -> Any:
        return self.sender.fill_bucket(*args)

    def join(self, address: tuple[str, int], rank: int, size: int) -> None:
        self.group, self.store = join_wire(address, rank, size)

    @torch.no_grad()
    def send_classic(self, bucket_bytes: int) -> dict[str, Any]:
        """Gathers whole tensors in the tensor-parallel group; its first rank broadcasts them, bucket by bucket. Every
        pipeline stage does so with its own."""
        from megatron.core import parallel_state

        tensor_group = parallel_state.get_tensor_model_parallel_group()
        local = {(param.megatron, param.layer): tensor.detach() for param, tensor in self.weights.local}
        seconds = {"gather": 0.0, "wire": 0.0}
        moved = 0
        flat = torch.empty(bucket_bytes // 2, dtype=torch.bfloat16)
        if self.group is not None:
            _broadcast(self.group, flat[:1])  # the engine is done with the stages before: not this one's time
        for stage, bucket in classic_buckets(self.shape, bucket_bytes, self.pp):
            if stage != self.here.pipeline:
                continue
            began, at = time.perf_counter(), 0
            for param in bucket:
                mine = local[param.megatron, param.layer]
                parts = [mine]
                if self.tp > 1 and param.split is not Split.REPLICATED:
                    parts = [torch.empty_like(mine) for _ in range(self.tp)]
                    torch.distributed.all_gather(parts, mine, group=tensor_group)
                    moved += mine.nbytes * (self.tp - 1) * self.tp if self.here.tensor == 0 else 0
                if self.here.tensor == 0:
                    at = _to_whole(param, self.shape, parts, flat, at)
            seconds["gather"] += time.perf_counter() - began
            if self.group is not None:
                began = time.perf_counter()
                _broadcast(self.group, flat[:at])
                seconds["wire"] += time.perf_counter() - began
                moved += at * 2 * (self.group.size() - 1)
        return {"seconds": seconds, "moved": moved, "buffer": flat.nbytes if self.here.tensor == 0 else 0}

    def shutdown(self) -> None:
        self.sender.close_refit()


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


def worker_join(worker: Any, addresses: list[tuple[str, int]], first: int, size: int) -> None:
    worker.benchmark_wires = [join_wire(address, first + worker.rank, size) for address in addresses]


@torch.no_grad()
def worker_receive_classic(worker: Any, folder: str, bucket_bytes: int) -> dict[str, float]:
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


def worker_memory(worker: Any) -> int:
    import psutil

    return psutil.Process().memory_info().rss


class BenchmarkEngine(EngineWorker):
    def join(self, addresses: list[tuple[str, int]], first: int, size: int) -> None:
        self._llm_engine.collective_rpc(worker_join, args=(addresses, first, size))

    def receive_classic(self, folder: str, bucket_bytes: int, version: int) -> dict[str, float]:
        found = self._llm_engine.collective_rpc(worker_receive_classic, args=(folder, bucket_bytes))
        self._llm_engine.reset_prefix_cache()
        self.weight_version = version
        return {name: max(seconds[name] for seconds in found) for name in found[0]}

    def memory(self) -> int:
        """Resident bytes of all ranks."""
        return sum(self._llm_engine.collective_rpc(worker_memory))


def memcpy_bandwidth() -> float:
    """Bytes/s of one thread copying 256 MiB."""
    source, target = torch.ones(2**28, dtype=torch.uint8), torch.ones(2**28, dtype=torch.uint8)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return 2**28 / best


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    train, tp = {"tp": 1, "pp": 1} | sizes(args.train), sizes(args.engine).get("tp", 1)
    shape, world = shape_of(read_hf_config(folder)), train["tp"] * train["pp"]
    needed = parameter_count(shape) * 2
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    port, addresses = free_port(), [("127.0.0.1", free_port()) for _ in range(train["pp"])]
    policy = [Remote(f"policy-{rank}", PolicyRank, folder, train, rank, port, env=environment) for rank in range(world)]
    config = EngineConfig(
        folder, tensor_parallel_size=tp, load_format="dummy", max_model_len=128, kv_cache_memory_gb=0.1,
        vllm_kwargs={"skip_tokenizer_init": True},
    )  # fmt: skip
    engine = Remote(
        "engine-0", BenchmarkEngine, config, None, env=engine_environment(config) | {"OMP_NUM_THREADS": "1"}
    )
    everyone = [*policy, engine]
    try:
        for call in [worker.call("start") for worker in everyone]:
            call.result()
        if not args.only_ours:  # a group for each stage: its first rank, and the engine's ranks
            firsts = policy[:: train["tp"]]
            joining = [one.call("join", address, 0, 1 + tp) for one, address in zip(firsts, addresses, strict=True)]
            for call in [*joining, engine.call("join", addresses, 1, 1 + tp)]:
                call.result()
        seconds: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            plan = plan_refit(
                params_of(shape), shape, TrainerLayout(train["tp"], train["pp"]), EngineLayout(tp), dtype="bfloat16",
                buffer_bytes=int(args.buffer_gb * GIB),
            )  # fmt: skip
            seconds.append(time.perf_counter() - began)
        nodes = EngineNodes([[0]], [engine]) if args.mode == "disaggregated" else None
        ours, classic = [], []
        version, memory = 1, []
        for _ in range(args.rounds + 1):
            report = refit(policy, [engine], plan, version, verify=args.verify, nodes=nodes)
            ours.append(report)
            if not args.only_ours:
                classic.append(run_classic(policy, engine, folder, plan.half_bytes, version + 1))
            version += 2
            memory.append(engine.call("memory").result())
        ours, classic = ours[1:], classic[1:]  # the first touches all memory for the first time
    finally:
        for worker in everyone:
            worker.end()
    result: dict[str, Any] = {
        "model": {"parameters": parameter_count(shape), "bytes": needed, "dtype": "bfloat16"},
        "train": train,
        "engine": {"tp": tp},
        "mode": args.mode,
        "rounds": args.rounds,
        "verify": args.verify,
        "memcpy_bytes_per_second": memcpy_bandwidth(),
        "engine_resident_bytes": {"after_first_round": memory[0], "after_last_round": memory[-1]},
        "ours": {
            "bytes_moved": plan.block_bytes,
            "bytes_needed": needed,
            "seconds": median(report.seconds for report in ours),
            "pause_seconds": median(report.pause_seconds for report in ours),
            "peak_buffer_bytes": plan.buffer_bytes,
            "plan_seconds": min(seconds),
            "stages": {
                "plan": min(seconds),
                "gather": 0.0,
                "wire": median(report.stage_seconds["fill"] for report in ours),
                "load": median(report.stage_seconds["load"] for report in ours),
                "commit": median(report.stage_seconds["commit"] for report in ours),
            },
            "buckets": len(plan.buckets),
            "in_place": bool(ours[-1].in_place),
        },
    }
    if classic:
        middle = sorted(classic, key=lambda one: one["seconds"])[len(classic) // 2]
        result["classic"] = {
            "bytes_moved": middle["moved"],
            "bytes_needed": needed,
            "seconds": median(one["seconds"] for one in classic),
            "pause_seconds": median(one["seconds"] for one in classic),
            "peak_buffer_bytes": middle["buffer"],
            "plan_seconds": 0.0,
            "stages": {"plan": 0.0} | middle["stages"],
        }
    return result


def run_classic(policy: list[Remote], engine: Remote, folder: str, bucket_bytes: int, version: int) -> dict[str, Any]:
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


def sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def show(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']['parameters'] / 1e9:.2f} B parameters, {result['model']['bytes'] / 1e9:.2f} GB, "
        f"train {result['train']}, engine {result['engine']}, memcpy {result['memcpy_bytes_per_second'] / 1e9:.1f} GB/s"
    ]
    for name in ("ours", "classic"):
        if name in result:
            one = result[name]
            stages = ", ".join(f"{stage} {spent:.3f}" for stage, spent in one["stages"].items())
            share = one["bytes_moved"] / one["bytes_needed"]
            lines.append(
                f"{name:7} {one['seconds']:.3f} s, pause {one['pause_seconds']:.3f} s, moved "
                f"{one['bytes_moved'] / 1e9:.2f} GB ({share:.3f} of what is needed), "
                f"buffer {one['peak_buffer_bytes'] / 1e9:.2f} GB; {stages}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; only its config.json is read")
    parser.add_argument("--train", default="tp=2,pp=1", help="layout of the policy")
    parser.add_argument("--engine", default="tp=2", help="layout of the engine")
    parser.add_argument("--mode", choices=["colocated", "disaggregated"], default="colocated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--buffer-gb", type=float, default=0.5)
    parser.add_argument("--verify", choices=["off", "sample", "full"], default="sample")
    parser.add_argument("--ours", dest="only_ours", action="store_true", help="leave the classic path out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        if args.model is None:
            (Path(tmp) / "config.json").write_text(json.dumps(QWEN))
        result = measure(args, args.model or tmp)
    print(json.dumps(result, indent=1) if args.json else show(result))


if __name__ == "__main__":
    sys.exit(main())
