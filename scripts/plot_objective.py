"""Draws the pictures of docs/objective.md from the loss itself: `python scripts/plot_objective.py [folder]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective import ClippedPGLossFn, shape_rewards
from grpo_mcore.objective.kl import kl_estimate, kl_penalty

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
IS = {"use_importance_sampling_correction": True}
TOKENS = 4  # of each sequence in the pictures; all have the same ratio
PLAIN = "black"


@dataclass(frozen=True)
class Curve:
    """y over x, float64 [n] each. `style`: arguments of matplotlib, such as color and linestyle."""

    x: Tensor
    y: Tensor
    label: str
    style: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    title: str
    xlabel: str
    ylabel: str
    curves: tuple[Curve, ...]


def push(ratio: Tensor, advantage: float, **config: Any) -> Tensor:
    """Return how hard the loss pushes the log-prob up: minus its gradient, summed over a sequence. All tokens of a
    sequence have the same ratio to the policy before the step and a total weight of 1. ratio [n] -> [n]."""
    curr = _rows(ratio.log()).requires_grad_()
    _loss(curr, _rows(torch.zeros_like(ratio)), None, advantage, config).backward()
    assert curr.grad is not None
    return -curr.grad.sum(1)


def weight(raw: Tensor, age: int | None = None, **config: Any) -> Tensor:
    """Return the importance weight in the loss if pi_prev / pi_generation is `raw` at every token, [n] -> [n]."""
    curr = _rows(torch.zeros_like(raw)).requires_grad_()
    options = {"disable_ppo_ratio": True} | IS | config  # then the gradient is the weight
    _loss(curr, torch.zeros_like(curr).detach(), _rows(-raw.log()), 1.0, options, age).backward()
    assert curr.grad is not None
    return -curr.grad.sum(1)


def _rows(values: Tensor) -> Tensor:
    """Return sequences with the same value at TOKENS tokens after a first, untrained token: [n, 1 + TOKENS]."""
    return torch.cat([torch.zeros(len(values), 1), values[:, None].expand(-1, TOKENS)], 1)


def _loss(
    curr: Tensor,
    prev: Tensor,
    generation: Tensor | None,
    advantage: float,
    config: dict[str, Any],
    age: int | None = None,
) -> Tensor:
    batch: dict[str, Any] = {
        "prev_logprobs": prev,
        "advantages": torch.full_like(curr, advantage).detach(),
        "token_mask": torch.ones_like(curr).detach(),
        "sample_mask": torch.ones(len(curr)),
    }
    if generation is not None:
        batch["generation_logprobs"] = generation
    if age is not None:
        batch["ages"] = torch.full(curr.shape, age)
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0} | config)
    return loss_fn(curr, batch, global_valid_seqs=1, global_valid_toks=TOKENS)[0]


def clip_panels() -> list[Panel]:
    wide = torch.linspace(0.02, 4.0, 400)
    narrow = 1 + torch.linspace(-1e-3, 1e-3, 401)
    clip = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2}

    def panel(title: str, ratio: Tensor = wide, **config: Any) -> Panel:
        by_token = "sequence_level_importance_ratios" not in config
        x = ratio if by_token else (ratio - 1) * 1e4
        return Panel(
            title,
            "ratio of a token" if by_token else "(ratio of a sequence - 1) x 10,000",
            "push on the log-prob",
            tuple(
                Curve(x, push(ratio, sign, **config), label, {"color": color})
                for sign, label, color in ((1.0, "A = +1", "tab:blue"), (-1.0, "A = -1", "tab:orange"))
            ),
        )

    return [
        panel("clip 0.2 / 0.2 (PPO, GRPO)", **clip),
        panel("clip-higher 0.2 / 0.28 (DAPO)", ratio_clip_min=0.2, ratio_clip_max=0.28),
        panel("dual clip: ratio_clip_c = 3", ratio_clip_c=3.0, **clip),
        panel("CISPO: bounds 0 and 3", use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=2.0),
        panel("GSPO 3e-4 / 4e-4", narrow, ratio_clip_min=3e-4, ratio_clip_max=4e-4, **GSPO),
        panel("disable_ppo_ratio, force_on_policy_ratio", disable_ppo_ratio=True),
    ]


def weight_panels() -> list[Panel]:
    raw = torch.linspace(0.02, 7.0, 700)
    near = torch.linspace(0.996, 1.005, 451)

    def bounded(kind: str, high: float | None, low: float | None = None, **more: Any) -> dict[str, Any]:
        names = ("truncated_importance_sampling_type", "truncated_importance_sampling_ratio")
        return dict(zip((*names, names[1] + "_min"), (kind, high, low), strict=True)) | more

    def panel(title: str, x: Tensor, curves: list[tuple[str, Tensor]], what: str = "pi_prev / pi_engine") -> Panel:
        colors = ("tab:blue", "tab:orange", "tab:green")
        return Panel(
            title,
            what,
            "weight in the loss",
            (
                *(Curve(x, y, label, {"color": color}) for (label, y), color in zip(curves, colors, strict=False)),
                Curve(x, weight(x), "no truncation", {"color": PLAIN, "linestyle": ":", "linewidth": 1}),
            ),
        )

    by_age = {"truncated_importance_sampling_ratio_by_age": [4.0, 2.0, 1.2]}
    return [
        panel("tis: at most 2", raw, [("tis", weight(raw, **bounded("tis", 2.0)))]),
        panel("icepop: 0.5 to 5, else 0", raw, [("icepop", weight(raw, **bounded("icepop", 5.0, 0.5)))]),
        panel(
            "seq-mask-tis: 0.999 to 1.002",
            near,
            [("tokens of the sequence", weight(near, **bounded("seq-mask-tis", 1.002, 0.999)))],
            "geometric mean over the sequence",
        ),
        panel(
            "tis by age: [4, 2, 1.2]",
            raw,
            [(f"age {age}", weight(raw, age, **bounded("tis", None), **by_age)) for age in range(3)],
        ),
    ]


def kl_panels() -> list[Panel]:
    x = torch.linspace(-3.0, 3.0, 301)
    kinds = (("k1", "tab:blue"), ("k2", "tab:orange"), ("k3", "tab:green"))

    def gradient(kind: Any, corrected: bool) -> Tensor:
        logprobs, reference = x.clone().requires_grad_(), torch.zeros_like(x)
        value = kl_penalty(logprobs, reference, kind=kind) if corrected else kl_estimate(logprobs, reference, kind)
        value.sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad

    def panel(title: str, ylabel: str, y: Any) -> Panel:
        curves = tuple(Curve(x, y(kind), kind, {"color": color}) for kind, color in kinds)
        return Panel(title, "log(pi / pi_ref)", ylabel, curves)

    return [
        panel("value", "KL of a token", lambda kind: kl_estimate(x, torch.zeros_like(x), kind)),
        panel("gradient as implemented", "d KL / d log-prob", lambda kind: gradient(kind, True)),
        panel("gradient of the estimator alone", "d KL / d log-prob", lambda kind: gradient(kind, False)),
    ]


def overlong_panels() -> list[Panel]:
    length = torch.arange(12000, 24001, 50)

    def shaped(reward: float, **options: Any) -> Tensor:
        return shape_rewards(
            torch.full((len(length),), reward, dtype=torch.float64),
            generated_lengths=length,
            truncated=length >= 20480,
            max_response_length=20480,
            overlong_buffer_length=4096,
            **options,
        )

    curves = [
        ("right, overlong_buffer_penalty 1", shaped(1.0), {"color": "tab:blue"}),
        ("wrong, overlong_buffer_penalty 1", shaped(0.0), {"color": "tab:orange"}),
        (
            "right, stop_properly_penalty_coef 0.5",
            shaped(1.0, stop_properly_penalty_coef=0.5),
            {"color": "tab:green", "linestyle": "--"},
        ),
    ]
    x = length.to(torch.float64)
    panel = Panel(
        "max_response_length 20480, overlong_buffer_length 4096",
        "generated tokens",
        "shaped reward",
        tuple(Curve(x, y, label, style) for label, y, style in curves),
    )
    return [panel]


def figures() -> dict[str, list[Panel]]:
    """Return the panels of each picture by the name of its file."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return {
            "policy-gradient": clip_panels(),
            "importance-weights": weight_panels(),
            "kl": kl_panels(),
            "overlong": overlong_panels(),
        }
    finally:
        torch.set_default_dtype(default)


def draw(panels: list[Panel], path: Path) -> None:
    """Write a small PNG. Needs no display."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    rows = -(-len(panels) // columns)
    figure = Figure(
        figsize=(3.5 * columns + 1.5 * (columns == 1), 2.5 * rows + 0.6 * (columns == 1)), layout="constrained"
    )
    canvas = FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        for curve in panel.curves:
            axes.plot(curve.x, curve.y, label=curve.label, **curve.style)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.xlabel, fontsize=8)
        axes.set_ylabel(panel.ylabel, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.ticklabel_format(useOffset=False)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    canvas.draw()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128).save(path, optimize=True)


def main(folder: Path = IMAGES) -> None:
    for name, panels in figures().items():
        draw(panels, folder / f"{name}.png")
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
