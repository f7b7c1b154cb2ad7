"""Draw docs/images/demo_reward.svg anew from the newest run of `make demo`: python -m benchmarks.demo_picture

README.md's text of the picture is to be changed with it; this prints the figures.
"""

from pathlib import Path

from grpo_mcore.observe import read_metrics

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demo_reward.svg"
LEFT, RIGHT, TOP, HEIGHT = 60.0, 696.0, 68.4, 348.0
"""Places of the first and the last step, of an accuracy of 1.0, and the height of 1.0."""


def main() -> None:
    metrics = max(Path("results/demo/logs").glob("exp_*/metrics.jsonl"))
    rewards = [(row["step"], row["reward"]) for row in read_metrics(metrics, "train")]
    solved = [(row["step"], row["accuracy"]) for row in read_metrics(metrics, "validation")]
    last = rewards[-1][0]

    def place(step: int, value: float) -> tuple[str, str]:
        return f"{LEFT + (RIGHT - LEFT) * step / last:.1f}", f"{TOP + HEIGHT * (1 - value):.1f}"

    ticks = [
        f'<text x="{place(step, 0)[0]}" y="332" class="muted mid">{step}</text>' for step in range(0, last + 1, 20)
    ]
    dots = [
        '<circle class="driver" cx="{}" cy="{}" r="2.8"/>'.format(*place(*point)) for point in rewards if point[1] > 0.3
    ]
    line = " ".join(",".join(place(*point)) for point in solved)
    rings = ['<circle class="engine" cx="{}" cy="{}" r="5" stroke-width="2"/>'.format(*place(*it)) for it in solved]
    before, after = solved[0][1], solved[-1][1]
    written = PICTURE.read_text(encoding="utf-8")
    head, legend = (
        written.partition('<text x="60.0" y="332"')[0],
        written[written.index('<circle class="driver" cx="66" ') :],
    )
    start, _, rest = head.partition('<desc id="desc">')
    curve = ", ".join(f"{value:.3f} after step {step}" for step, value in solved)
    about = f"Training reward and validation accuracy over the {last} steps of make demo: {curve}."
    low, high = float(place(0, before)[1]) + 26, float(place(0, after)[1]) - 12
    lines = [
        f'{start}<desc id="desc">{about}{rest[rest.index("</desc>") :]}'.rstrip("\n"),
        *ticks,
        '<text x="378.0" y="350" class="muted mid">training step</text>',
        "<!-- reward of each step -->",
        *dots,
        "<!-- validation accuracy -->",
        f'<polyline class="engine" style="fill: none" stroke-width="2.4" points="{line}"/>',
        *rings,
        f'<text x="74.0" y="{low:.1f}" class="t-engine title">{before:.3f}</text>',
        f'<text x="690.0" y="{high:.1f}" class="t-engine title" text-anchor="end">{after:.3f}</text>',
    ]
    PICTURE.write_text("\n".join(lines) + "\n" + legend, encoding="utf-8")
    print(f"{PICTURE}: from {before:.3f} to {after:.3f} in {last} steps")


if __name__ == "__main__":
    main()
