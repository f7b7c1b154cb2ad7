"""A run as one page that needs no network: a template, a plotting library (uPlot) and the run's data as JSON."""

import base64
import gzip
import html
import io
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_mcore.base.text import finite
from grpo_mcore.families.images import read_image
from grpo_mcore.observe.band import band_of
from grpo_mcore.observe.run_folder import left_out_if_damaged
from grpo_mcore.observe.samples import Kind, bytes_and_images, generated_mask, read_samples
from grpo_mcore.tools.report.comparison import band, names, standings
from grpo_mcore.tools.report.device_seconds import ORDER, device_seconds, step_spans
from grpo_mcore.tools.report.page_alarms import alarms
from grpo_mcore.tools.report.run_files import RunFiles, duration

STATIC = Path(__file__).parent / "static"
PAGE_BYTES = 4_000_000
"""Size of the page up to which samples are put into it."""
POINTS = 2000
"""Maximum number of points of a curve; of more, every nth is kept."""
SPAN_STEPS = 400
"""Maximum number of steps with a timeline in the page, evenly spaced."""
PACKED_RATIO = 1.5
"""Bytes of a step's samples in the page for each byte of its file without images, about."""
PICTURE_BYTES = 5000
"""Bytes of an image in the page, about."""
PICTURE_SIDE = 128
"""Pixels of the longer side of an image in the page."""
KINDS: tuple[Kind, ...] = ("train", "validation")

Shard = tuple[Kind, int]


def build_page(
    run: RunFiles,
    others: Sequence[RunFiles] = (),
    *,
    settings: Mapping[str, Sequence[RunFiles]] | None = None,
    sample_steps: Collection[int] = (),
    beside: str | None = None,
) -> str:
    """Return the page of a run. `others`: runs with which it is compared, in a table and by their curves. `settings`:
    the runs by setting; those of one setting share a curve, their mean, with a band from the lowest to the highest.
    `sample_steps`: steps whose samples are in the page in any case. `beside`: folder, relative to it, that has the
    samples of all steps (`write_shards`)."""
    runs = [run, *others]
    seconds = device_seconds(run.events)
    last = run.steps[-1] if run.steps else math.inf  # what comes after it, such as the end of the run, is no step
    steps = _spread([step for step in seconds.by_step if step <= last], SPAN_STEPS)
    timelines = step_spans(run.events, steps)
    tails = {event["step"]: event["samples"] for event in run.marks if event["what"] == "tail"}
    data = {
        "runs": _setting_curves(settings)
        if settings
        else [
            *({"name": name, "curves": _curves(shown)} for name, shown in zip(names(runs), runs, strict=True)),
            *_band(run),
        ],
        "standings": [asdict(line) for line in standings(runs)] if others else [],
        "heads": [
            {"name": name, "state": _state(shown), "headline": headline(shown), "alarms": _alarms(shown)}
            for name, shown in zip(names(runs), runs, strict=True)
        ],
        "state": _state(run),
        "ledger": {
            "order": ORDER,
            "wall": seconds.wall,
            "devices": seconds.by_device,
            "steps": {step: seconds.by_step[step] for step in steps},
        },
        "floor": (run.summary or {}).get("predicted_against_measured"),
        "timelines": timelines,
        "tails": {step: tails[step] for step in timelines if step in tails},
        "tokens": run.token_texts,
        "shards": {kind: list(run.samples[kind]) for kind in KINDS},
        "beside": beside,
        "samples": {},
    }
    room = PAGE_BYTES - len(_packed(data))
    data["samples"] = _chosen_samples(run, room, sample_steps)
    parts = {
        "TITLE": html.escape(f"{len(runs)} runs" if others else run.name),
        "UPLOT_CSS": _static("uPlot.min.css"),
        "CSS": _static("page.css"),
        "UPLOT_JS": _static("uPlot.iife.min.js"),
        "JS": _static("page.js"),
        "DATA": _packed(data),
    }
    page = _static("page.html")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


