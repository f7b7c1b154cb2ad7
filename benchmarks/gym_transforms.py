"""Measures speed and memory of the Gym transformations and of the documented script on the same file.

    python benchmarks/gym_transforms.py --script grpo.md [--rows 1000000] [--rounds 3] [--folder DIR] [--json FILE]

Makes a rollouts file of about 2 kB a row (four rollouts a prompt, `output` at the top, as the documented script reads
it) and runs in turn the script, gym-to-grpo, gym-to-sft and gym-to-dpo, each in its own process. Reports the medians of
wall and CPU seconds, the peak of resident memory, and the speed-up over the script. `--script` is a .py file, or a
document with the script in a block of Python code; without it only our commands are measured. The script holds the
whole file in memory, about 6 kB per row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

COMMANDS = {
    "gym-to-grpo": ["gym-to-grpo"],
    "gym-to-sft": ["gym-to-sft"],
    "gym-to-sft, every row": ["gym-to-sft", "--reward_threshold", "-1"],
    "gym-to-dpo": ["gym-to-dpo"],
    "gym-to-dpo, stratified": ["gym-to-dpo", "--strategy", "stratified"],
}
WORDS = (
    "the answer is therefore we compute sum of x and y then multiply by two to obtain result which equals number so "
    "let us check this again step one more time for café and naïve cases"
).split()
GROUP = 4
ROW_WORDS = 240


def make_rollouts(path: Path, rows: int) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=ROW_WORDS)) for _ in range(997)]
    with path.open("w") as file:
        for number in range(rows):
            task, text = number // GROUP, rng.choice(texts)
            cut = len(text) // 3
            row = {
                "responses_create_params": {
                    "input": [
                        {"role": "system", "content": "Reason step by step. Put the answer in \\boxed{}."},
                        {"role": "user", "content": f"Problem {task}: {texts[task % 997][:300]}"},
                    ],
                    "metadata": {"ground_truth": str(task % 97)},
                    "tools": [],
                    "parallel_tool_calls": True,
                    "temperature": 1.0,
                },
                "output": [
                    {
                        "id": f"rs_{number}",
                        "type": "reasoning",
                        "summary": [{"type": "summary_text", "text": text[:cut]}],
                    },
                    {
                        "id": f"msg_{number}",
                        "type": "message",
                        "role": "assistant",
                        "status": "completed",
                        "content": [{"type": "output_text", "text": f"{text[cut:]} {number}", "annotations": []}],
                    },
                ],
                "reward": rng.choice([0.0, 0.0, 0.5, 1.0]),
                "_ng_task_index": task,
                "_ng_rollout_index": number % GROUP,
            }
            file.write(json.dumps(row) + "\n")


def script_in(path: Path, folder: Path) -> Path:
    """Return the script as a file, taken from a document's code block that reads --reward_threshold if need be."""
    if path.suffix == ".py":
        return path
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    found = [block for block in blocks if "--reward_threshold" in block and "__main__" in block]
    if not found:
        raise SystemExit(f"{path}: no script with --reward_threshold in a block of Python code")
    script = folder / "documented.py"
    script.write_text(found[0])
    return script


def measure(command: list[str]) -> dict[str, float]:
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files lie, which are removed afterwards")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        rollouts, output = folder / "rollouts.jsonl", folder / "out.jsonl"
        make_rollouts(rollouts, args.rows)
        print(f"{args.rows:,} rows, {rollouts.stat().st_size / 1e9:.2f} GB")
        ours = [sys.executable, "-m", "grpo_mcore.cli.main", "data"]
        commands = {label: [*ours, *words] for label, words in COMMANDS.items()}
        if args.script:
            commands = {"documented script": [sys.executable, str(script_in(args.script, folder))], **commands}
        runs: dict[str, list[dict[str, float]]] = {label: [] for label in commands}
        for _ in range(args.rounds):
            for label, command in commands.items():
                runs[label].append(measure([*command, "--input", str(rollouts), "--output", str(output)]))
                output.unlink()
    results = {label: {key: median(run[key] for run in of) for key in of[0]} for label, of in runs.items()}
    print(f"{'':24} {'wall s':>8} {'CPU s':>8} {'peak MB':>8} {'rows/s':>10} {'times faster (wall, CPU)':>26}")
    for label, result in results.items():
        faster = ""
        if args.script:
            script = results["documented script"]
            faster = f"{script['wall_s'] / result['wall_s']:.1f}, {script['cpu_s'] / result['cpu_s']:.1f}"
        print(
            f"{label:24} {result['wall_s']:8.2f} {result['cpu_s']:8.2f} {result['peak_mb']:8.0f} "
            f"{args.rows / result['wall_s']:10,.0f} {faster:>26}"
        )
    if args.json:
        args.json.write_text(json.dumps({"rows": args.rows, "runs": runs, "medians": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
