"""Train, offload, onload, train, save, train; then load in a new policy and train: the same losses and norms.

Also: what a second process sees of the device's memory while the policy is offloaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.kit import GIB, Row, Setting, make_model, number, policy, recipe, rows_of, train
from grpo_mcore.families.known import known_config
from grpo_mcore.parallel.policy import TrainReport

FREE = """
import sys
if sys.argv[1] == "gpu":
    import torch
    print(torch.cuda.mem_get_info(0)[0])
else:
    import psutil
    print(psutil.virtual_memory().available)
"""


def config_of(setting: Setting) -> dict[str, Any]:
    """Return the Hugging Face config: Qwen2.5's family with 0.5 B parameters."""
    found = dict(known_config("Qwen/Qwen2.5-0.5B") or {})
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    return found | small | {"vocab_size": 131} if setting.tiny else found


def free_bytes(setting: Setting) -> int:
    """Ask a new process for the free memory of the device, as an engine would."""
    found = subprocess.run([sys.executable, "-c", FREE, setting.device], capture_output=True, text=True, check=True)
    return int(found.stdout)


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this part."""
    length = 64 if setting.tiny else 4096
    model = make_model(
        config_of(setting), setting.folder / "cycle", setting.torch_device, getattr(torch, setting.precision)
    )
    # eps: without it Adam's first steps divide noise by noise, and kernels that add in another order change the losses
    adam = [f"policy.megatron_cfg.optimizer.{key}" for key in ("adam_eps=1.0e-4", "lr=1.0e-3", "min_lr=1.0e-3")]
    config = recipe(model, f"policy.precision={setting.precision}", *adam, rows=2, length=length)
    saved = setting.folder / "saved"
    shutil.rmtree(saved, ignore_errors=True)
    with policy(config, setting) as plain:
        rows = rows_of(plain, 2, length)
        expected = [_numbers(train(plain, rows)) for _ in range(4)]
    del plain
    setting.free()
    with policy(config, setting) as ours:
        found = [_numbers(train(ours, rows))]
        moved = sum(ours.memory()[name] for name in ("gradients", "optimizer"))
        before = free_bytes(setting)
        first = setting.timed(ours.offload)
        after = free_bytes(setting)
        ours.onload()
        again, back = setting.timed(ours.offload), setting.timed(ours.onload)
        found.append(_numbers(train(ours, rows)))
        ours.save(saved)
        found.append(_numbers(train(ours, rows)))
    del ours
    setting.free()
    with policy(config, setting) as resumed:
        resumed.load(saved)
        found += [_numbers(train(resumed, rows)) for _ in range(2)]
    resumed_expected = [expected[0], expected[1], expected[2], expected[2], expected[3]]
    worst = max(
        abs(a - b) / max(abs(b), 1e-6) for one, other in zip(found, resumed_expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip
    yield Row(
        "cycle", "loss, norm: worst difference", f"{worst:.1e}", "below 1e-2 (atomics add in any order)", worst < 1e-2
    )
    yield Row(
        "cycle",
        "loss goes down",
        f"{expected[0][0]:.3f} to {expected[-1][0]:.3f}",
        "",
        expected[-1][0] < expected[0][0],
    )
    given = after - before
    noticed = given > 0.9 * moved if setting.platform.on_gpu and not setting.tiny else None
    yield Row(
        "cycle",
        "memory a second process gets by offload",
        number(given / GIB, "GiB"),
        f"gradients and optimizer: {moved / GIB:.3g} GiB",
        noticed,
    )
    yield Row("cycle", "offload, the first", number(first, "s"), "takes and locks the room on the host")
    yield Row("cycle", "offload, later", number(again, "s"))
    yield Row("cycle", "onload", number(back, "s"))


def _numbers(report: TrainReport) -> tuple[float, float]:
    return float(report.metrics["loss"]), report.grad_norm
