"""Functions that test_images.py runs on its ranks: comparisons with planted faults, samples as of a run, an export."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from grpo_mcore.batching import row_images
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.families.images import image_settings
from grpo_mcore.parallel.mesh import Address, prepare_megatron
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.rollout.datum import Message
from grpo_mcore.step.examples import as_trajectory
from grpo_mcore.step.step_batch import RankStep
from grpo_mcore.tools.demo.tiny_models import SIZES
from grpo_mcore.tools.parity.rank import (
    LayoutCase,
    ParityWorkload,
    compared_loss,
    logprobs_and_gradients,
    make_policy,
    micro_batches,
    policy_config,
    sequences,
)


def with_fault(address: Address, model: str, case: LayoutCase, work: ParityWorkload, fault: str) -> dict[str, Any]:
    """Return `logprobs_and_gradients` of a policy with one of FAULTS; with none for another name."""
    prepare_megatron(Platform("cpu"))
    with ExitStack() as stack:
        if fault in FAULTS:
            stack.enter_context(patch(f"grpo_mcore.{FAULTS[fault][0]}", FAULTS[fault][1]))
        return logprobs_and_gradients(address, model, case, work=work)


def scored(address: Address, model: str, case: LayoutCase, work: ParityWorkload) -> dict[int, torch.Tensor]:
    """Return the log-probs of each sequence's trained tokens from a worker that gets the sequences as trajectories of
    several turns, the first two as branches of one, and the images' bytes by reference."""
    vision = shape_of(read_hf_config(model)).vision
    assert vision is not None
    settings, tokens = image_settings(model, vision), sequences(SIZES["vocab_size"], work, vision)
    logs = [
        Message(
            role="user",
            content="",
            token_ids=ids,
            token_loss_mask=work.counts(i).long(),
            images=tuple(image.span(settings) for image in work.images_of(i)),
        )
        for i, ids in enumerate(tokens)
    ]
    lengths = tuple(map(len, tokens))
    samples = [replace(as_trajectory("0", logs[:2]), branches=lengths[:2])]
    samples += [as_trajectory(str(i), [logs[i]]) for i in range(2, len(logs))]
    objects: list[Any] = list(samples)
    store: Any = SimpleNamespace(
        put=lambda thing: objects.append(thing) or len(objects) - 1, fetch_many=lambda refs: [objects[i] for i in refs]
    )
    refs = {image.span(settings).digest: store.put(image.file(settings)) for image in work.images}
    section = policy_config(model, case)
    section.sequence_packing.shared_prefix = section.sequence_packing.shared_prefix.model_copy(update={"min_tokens": 4})
    worker = PolicyWorker(address, section, store, 1, 60.0, False, "cpu", images=True)
    numbers = tuple(range(len(samples)))
    step = RankStep(((numbers,),), dict(zip(numbers, numbers, strict=True)), True, images=refs)
    found = {number: objects[ref] for number, ref in worker.score(step).items()}
    if not found:
        return {}
    both = found.pop(0).split([int(work.counts(i).sum()) for i in range(2)])
    return dict(enumerate(both)) | {number + 1: part for number, part in found.items()}


def trained_and_exported(address: Address, model: str, out: str, work: ParityWorkload) -> dict[int, torch.Tensor]:
    """Train a step in which one sampled token is the mark of an image, and export. Return the log-probs of the trained
    policy by sequence."""
    policy = make_policy(address, model, LayoutCase("TP1"), images=True)
    batches = micro_batches(policy, work=work)
    assert policy.shape.vision is not None
    kept, left_out = batches[0], batches[-1]
    assert kept is not left_out
    left_out.columns["sample_mask"].zero_()
    for batch in (kept, left_out):
        batch.tokens[tuple(batch.columns["token_mask"].nonzero()[0])] = policy.shape.vision.image_token
    report = policy.train_step(batches, compared_loss(work), global_valid_seqs=8, global_valid_toks=work.trained)
    assert report.metrics["num_sampled_image_tokens"] == 1
    policy.export_hf(out)
    batches = micro_batches(policy, work=work)
    rows = zip(batches, policy.logprobs(batches) or (), strict=True)
    return {int(name): part for batch, row in rows for name, part in zip(batch.names, batch.split(row), strict=True)}


_token_axes = row_images.token_axes


def _of_another_grid(length: int, images: Any, merge_size: int) -> torch.Tensor:
    times_first = [replace(image, grid=(image.grid[0], *image.grid[:0:-1])) for image in images]
    return _token_axes(length, times_first, merge_size)


def _rotated(images: Any, known: Any) -> torch.Tensor:
    return torch.cat([known[digest].roll(1, 0) for digest, _ in images])


def _of_another_sample(images: Any, known: Any) -> torch.Tensor:
    last_of_size = {len(features): features for features in known.values()}
    return torch.cat([last_of_size[size] for _, size in images])


class _NoFile:
    def __init__(self, folder: Any) -> None: ...

    def read(self, name: str, box: Any) -> torch.Tensor:
        return 0.08 * torch.randn([stop for _, stop in box])


def _one_layer_late(images: Any, level: int) -> torch.Tensor:
    of_level = images.features[:, max(0, level - 1)] * (level != 1)
    return of_level.index_select(0, images.feature.clamp(min=0))[:, None]


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "axes of another grid": ("batching.row_images.token_axes", _of_another_grid),
    "features rotated by one": ("parallel.model.features_of", _rotated),
    "image of another sample": ("parallel.model.features_of", _of_another_sample),
    "prefixes by ids": ("batching.row_images.RowImages.content", lambda self, tokens: tokens),
    "tower not loaded": ("parallel.weights.tower.SafetensorsFolder", _NoFile),
    "deepstack one layer late": ("parallel.layers.vision._by_token", _one_layer_late),
}
