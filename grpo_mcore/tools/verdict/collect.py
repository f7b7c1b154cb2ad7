"""Collects the log-probs of policy and engine: of a recorded step of a run, or of a model now."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import pack_rows
from grpo_mcore.driver.record.recorded_samples import trajectory_of
from grpo_mcore.driver.run.checks import model_folder
from grpo_mcore.families import (
    ModelShape,
    engine_overrides,
    missing_on_cpu,
    read_hf_config,
    shape_of,
    unquantized_layers,
)
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.probes import fixed_direction, trace_layers
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.tools.export import export
from grpo_mcore.tools.parity.parity import NEW_TOKENS, RANK_TIMEOUT_S, cpu_engine
from grpo_mcore.tools.parity.rank import LayoutCase, make_policy, sequences
from grpo_mcore.tools.parity.rank_pool import RankPool
from grpo_mcore.tools.replay.replay import ReplayError, recorded_step
from grpo_mcore.tools.verdict.judge import JudgedSample

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class VerdictCase:
    """Input of the judge. `folder` holds the weights that gave the numbers, `older` those of the version before.
    `notes` say what is not judged, and why. `unquantized`: see Judge."""

    folder: Path
    older: Path | None
    samples: tuple[JudgedSample, ...]
    sampling: Sampling
    precision: torch.dtype
    notes: tuple[str, ...] = ()
    unquantized: tuple[str, ...] | None = None


def of_run(run: Path, config: MasterConfig, step: int, count: int, scratch: Path) -> list[VerdictCase]:
    """Return two cases of the first `count` recorded samples of a step: the policy's log-probs with the weights after
    `step` - 1 steps, which are of weight version `step`; and the engine's log-probs with the weights of the version
    that most samples come from. Raises ReplayError where the policy's weights are not kept."""
    recorded, _ = recorded_step(run, step)
    files = {file["digest"]: file["bytes"] for row in recorded for file in row.get("images") or ()}
    read = partial(_sample, files=files)
    sampling = _sampling(config)
    precision = PRECISIONS[config.policy.precision]
    folder = _weights(config, step - 1, scratch)
    if folder is None:
        where = f"{config.checkpointing.checkpoint_dir}/step_{step - 1}"
        raise ReplayError(f"{where} is not kept: step {step} began with its weights; choose a step after a checkpoint")
    vision = shape_of(read_hf_config(folder)).vision
    token = -1 if vision is None else vision.image_token
    rows = [row for row in recorded if row["weight"] and not _writes(row, token)]
    versions = Counter(row["versions"][0]["version"] for row in rows if len(row["versions"]) == 1)
    policy = VerdictCase(
        folder,
        _weights(config, step - 2, scratch),
        tuple(replace(read(row), engine=None) for row in rows[:count]),
        sampling,
        precision,
    )
    if not versions:
        return [replace(policy, notes=("engine: each sample has tokens of several weight versions",))]
    version = versions.most_common(1)[0][0]
    matching = [row for row in rows if [span["version"] for span in row["versions"]] == [version]][:count]
    after = max(0, version - 1)  # steps; versions 0 and 1 are the model that the run started from
    if (weights := _weights(config, after, scratch)) is None:
        note = f"engine: the checkpoint of step {after}, whose weights generated most samples, is not kept"
        return [replace(policy, notes=(note,))]
    before = _weights(config, after - 1, scratch)
    samples = tuple(replace(read(row), policy=None) for row in matching)
    kept = unquantized_layers(shape_of(read_hf_config(weights)), config.policy.generation.vllm_cfg)
    return [policy, VerdictCase(weights, before, samples, sampling, precision, unquantized=kept)]


def overridden(model: Path, overrides: Mapping[str, Any], scratch: Path) -> Path:
    """Return a folder with a model's files and the config.json that a run used."""
    if not overrides:
        return model
    folder = scratch / "model"
    if not folder.is_dir():
        folder.mkdir()
        for file in model.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file.resolve())
        (folder / "config.json").write_text(json.dumps(read_hf_config(model, overrides)), encoding="utf-8")
    return folder


def of_model(folder: Path, layout: LayoutCase) -> VerdictCase:
    """Generate samples with an engine, in float32 on CPU, and compute their log-probs with the policy on `layout`, in
    packed rows. A model that the engine cannot run is compared on random tokens."""
    shape = shape_of(read_hf_config(folder))
    samples, notes = _generated(folder, shape)
    if not samples:
        tokens = sequences(shape.vocab_size)
        samples = [JudgedSample(str(i), ids, torch.arange(len(ids)) > 0, None, None) for i, ids in enumerate(tokens)]
    pool = RankPool(layout.world_size)
    try:
        target = "grpo_mcore.tools.verdict.collect:policy_logprobs"
        inputs = [(sample.tokens, sample.generated) for sample in samples]
        ranks = pool.run(layout.world_size, target, str(folder), layout, inputs, timeout_s=RANK_TIMEOUT_S)
    finally:
        pool.close()
    by_index = {index: values for logprobs, _ in ranks for index, values in logprobs.items()}
    layers: dict[int, dict[int, Tensor]] = {}
    for _, traces in ranks:
        for index, of_sample in traces.items():
            layers.setdefault(index, {}).update(of_sample)
    judged = tuple(
        replace(sample, policy=by_index[index], layers=layers[index]) for index, sample in enumerate(samples)
    )
    return VerdictCase(folder, None, judged, Sampling(NEW_TOKENS), torch.float32, notes)