def write_shards(run: RunFiles, folder: Path) -> int:
    """Write the samples of each step as a script that the page loads when the step is chosen: a page opened from a disk
    may load scripts beside it, but read no other files. Return the number of files."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for kind in KINDS:
        for step, path in run.samples[kind].items():
            packed = ""
            with left_out_if_damaged(path):
                packed = _packed(_page_samples(path))
            if packed:
                text = f"addSamples({json.dumps(kind)}, {step}, {json.dumps(packed)});\n"
                (folder / f"{kind}_{step:06d}.js").write_text(text, encoding="utf-8")
                count += 1
    return count


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _packed(data: Any) -> str:
    """Return data as base64 of compressed JSON; the page unpacks it."""
    return base64.b64encode(gzip.compress(json.dumps(finite(data), separators=(",", ":")).encode(), 6)).decode()


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the steps, evenly spaced, with the last one."""
    stride = -(-len(steps) // most) if steps else 1
    return sorted({*steps[::stride], *steps[-1:]})


def _curves(run: RunFiles) -> dict[str, list[list[Any]]]:
    """Return every metric of a run by its full name as [steps, values]."""
    curves: dict[str, list[list[Any]]] = {}
    for prefix, lines in run.metrics.items():
        kept = set(_spread([line["step"] for line in lines], POINTS))
        for line in lines:
            if line["step"] in kept:
                for name, value in line.items():
                    if name not in ("step", "prefix", "unix_time") and value is not None:
                        steps, values = curves.setdefault(f"{prefix}/{name}", [[], []])
                        steps.append(line["step"])
                        values.append(_short(value))
    return curves


def _setting_curves(settings: Mapping[str, Sequence[RunFiles]]) -> list[dict[str, Any]]:
    """Return, for the runs of each setting, every metric as [steps, means, lowest, highest]."""
    return [
        {"name": f"{name} ({len(runs)} run{'s' * (len(runs) > 1)})", "curves": band([_curves(run) for run in runs])}
        for name, runs in settings.items()
    ]


def _band(run: RunFiles) -> Iterator[dict[str, Any]]:
    """Yield the band that the recipe names, if it does, as curves like those of several runs, of the run's metrics."""
    if (of_recipe := band_of(run.recipe)[0]) is not None:
        own = _curves(run)
        yield {"name": of_recipe.name, "curves": {n: it for n, it in of_recipe.plain_curves().items() if n in own}}


def headline(run: RunFiles) -> dict[str, Any] | None:
    """Return the metric that says most of a run, before and after: that of its validations, where it has two, else the
    reward or the loss of training, over the first and the last tenth of the steps. None before there are two steps."""
    validations = run.metrics["validation"]
    for name in ("accuracy", "reward", "val_loss"):
        lines = [(line["step"], line[name]) for line in validations if line.get(name) is not None]
        if len(lines) > 1:
            (first, before), (last, after) = lines[0], lines[-1]
            return {"metric": f"validation/{name}", "before": before, "after": after, "steps": [first, last]}
    for name in ("reward", "loss"):
        lines = [(line["step"], line[name]) for line in run.metrics["train"] if line.get(name) is not None]
        if len(lines) > 1:
            tenth = max(1, len(lines) // 10)
            before, after = (fmean(value for _, value in part) for part in (lines[:tenth], lines[-tenth:]))
            return {"metric": f"train/{name}", "before": before, "after": after, "steps": [lines[0][0], lines[-1][0]]}
    return None


def _alarms(run: RunFiles) -> list[dict[str, Any]]:
    found = alarms(run, device_seconds(run.events))
    return [{"text": alarm.text, "help": alarm.help, "grave": alarm.grave} for alarm in found]


def _state(run: RunFiles) -> dict[str, Any]:
    silent = time.time() - run.last_written
    if run.end is not None:
        end = str(run.end)
    else:
        end = f"not over: its last sign of life was {duration(silent)} before this page was made"
    return {
        "folder": str(run.folder),
        "model": run.setting("policy.model_name", str),
        "steps": run.steps[-1] if run.steps else 0,
        "max_steps": run.max_steps,
        "algorithm": run.algorithm,
        "rewarded": run.rewarded,
        "step_size": run.step_size,
        "end": end,
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _chosen_samples(run: RunFiles, room: float, sample_steps: Collection[int]) -> dict[str, dict[int, str]]:
    """Return samples by kind and step, packed: first of the `sample_steps`, then of the last one, the first, and ever
    more between them, as long as there is room. Of a step that is too big some whole groups are kept."""
    chosen: dict[str, dict[int, str]] = {kind: {} for kind in KINDS}
    for kind, step in _by_interest(run, sample_steps):
        path, packed = run.samples[kind][step], None
        with left_out_if_damaged(path):
            uids = list(dict.fromkeys(row["uid"] for row in read_samples(path, ["uid"])))
            bare, images = bytes_and_images(path)
            size, share = PACKED_RATIO * bare + PICTURE_BYTES * images, min(room, max(room / 4, PAGE_BYTES / 20))
            kept = len(uids) if step in sample_steps or size <= share else int(len(uids) * share / size)
            packed = _packed(_page_samples(path, uids[:kept], len(uids))) if kept else ""
        if packed is None:
            continue
        if not packed or (len(packed) > room and step not in sample_steps):
            break
        chosen[kind][step] = packed
        room -= len(packed)
    return chosen


def _by_interest(run: RunFiles, sample_steps: Collection[int]) -> Iterator[Shard]:
    """Yield all steps: `sample_steps`, the last and the first ones, then halves, quarters and so on between them."""
    shards = [(kind, step) for kind in KINDS for step in run.samples[kind] if step in sample_steps]
    orders = []
    for kind in KINDS:
        steps = list(run.samples[kind])
        indices = [len(steps) - 1, 0]
        stride = 1 << max(len(steps) - 1, 1).bit_length()
        while stride > 1:
            indices += range(stride // 2, len(steps), stride)
            stride //= 2
        orders.append([(kind, steps[index]) for index in dict.fromkeys(indices) if 0 <= index < len(steps)])
    train, validation = orders
    for index, shard in enumerate(train):  # a validation for each two steps, as long as there are any
        shards.append(shard)
        shards += validation[index // 2 : index // 2 + 1] if index % 2 == 0 else []
    yield from dict.fromkeys([*shards, *validation])


def _page_samples(path: Path, uids: Sequence[str] | None = None, prompts: int | None = None) -> dict[str, Any]:
    """Return the samples of a file, or those of some of its `prompts`, as the page reads them, and their pictures."""
    rows = read_samples(path, uids=uids)
    files = {file["digest"]: file["bytes"] for row in rows for file in row.get("images") or ()}
    pictures = {digest: picture for digest, file in files.items() if (picture := _picture(file))}
    return {"prompts": prompts, "samples": [_page_sample(row) for row in rows], "pictures": pictures}


def _picture(file: bytes) -> str | None:
    """Return an image in the size of a stamp, as a data URL; None for one that cannot be decoded."""
    try:
        image = read_image(file)
    except ValueError:
        return None
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    image.save(small := io.BytesIO(), "WEBP", quality=60)
    return f"data:image/webp;base64,{base64.b64encode(small.getvalue()).decode()}"


def advantage_formula(row: Mapping[str, Any]) -> str | None:
    """Return an advantage as a formula with its numbers filled in, such as "(1 - 0.25) / 0.5345". The numbers have as
    many digits as it takes to compute from them the advantage that the page shows. None for custom estimators, and for
    samples without a reward."""
    terms: dict[str, Any] = json.loads(row.get("terms") or "{}")
    if row.get("baseline") is not None:
        terms = {"": {"weight": 1.0, "reward": row["shaped_reward"]} | {key: row[key] for key in ("baseline", "scale")}}
    terms = {name: term for name, term in terms.items() if None not in term.values()}  # those that apply
    if row["advantage"] is None or not terms:
        return None
    for digits in range(4, 18):
        parts, total = [], 0.0
        rounded = {name: {key: _rounded(value, digits) for key, value in term.items()} for name, term in terms.items()}
        for term in rounded.values():
            weight, reward, baseline, scale = (term[key] for key in ("weight", "reward", "baseline", "scale"))
            total += weight * (reward - baseline) / scale
            factor = "" if weight == 1 else f"{_number(weight)} * "
            parts.append(
                f"{factor}({_number(reward)} - {_number(baseline)})" + ("" if scale == 1 else f" / {_number(scale)}")
            )
        text, step_scale = " + ".join(parts), _rounded(row.get("step_scale") or 1.0, digits)
        if step_scale != 1:
            text, total = f"({text}) / {_number(step_scale)}", total / step_scale
        if row.get("teacher_part"):
            part = _rounded(row["teacher_part"], digits)
            text, total = f"{text} + {_number(part)}", total + part
        for bound, name, cut in ((row.get("clip_low"), "max", max), (row.get("clip_high"), "min", min)):
            if bound is not None:
                text, total = f"{name}({text}, {_number(bound)})", cut(total, bound)
        if _short(total) == _short(row["advantage"]):
            break
    return text


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _number(value: float) -> str:
    text = f"{value:.17g}" if float(f"{value:.15g}") != value else f"{value:.15g}"
    return f"({text})" if value < 0 else text


def _credits(row: Mapping[str, Any]) -> list[float] | None:
    """Return the credit of each generated turn, as the turns stand; None without credit by turn."""
    if not row.get("turn_credits"):
        return None
    count = sum(turn["generated"] for turn in row["turns"] or ())
    return [_short(row["turn_credits"][number]) for number in row.get("turn_numbers") or range(count)]


def _places(turns: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, str]]:
    """Return (first token, tokens, digest) of each image of a sample."""
    starts = accumulate((turn["tokens"] for turn in turns), initial=0)
    return [
        (start + image["offset"], image["length"], image["digest"])
        for start, turn in zip(starts, turns, strict=False)
        for image in turn.get("images") or ()
    ]


def _page_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with short names; numbers by token are of its generated tokens only."""
    length = len(row["token_ids"])
    mask = generated_mask(row["turns"] or (), length)
    trained = row["trained_version"]
    versions: list[int | None] = [None] * length
    for span in row["versions"] or ():
        if not 0 <= span["first"] <= span["end"] <= length:
            raise ValueError(f"a span of {span} is not within {length} tokens")
        versions[span["first"] : span["end"]] = [span["version"]] * (span["end"] - span["first"])

    def generated(values: Sequence[float] | None) -> list[float] | None:
        if not values:
            return None
        return [round(value, 4) for value, of_policy in zip(values, mask, strict=True) if of_policy]

    generators = [version for version, of_policy in zip(versions, mask, strict=True) if of_policy]
    ages = [trained - version for version in generators if trained and version is not None]
    return {
        "u": row["uid"],
        "g": row["generation"],
        "r": row["reward"],
        "R": json.loads(row["rewards"] or "{}"),
        "a": None if row["advantage"] is None else _short(row["advantage"]),
        "A": advantage_formula(row),
        "c": _credits(row),
        "n": row.get("group_size"),
        "kl": row.get("kl_weight") or None,
        "row": json.loads(row.get("columns") or "{}"),
        "w": row["weight"],
        "ans": row["answer"],
        "truth": row["truth"],
        "why": row["reason"],
        "cut": row["truncated"],
        "left": row["left_out"],
        "s": _short(row["score_seconds"] or 0.0),
        "t": [[turn["role"], turn["tokens"], int(turn["generated"])] for turn in row["turns"] or ()],
        "im": _places(row["turns"] or ()),
        "text": None if row["token_ids"] else "".join(turn["text"] for turn in row["turns"] or ()),
        "ids": row["token_ids"],
        "e": generated(row["engine_logprobs"]),
        "p": generated(row["policy_logprobs"]),
        "q": generated(row.get("teacher_logprobs")),
        "age": ages if any(ages) else None,
    }
