"""Checks the packages that a run needs beside torch: every package of kernels imports; TransformerEngine's layers
compute what the local ones do; an engine gives the same samples after it slept. What is not installed is a row that
says so.

Each comparison has a process of its own, because Megatron-Core and vLLM decide at import what they use.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.gpu.cycle import config_of, free_bytes
from benchmarks.gpu.kit import GIB, Row, Setting, make_model, number, recipe, rows_of
from grpo_mcore.base.imports import NOT_INSTALLED, why_not_imported
from grpo_mcore.base.processes import free_port
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.refit.engine_side.fp8 import Format

PACKAGES = ("transformer_engine.pytorch", "causal_conv1d", "mamba_ssm", "fla", "flashinfer", "vllm")
LIMIT_S = 240


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this part."""
    for package in PACKAGES:
        if find_spec(package.partition(".")[0]) is None:
            yield Row("stack", package, NOT_INSTALLED)
        else:
            yield from _rows_of([sys.executable, "-W", "ignore", "-m", __name__, "package", package])
    for part in (*get_args(Format), "attention", "engine"):
        if part != "attention" and find_spec("vllm") is None:
            yield Row("stack", part, NOT_INSTALLED)
            continue
        size = ["--tiny"] if setting.tiny else []
        yield from _rows_of(
            [sys.executable, "-W", "ignore", "-m", __name__, part, setting.device, str(setting.folder), *size]
        )


def _rows_of(command: list[str]) -> list[Row]:
    """Return the rows that a process prints, and one more if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    rows = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"part"')]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        rows.append(Row("stack", f"{command[5]} failed", last[:200], "", False))
    return rows


def package(name: str) -> Row:
    why = why_not_imported(name)
    return Row("stack", name, why or "imports", "", None if why == NOT_INSTALLED else why is None)


def attention(setting: Setting) -> Iterator[Row]:
    """Compare log-probs over packed rows with TransformerEngine's layers with those of the local ones."""
    found = Platform.detect("gpu") if setting.platform.on_gpu else setting.platform
    if setting.platform.on_gpu and not found.transformer_engine:
        yield Row("stack", "TransformerEngine's layers", NOT_INSTALLED)
        return
    length = 64 if setting.tiny else 4096
    dtype = getattr(torch, setting.precision)
    model = make_model(config_of(setting), setting.folder / "stack", setting.torch_device, dtype)
    config = recipe(model, f"policy.precision={setting.precision}", rows=2, length=length).policy
    logprobs, seconds = [], []
    for platform in (found, setting.platform):  # TransformerEngine first: the other hides it
        address = Address(0, 1, 0, "127.0.0.1", free_port())
        policy = Policy(config, address, seed=1, timeout_s=300, reference=False, platform=platform)
        rows = rows_of(policy, 2, length)
        logprobs.append(torch.cat([row.float().flatten().cpu() for row in policy.logprobs(rows) or ()]))
        seconds.append(setting.seconds(lambda policy=policy, rows=rows: policy.logprobs(rows)))
        policy.shutdown()
    worst = (logprobs[0] - logprobs[1]).abs().max().item()
    limit = 0.1 if dtype is torch.bfloat16 else 1e-4
    yield Row("stack", "TransformerEngine's log-probs", f"{worst:.1e}", f"local layers, below {limit:g}", worst < limit)
    yield Row("stack", "TransformerEngine's log-probs, time", number(seconds[0], "s"), f"{seconds[1]:.3g} s local")


def engine(setting: Setting) -> Iterator[Row]:
    """Generate, sleep with the weights, and generate the same again; then sleep without them and take a policy's."""
    if why := why_not_imported("vllm"):
        yield Row("stack", "engine", why, "", None if why == NOT_INSTALLED else False)
        return
    from grpo_mcore.generation import Engine, EngineConfig
    from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Turn
    from grpo_mcore.tools.demo.tiny_models import make_tiny_model

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    folder = make_tiny_model("qwen3", setting.folder / "engine", words=True, **sizes)
    gpu = setting.platform.on_gpu
    config = EngineConfig(str(folder), platform=setting.device, sleep_between_phases=gpu, gpu_memory_utilization=0.3)
    ours = Engine(replace(config, dtype=setting.precision, kv_cache_memory_gb=None if gpu else 0.1))

    def samples() -> list[list[int]]:
        asked = [GenerationRequest(f"{i}", 0, (Turn("user", torch.arange(2, 9 + i)),), seed=i) for i in range(8)]
        return [list(map(int, sample.token_ids())) for sample in sorted(
            ours.generate(asked, Sampling(max_new_tokens=32)), key=lambda sample: sample.uid
        )]  # fmt: skip

    core = ours._llm_engine.engine_core.engine_core
    yield Row("stack", "engine: start", number(ours.start_seconds, "s"), "compilation and graphs included")
    yield Row("stack", "engine: batches under way", f"{core.batch_queue_size}", "2 on GPU, which the tests assume",
              core.batch_queue_size == 2 if gpu else None)  # fmt: skip
    first = samples()
    if gpu:
        before = free_bytes(setting)
        down = setting.timed(ours.release)
        freed = free_bytes(setting) - before
        up = setting.timed(lambda: ours.prepare(0))
        room = f"frees {freed / GIB:.3g} GiB"
        yield Row("stack", "engine: sleep, wake", f"{down:.3g} s, {up:.3g} s", room, freed > 0)
        yield Row("stack", "engine: sleep level before a refit", f"{ours._level_without_weights()}",
                  "2: weights are dropped; 1: the model has other tensors, and they are copied")  # fmt: skip
    yield Row("stack", "engine: samples after it", f"{len(first)}", "the same tokens", samples() == first)
    yield from _refit(setting, ours, folder)
    ours.shutdown()