def policy_logprobs(
    address: Address, model: str, layout: LayoutCase, samples: Sequence[tuple[Tensor, Tensor]]
) -> tuple[dict[int, Tensor], dict[int, dict[int, Tensor]]]:
    """Return (log-probs by index, outputs of this rank's layers by sample and layer) of samples given as (tokens,
    generated), on the ranks that report them."""
    policy = make_policy(address, model, layout)
    bins = [range(start, len(samples), 2 * policy.layout.data) for start in range(2 * policy.layout.data)]
    rows = [
        pack_rows(
            [samples[i][0] for i in bin],
            [{"token_mask": samples[i][1].float(), "sample_mask": torch.tensor(1.0)} for i in bin],
            policy.row_multiple,
            names=[str(i) for i in bin],
        )
        for bin in bins[policy.here.data :: policy.layout.data]
    ]
    logprobs = {
        int(name): values
        for row, scores in zip(rows, policy.logprobs(rows) or (), strict=False)
        for name, values in zip(row.names, row.split(scores), strict=True)
    }
    layers: dict[int, dict[int, Tensor]] = {}
    for row, traces in zip(rows, trace_layers(policy, rows), strict=True):
        for number, columns in traces.items():
            for name, part in zip(row.names, columns.split(list(row.lengths), dim=1), strict=True):
                layers.setdefault(int(name), {})[number] = part.clone()
    return logprobs, layers


def _generated(folder: Path, shape: ModelShape) -> tuple[list[JudgedSample], tuple[str, ...]]:
    """Return samples of an engine, none if vLLM's CPU build cannot run the model, and notes on what is missing."""
    if (missing := missing_on_cpu(shape)) is not None:
        return [], (f"engine: vLLM's CPU build cannot run this {shape.family} model: {missing}",)
    overrides = {"hf_overrides": engine_overrides(read_hf_config(folder), {})}
    # Without a prefix cache each token is computed, and recorded.
    engine, requests = cpu_engine(folder, shape, prefix_caching=False, vllm_kwargs=overrides)
    try:
        recorded = engine.record_layers(fixed_direction(shape.hidden_size))
        samples = list(engine.generate(requests, Sampling(NEW_TOKENS)))
        traces = engine.layer_traces()
    finally:
        engine.shutdown()
    note = f"engine: vLLM's model has no list of its {shape.num_layers} layers: in which it parts cannot be said"
    return [
        JudgedSample(
            sample.uid,
            sample.token_ids(),
            sample.loss_mask(),
            None,
            sample.logprobs(),
            engine_layers=traced_layers(traces[sample.uid, 0], sample.length) if recorded else {},
        )
        for sample in samples
    ], () if recorded else (note,)


def traced_layers(trace: Any, length: int) -> dict[int, Tensor]:
    """Return an engine's trace of a sample of `length` tokens as JudgedSample has it."""
    return {layer + 1: torch.from_numpy(trace[: length - 1, layer].T) for layer in range(trace.shape[1])}


def _sampling(config: MasterConfig) -> Sampling:
    generation = config.policy.generation
    return Sampling(generation.max_new_tokens or 1, generation.temperature, generation.top_p, generation.top_k)


def _writes(row: Mapping[str, Any], token: int) -> bool:
    """Return whether a sample has the token of images elsewhere than in one: transformers would take it for another."""
    shown = sum(image["length"] for turn in row["turns"] or () for image in turn.get("images") or ())
    return bool(row["token_ids"].count(token) > shown)


def _sample(row: Mapping[str, Any], files: Mapping[str, bytes]) -> JudgedSample:
    """Return a recorded sample, or the first branch of one that has several."""
    length = row["branches"][0] if row.get("branches") else len(row["token_ids"])
    generated = torch.cat([torch.full((turn["tokens"],), turn["generated"]) for turn in row["turns"]])[:length]
    policy, engine = (
        None if row[name] is None else torch.tensor(row[name], dtype=torch.float32)[:length]
        for name in ("policy_logprobs", "engine_logprobs")
    )
    tokens = torch.tensor(row["token_ids"], dtype=torch.int64)[:length]
    images = tuple((span, files[span.digest]) for span in trajectory_of(row).images() if span.offset < length)
    return JudgedSample(f"{row['uid']}#{row['generation']}", tokens, generated, policy, engine, images=images)


def _weights(config: MasterConfig, steps: int, scratch: Path) -> Path | None:
    """Return a Hugging Face folder with the weights after this many `steps`; None if their checkpoint is not kept."""
    if steps == 0:
        return overridden(Path(model_folder(config.policy.model_name)), config.policy.hf_config_overrides, scratch)
    folder = scratch / f"step_{steps}"
    if steps > 0 and not folder.is_dir():
        if not (checkpoint := Path(config.checkpointing.checkpoint_dir) / f"step_{steps}").is_dir():
            return None
        export(checkpoint, folder)
    return folder if steps > 0 else None
