"""A refit by plan beside the classic one, on real parts, on CPU.

    python benchmarks/refit.py [--model FOLDER] [--train tp=2,pp=1] [--engine tp=2]
                               [--mode colocated|disaggregated] [--rounds 3] [--json]

Policy ranks are processes with a Megatron-Core model in bfloat16, the engine is vLLM with its ranks. Ours: each policy
rank copies its blocks into shared memory (disaggregated: sends them to the engine's node over Gloo), each engine rank
takes its slices beside the weights in use, then all are exchanged at once.
Classic (classic_refit.py): whole tensors to every engine rank, then `load_weights`; generation stands still throughout.
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
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from classic_refit import join_wire, join_wires, receive_classic, run_classic, send_classic

from grpo_mcore.base import processes
from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.families import parameter_count, params_of, read_hf_config, shape_of
from grpo_mcore.generation import EngineConfig, engine_environment
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.plan import plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import EngineNodes, refit

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

    def call(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> Any:
        self._sent += 1
        self._pipe.send((self._sent, method, args))
        return SimpleNamespace(
            result=lambda number=self._sent: self._result(number, purpose or method, timeout_s or 600)
        )

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
        processes.end(processes.wait([self._process], timeout_s=20))


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


class PolicyRank:
    """One rank of a Megatron-Core policy without an optimizer."""

    def __init__(self, folder: str, layout: dict[str, int], rank: int, port: int) -> None:
        from grpo_mcore.layout import PolicyLayout
        from grpo_mcore.parallel.mesh import Address, join_mesh
        from grpo_mcore.parallel.model import build_model
        from grpo_mcore.parallel.platform import Platform
        from grpo_mcore.parallel.weights.weights import ShardedWeights
        from grpo_mcore.recipe import MegatronConfig

        self.shape = shape_of(read_hf_config(folder))
        mesh, platform = PolicyLayout(layout["tp"], layout["pp"], 1), Platform.detect()
        self.device = join_mesh(mesh, Address(rank, mesh.world_size, 0, "127.0.0.1", port), 0, 120.0, platform)
        self.here = mesh.coordinates(rank)
        networks = build_model(self.shape, mesh, MegatronConfig(), torch.bfloat16, platform)
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

    def host_network(self, *args: Any) -> Any:
        return self.sender.host_network(*args)

    def close_refit(self) -> None:
        self.sender.close_refit()

    def send_refit(self, *args: Any) -> Any:
        return self.sender.send_refit(*args)

    def join(self, address: tuple[str, int], rank: int, size: int) -> None:
        self.group, self.store = join_wire(address, rank, size)

    def send_classic(self, bucket_bytes: int) -> dict[str, Any]:
        return send_classic(self, bucket_bytes)

    def shutdown(self) -> None:
        self.sender.close_refit()


def worker_memory(worker: Any) -> int:
    import psutil

    return psutil.Process().memory_info().rss


class BenchmarkEngine(EngineWorker):
    def join(self, addresses: list[tuple[str, int]], first: int, size: int) -> None:
        self._llm_engine.collective_rpc(join_wires, args=(addresses, first, size))

    def receive_classic(self, folder: str, bucket_bytes: int, version: int) -> dict[str, float]:
        found = self._llm_engine.collective_rpc(receive_classic, args=(folder, bucket_bytes))
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
    port, addresses = processes.free_port(), [("127.0.0.1", processes.free_port()) for _ in range(train["pp"])]
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
                params_of(shape), shape, PolicyLayout(train["tp"], train["pp"]), EngineLayout(tp), dtype="bfloat16",
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


def sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


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
