"""Shared by the measurements of this folder: the device, models with random weights, rows of tokens, clocks, and the
table's rows.

Imports nothing that a bare GPU machine lacks: no vLLM, Ray or TransformerEngine.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_mcore.base.processes import free_port
from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows
from grpo_mcore.families import HfTensor, params_of, shape_of
from grpo_mcore.objective import NLLLossFn
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.parallel.policy import Policy, TrainReport
from grpo_mcore.recipe import MasterConfig, load_recipe
from grpo_mcore.tools.plan.workload import DEVICES, Device

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A line of the table. `expected`: what the number is held against, in words. `ok`: None if nothing is demanded."""

    part: str
    what: str
    value: str
    expected: str = ""
    ok: bool | None = None

    def print_json(self, path: Path) -> None:
        """Append the row to a file, so that a run that is cut off leaves what it measured."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class Setting:
    """Where and how large. `tiny`: sizes that a CPU computes in a second; the code is the same. `fused`: with Mamba2's
    kernels (`mamba_ssm`, `causal_conv1d`)."""

    device: Literal["cpu", "gpu"]
    tiny: bool
    folder: Path
    fused: bool = False

    @property
    def platform(self) -> Platform:
        """The platform without TransformerEngine, which a bare machine lacks."""
        return Platform(self.device, grouped_products=self.device == "gpu", mamba_kernels=self.fused)

    @property
    def torch_device(self) -> torch.device:
        return self.platform.torch_device(0)

    @property
    def precision(self) -> str:
        return "bfloat16" if self.platform.on_gpu else "float32"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.platform.on_gpu:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what nobody refers to any more."""
        gc.collect()
        if self.platform.on_gpu:
            torch.cuda.empty_cache()

    def timed(self, function: Callable[[], Any]) -> float:
        """Return the seconds of one call."""
        self.synchronize()
        began = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - began

    def seconds(self, function: Callable[[], Any], repeat: int = 3) -> float:
        """Return the median seconds of `repeat` calls, after one that does not count."""
        self.timed(function)
        return sorted(self.timed(function) for _ in range(repeat))[repeat // 2]

    def data_sheet(self) -> Device:
        """Return the data sheet of the nearest known device, with this one's memory."""
        if not self.platform.on_gpu:
            return DEVICES["cpu"]
        found = torch.cuda.get_device_properties(0)
        name = next((known for known in ("H200", "B200", "H100", "A100") if known in found.name), "H100")
        return Device(**asdict(DEVICES[name]) | {"memory": found.total_memory})


def make_model(config: dict[str, Any], folder: Path, device: torch.device, dtype: torch.dtype) -> Path:
    """Write a Hugging Face folder of this config with random weights of usual sizes. Names and shapes are those that
    the family declares. Existing folders are left."""
    from safetensors.torch import save_file

    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape, generator = shape_of(config), torch.Generator(device).manual_seed(0)
    part: dict[str, Tensor] = {}
    for param in params_of(shape):
        for tensor in () if param.copy else param.hf:
            part[tensor.name] = _random(tensor, generator, device).to(dtype).cpu()
        if sum(t.nbytes for t in part.values()) > 2 * GIB:
            _write(part, folder, save_file)
    _write(part, folder, save_file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _random(tensor: HfTensor, generator: torch.Generator, device: torch.device) -> Tensor:
    name, like = tensor.name, {"device": device, "generator": generator}
    if name.endswith("A_log"):
        return (1 + 15 * torch.rand(tensor.shape, **like)).log()
    if name.endswith("dt_bias"):
        return torch.expm1(0.001 + 0.099 * torch.rand(tensor.shape, **like)).log()
    if len(tensor.shape) == 1:  # norms, D, biases
        return torch.ones(tensor.shape, device=device) if not name.endswith("bias") else torch.zeros(tensor.shape)
    return 0.02 * torch.randn(tensor.shape, **like)


def _write(part: dict[str, Tensor], folder: Path, save_file: Callable[..., None]) -> None:
    if part:
        save_file(part, folder / f"model-{len(list(folder.glob('*.safetensors'))):05}.safetensors")
    part.clear()


def recipe(model: Path, *overrides: str, rows: int, length: int) -> MasterConfig:
    """Return a recipe for one rank: one optimizer step trains `model` on `rows` bins (an even number) of `length`."""
    return load_recipe(
        "grpo_math_1B",
        [
            f"policy.model_name={model}",
            f"policy.max_total_sequence_length={length}",
            f"policy.train_global_batch_size={rows}",
            "policy.train_micro_batch_size=1",
            f"grpo.num_prompts_per_step={rows // 2}",
            "grpo.num_generations_per_prompt=2",
            "loss_fn.reference_policy_kl_penalty=0.0",
            "grpo.use_leave_one_out_baseline=false",
            "cluster.gpus_per_node=1",
            "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
            *overrides,
        ],
    ).config


@contextmanager
def policy(config: MasterConfig, setting: Setting, *, reference: bool = False) -> Iterator[Policy]:
    """Build the one rank of the recipe's policy; leave its process group at the end."""
    address = Address(0, 1, 0, "127.0.0.1", free_port())
    found = Policy(
        config.policy, address, seed=1, timeout_s=300, reference=reference, platform=setting.platform
    )  # fmt: skip
    try:
        yield found
    finally:
        found.shutdown()


def rows_of(policy: Policy, count: int, length: int, sequences: int = 4) -> list[PackedBatch]:
    """Return `count` rows of `length` random tokens, in `sequences` equal sequences each, always the same."""
    generator, each = torch.Generator().manual_seed(3), length // sequences
    columns = {"token_mask": torch.ones(each), "sample_mask": torch.tensor(1.0)}
    return [
        pack_rows(
            [torch.randint(0, policy.shape.vocab_size, (each,), generator=generator) for _ in range(sequences)],
            [dict(columns) for _ in range(sequences)],
            policy.row_multiple,
            names=[f"{row}.{i}" for i in range(sequences)],
        )
        for row in range(count)
    ]


def train(policy: Policy, rows: list[PackedBatch]) -> TrainReport:
    """Run one optimizer step of next-token prediction."""
    tokens = sum(row.tokens.numel() for row in rows)
    return policy.train_step(
        rows, NLLLossFn(), global_valid_seqs=sum(len(r.names) for r in rows), global_valid_toks=tokens
    )


def number(value: float, unit: str) -> str:
    """Write a number with three digits and its unit."""
    return f"{value:.3g} {unit}"
