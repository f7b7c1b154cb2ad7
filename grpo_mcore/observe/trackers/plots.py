"""Curves for people."""

from collections.abc import Mapping, Sequence
from pathlib import Path

SMOOTH = 0.8
"""Weight of the past in the smoothed line."""


def reward_curve_png(
    path: Path,
    rewards: Mapping[int, float],
    validations: Mapping[str, Mapping[int, float]] | None = None,
    title: str = "Reward by step",
) -> None:
    """Draw the mean training reward by step, with a smoothed line, and the metrics of the validations by step.

    `validations`: accuracy, reward and its parts, by name; a reward that equals the accuracy is not drawn twice. Steps
    without a value are left out of the mappings. Needs no display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = sorted(rewards)
    values = [rewards[step] for step in steps]
    if steps:
        axes.plot(steps, values, ".", color="tab:blue", alpha=0.35, label="training reward, mean of a step")
        axes.plot(steps, smoothed(values), "-", color="tab:blue", label="training reward, smoothed")
    curves = {name: sorted(course.items()) for name, course in (validations or {}).items() if course}
    if curves.get("reward") == curves.get("accuracy"):
        curves.pop("reward", None)
    for number, (name, points) in enumerate(curves.items(), start=1):
        color = f"C{number % 10}"
        axes.plot(*zip(*points, strict=True), "o-", color=color, label=f"validation {name}")
        for step, value in (points[0], points[-1]) if len(points) > 1 else points:
            axes.annotate(
                f"{value:.3f}", (step, value), textcoords="offset points", xytext=(0, -16), ha="center", color=color
            )
    drawn = [*values, *(value for points in curves.values() for _, value in points)]
    if drawn and 0 <= min(drawn) and max(drawn) <= 1:
        axes.set_ylim(-0.03, 1.08)
    axes.set(title=title, xlabel="step", ylabel="reward, accuracy" if "accuracy" in curves else "reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total = SMOOTH * total + (1 - SMOOTH) * value
        weight = SMOOTH * weight + (1 - SMOOTH)
        result.append(total / weight)
    return result
