"""Compares every tiny family with transformers in float32: log-probs and the norm of the gradient with
TransformerEngine's layers on this device, and with those of its stand-in (tests/stand_ins) on the CPU.

Each of the two has a process of its own, because Megatron-Core decides at import what it uses.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kit import Row, Setting
from grpo_mcore.base.imports import NOT_INSTALLED
from grpo_mcore.base.processes import free_port
from grpo_mcore.parallel.mesh import Address, leave_mesh
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.tools.demo.tiny_models import FAMILIES, make_tiny_model
from grpo_mcore.tools.parity.parity import GRADIENT_LIMIT, LOGPROB_LIMIT, Reference, reference_of
from grpo_mcore.tools.parity.rank import LayoutCase, logprobs_and_gradients

WIDER: dict[str, dict[str, int]] = dict.fromkeys(("deepseek_v3", "moonlight"), {"v_head_dim": 16})
"""Sizes that differ from the tiny models': cuDNN takes heads of a multiple of 8."""
STAND_INS = Path(__file__).parents[2] / "tests/stand_ins"
REAL, STAND_IN = "TransformerEngine", "stand-in"
ROUNDING = 1.5, 1e-3, 0.05
"""Bounds in bfloat16: TransformerEngine's mean error may be 1.5 times the stand-in's and 1e-3, and the relative error
of its gradient norm 0.05 more than the stand-in's."""


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this part."""
    folder, kinds = setting.folder / "families", [STAND_IN]
    if setting.platform.on_gpu and find_spec("transformer_engine") is not None:
        kinds.append(REAL)
    else:
        yield Row("families", REAL, NOT_INSTALLED)
    for family in FAMILIES:
        make_tiny_model(family, folder / family, **WIDER.get(family, {}))
    results = {kind: _computed(kind, setting.precision, folder) for kind in kinds}
    for family in FAMILIES:
        yield _row(family, setting.precision, reference_of(folder / family), results)


def _computed(kind: str, precision: str, folder: Path) -> dict[str, Any]:
    """Return `compute`'s results of a process that finds the stand-in, or does not."""
    root = str(STAND_INS.parents[1])
    paths = [root, *([str(STAND_INS)] if kind == STAND_IN else []), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "ignore", "-m", __name__, kind, precision, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    results: dict[str, Any] = torch.load(folder / f"{kind}.pt")
    return results


def compute(kind: str, precision: str, folder: Path) -> None:
    """Write the log-probs and the gradient's norm of each family in `folder`, or the reason why there are none, to
    folder/KIND.pt."""
    if kind == STAND_IN:
        from tests.distributed.kernel_package_cases import platform

        here = platform()
        assert here.transformer_engine
    else:
        here = Platform.detect("gpu")
    results: dict[str, Any] = {}
    for family in FAMILIES:
        address = Address(0, 1, 0, "127.0.0.1", free_port())
        try:
            found = logprobs_and_gradients(
                address,
                str(folder / family),
                LayoutCase("TP1"),
                overrides={"precision": precision},
                platform=here,
            )
            results[family] = {name: found[name] for name in ("logprobs", "grad_norm")}
        except Exception as error:
            results[family] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        leave_mesh(whole_process=True)
    torch.save(results, folder / f"{kind}.pt")


def _row(family: str, precision: str, reference: Reference, results: dict[str, dict[str, Any]]) -> Row:
    expected = torch.cat([part[1:] for part in reference.logprobs.values()])
    norm = torch.stack([gradient.norm() for gradient in reference.gradients.values()]).norm().item()
    errors: dict[str, tuple[float, float, float]] = {}
    for kind, by_family in results.items():
        if isinstance(reason := by_family[family], str):
            return Row("families", family, f"{kind}: {reason}", "", False)
        found = torch.cat([reason["logprobs"][i][1:].float().cpu() for i in reference.logprobs])
        away = (found - expected).abs()
        errors[kind] = away.mean().item(), away.max().item(), abs(reason["grad_norm"] / norm - 1)
    value = "; ".join(f"{kind} {mean:.1e}, {most:.1e}, {off:.1e}" for kind, (mean, most, off) in errors.items())
    _, most, off = errors[STAND_IN]
    ok, limits = most < LOGPROB_LIMIT and off < GRADIENT_LIMIT, f"below {LOGPROB_LIMIT:g}, {GRADIENT_LIMIT:g}"
    if precision == "bfloat16":
        times, more, part = ROUNDING
        mean, _, off = errors.get(REAL, errors[STAND_IN])
        ok = mean < times * errors[STAND_IN][0] + more and off < errors[STAND_IN][2] + part
        limits = f"mean below {times:g} times the stand-in's + {more:g}, norm within {part:g}"
    return Row("families", family, f"log-probs mean, most; gradient norm: {value}", f"transformers, {limits}", ok)


if __name__ == "__main__":
    compute(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