def quantized(kind: Format, setting: Setting) -> Iterator[Row]:
    """Refit an engine with FP8 layers and experts three times, and compare its bytes, scales and samples with those of
    an engine that starts with the weights. Kernels, graphs and activations in FP8 are the GPU's alone."""
    if why := why_not_imported("vllm"):
        yield Row("stack", kind, why, "", None if why == NOT_INSTALLED else False)
        return
    from grpo_mcore.driver.engines.engine_group import EngineWorker
    from grpo_mcore.refit.refit import refit
    from tests.functional.engine_cases import generate, request
    from tests.functional.fp8_pairs import Pair, differing, of_engine
    from tests.unit.refit.shards import Handle

    gpu = setting.platform.on_gpu
    options = {"platform": "gpu", "gpu_memory_utilization": 0.3, "kv_cache_memory_gb": None} if gpu else {}
    pair = Pair(setting.folder / kind, "qwen3_moe", kind, 1, **options)
    (kernels,) = pair.engine._llm_engine.collective_rpc(_kernels)
    yield Row("stack", f"{kind}: kernels", ", ".join(kernels))
    handle, asked = Handle(pair.engine.name, pair.engine), [request(number) for number in range(8)]
    generate(pair.engine, asked)  # graphs are captured
    for version in (1, 2, 3):  # each compares one layer with the plain reference
        report = refit([pair.sender], [handle], pair.plan, version, verify="full")
    yield Row("stack", f"{kind}: refit", number(report.seconds, "s"), f"{report.checked} slices", report.checked > 0)
    ours, tokens = of_engine(pair.engine), _tokens(generate(pair.engine, asked, temperature=0.0))
    seconds = setting.timed(lambda: generate(pair.engine, asked))
    pair.close()
    fresh = EngineWorker(replace(pair.config, model=str(pair.folders[1]), name="engine-1"), None)
    wrong = differing(ours, of_engine(fresh))
    what = f"{len(wrong)} of {len(ours[0])} parameters{', such as ' + wrong[0] if wrong else ''}"
    yield Row("stack", f"{kind}: differ from a fresh start", what, "0 after three refits", not wrong)
    same = tokens == _tokens(generate(fresh, asked, temperature=0.0))
    yield Row("stack", f"{kind}: likeliest tokens", "equal" if same else "differ", "those of a fresh start", same)
    yield Row("stack", f"{kind}: 8 samples", number(seconds, "s"))
    fresh.shutdown()


def _kernels(worker: Any) -> list[str]:
    """Return the kinds of vLLM's methods, kernels and backends of a rank's quantised layers."""
    methods = [getattr(module, "quant_method", None) for module in worker.model_runner.model.modules()]
    parts = [
        getattr(method, name, None)
        for method in methods if method is not None
        for name in ("fp8_linear", "mxfp8_linear", "kernel", "fp8_backend", "mxfp8_backend")
    ]  # fmt: skip
    return sorted({str(getattr(part, "value", type(part).__name__)) for part in parts if part is not None})


def _tokens(samples: Any) -> dict[str, list[int]]:
    return {uid: sample.token_ids().tolist() for uid, sample in samples.items()}


def _refit(setting: Setting, ours: Any, folder: Path) -> Iterator[Row]:
    """Let the engine sleep without its weights, take those of a policy in this process, and generate with them."""
    from tests.functional.engine_cases import Policy as Weights
    from tests.functional.engine_cases import generate, request, worst_difference

    weights = Weights(folder, size=1)
    weights.change(seed=1)
    weights.reference.to(setting.torch_device)
    ours.release(keep_weights=False)
    plan = weights.plan(ours, dtype=setting.precision, buffer_bytes=1 << 20)
    report = weights.refit(ours, 1, plan, verify="full")
    ours.prepare(1)
    what = f"{report.checked} slices in {len(plan.buckets)} buckets"
    yield Row(
        "stack", "engine: refit after a sleep", number(report.seconds, "s"), f"checksums of {what}", report.checked > 0
    )
    worst = worst_difference(weights.reference.cpu(), generate(ours, [request(i) for i in range(8)]))
    limit = 0.2 if setting.precision == "bfloat16" else 1e-4
    yield Row(
        "stack",
        "engine: log-probs after it",
        f"{worst:.1e}",
        f"transformers in float32, below {limit:g}",
        worst < limit,
    )
    weights.close()


def main(part: str, *words: str) -> None:
    """Print the rows of one process as JSON."""
    if part == "package":
        print(json.dumps(asdict(package(*words))))
        return
    device, folder, *tiny = words
    parts: dict[str, Callable[[Setting], Iterator[Row]]] = {"attention": attention, "engine": engine}
    parts |= {kind: partial(quantized, kind) for kind in get_args(Format)}
    for row in parts[part](Setting(device, bool(tiny), Path(folder))):  # type: ignore[arg-type]
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
