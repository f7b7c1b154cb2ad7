"""Writes the files of a run, and reads back its page and its trace."""

import base64
import gzip
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from grpo_mcore.observe.samples import SampleFiles
from grpo_mcore.tools.report.run_files import read_run
from grpo_mcore.tools.report.watch import screen
from tests.pictures import noise


def unpack(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def data_of(text: str) -> dict[str, Any]:
    script = re.search(r'id="data">([^<]*)<', text)
    assert script
    return unpack(script[1])


IMAGE = {"offset": 1, "length": 1, "digest": "a picture", "grid": [1, 2, 2]}
"""The image in the first group's prompt."""
DEVICES = {"policy-0": ["policy-0", "engine-0"]}
STEP_S = 10.0


def step_events(step: int, start: float) -> Iterator[dict[str, Any]]:
    """1 s refit, 5 s generation of which the engine works 4, 0.5 s between, 3 s training, 0.5 s between."""
    for process, what, first, seconds in (
        ("driver", "refit", 0.0, 1.0),
        ("engine-0", "generate", 1.0, 4.0),
        ("driver", "generate", 1.0, 5.0),
        ("environment-math", "reward", 5.0, 0.9),
        ("driver", "train", 6.5, 3.0),
    ):
        yield {"process": process, "what": what, "start": start + first, "seconds": seconds, "step": step}


def write_run(folder: Path, steps: int = 3, groups: int = 2, length: int = 8) -> Path:
    """Write the files of a run of `steps` steps, with 2 samples a group, that was killed in the step after them."""
    run = folder / "logs" / "exp_001"
    run.mkdir(parents=True)
    recipe = {"policy": {"model_name": "tiny"}, "grpo": {"max_num_steps": 9, "num_prompts_per_step": groups}}
    (run / "hyperparams.json").write_text(json.dumps(recipe))
    writer = SampleFiles(run / "samples", lambda token: f" t{token}", 1e9)
    events = [{"what": "begin", "time": 100.0, "devices": DEVICES, "colocated": True}]
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            events += step_events(step, 100.0 + STEP_S * (step - 1))
            line = {"step": step, "prefix": "train", "unix_time": 100.0 + STEP_S * step, "reward": step / steps}
            metrics.write(json.dumps(line | {"token_mult_prob_error": 1.5 if step == 2 else 1.0}) + "\n")
            writer.add("train", step, lambda step=step: rows(step, groups, length))  # type: ignore[misc]
        metrics.write('{"step": 4, "pre')
    writer.close()
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"what": "ref')
    return run


def rows(step: int, groups: int, length: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(step)
    found = []
    for group in range(groups):
        for generation in range(2):
            logprobs = -draw.random(length).astype(np.float32)
            turns = [
                {"role": "user", "text": "?", "tokens": 2, "generated": False, "images": [] if group else [IMAGE]},
                {"role": "assistant", "text": "</script>", "tokens": length - 2, "generated": True},
            ]
            sample = {"uid": f"p{group}", "generation": generation, "reward": float(generation), "turns": turns}
            tokens = [7, group, *draw.integers(0, 5000, length - 2)]  # each step has the same prompts
            reward = group / 7 + generation  # the other's reward is the baseline, the standard deviation 1 / sqrt(2)
            baseline, scale = group / 7 + 1 - generation, 0.5**0.5 + 1e-6
            sample |= {"token_ids": np.array(tokens), "engine_logprobs": logprobs}
            sample |= {"shaped_reward": reward, "baseline": baseline, "scale": scale, "group_size": 2}
            sample |= {"advantage": (reward - baseline) / scale, "columns": '{"level": "hard"}'}
            sample |= {"policy_logprobs": logprobs + 0.25, "weight": 1.0, "trained_version": step}
            sample |= {"teacher_logprobs": logprobs + 0.5}
            if group == generation == 0:
                sample["images"] = [{"digest": IMAGE["digest"], "bytes": noise(32, 32)}]
            found.append(sample | {"versions": [{"version": step - 1, "first": 0, "end": length}]})
    return found


def assert_trace_format(trace: dict[str, Any]) -> None:
    """Check the fields that the Trace Event Format asks for, and that the spans of a thread nest, as Perfetto wants."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    fields = {"X": {"ts", "dur"}, "M": {"args"}, "i": {"ts", "s"}, "s": {"ts", "id"}, "f": {"ts", "id"}}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event.keys() >= fields[event["ph"]], event
        assert type(event["pid"]) is int and type(event.get("tid", 0)) is int, event
        assert all(isinstance(event.get(name, 0), int | float) for name in ("ts", "dur")), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t"), event
        elif event["ph"] == "M":
            shown = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
            shown |= {"thread_sort_index": "sort_index"}
            assert shown[event["name"]] in event["args"], event
    for spans in threads.values():
        around: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1] + 0.01, (begin, end, around[-1])  # torch rounds to 0.001 us
            around.append(end)


def shown(run: Path, width: int, height: int) -> list[str]:
    """Return the lines of `watch` in a terminal of this size."""
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen(read_run(run), width, height, now=time.time()))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]
