"""What must hold between the keys of `data`: datasets that exist, environments that score them, loaders that fill a
step."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mcore.recipe.data import (
    FILE_DATASETS,
    PREFERENCE_DATASETS,
    DatasetEntry,
    dataset_by_name,
    unknown_dataset,
)
from grpo_mcore.recipe.errors import Finding, in_yaml, nearest
from grpo_mcore.recipe.master import MasterConfig, runs_grpo


def check_data(config: MasterConfig) -> Iterator[Finding]:
    """Datasets have what they need, and their environments exist."""
    if not config.data.train:
        yield Finding(
            ("data.train",),
            "no training dataset; give data.train, or data.dataset_name and data.train_data_path",
        )
    for part, entries in (("train", config.data.train), ("validation", config.data.validation)):
        for position, entry in enumerate(entries):
            at = f"data.{part}.{position}."
            yield from _check_dataset(entry, at)
            if entry.env_name is None and runs_grpo(config) and len(config.env) > 1:
                yield Finding((at + "env_name", f"data.{part}"), f"which of env scores it: {', '.join(config.env)}?")
            if entry.env_name is not None and entry.env_name not in config.env:
                near = nearest(entry.env_name, config.env)
                hint = f"; nearest: {near}" if near else ""
                known = ", ".join(config.env) or "nothing"
                yield Finding((at + "env_name",), f"{in_yaml(entry.env_name)} is not in env, which has {known}{hint}")


def _check_dataset(entry: DatasetEntry, at: str) -> Iterator[Finding]:
    name = dataset_by_name(entry.dataset_name)
    if name is None and not {".", ":"} & set(entry.dataset_name):
        yield Finding((at + "dataset_name",), unknown_dataset(entry.dataset_name))
    elif name in PREFERENCE_DATASETS:
        yield Finding(
            (at + "dataset_name",),
            f"{name} holds pairs of answers for DPO, which is not supported yet; GRPO and SFT cannot use them",
        )
    elif name in FILE_DATASETS and not entry.data_path:
        yield Finding((at + "data_path", at + "dataset_name"), f"{entry.dataset_name} needs a data_path")


def check_loaders(config: MasterConfig) -> Iterator[Finding]:
    """One data loader a dataset: each gives whole batches, of which a step takes whole ones."""
    data, at = config.data, "data.num_prompts_per_dataloader"
    if not data.use_multiple_dataloader:
        return
    if not runs_grpo(config):
        yield Finding(("data.use_multiple_dataloader",), "SFT reads all datasets with one data loader; leave it false")
        return
    size, prompts = data.num_prompts_per_dataloader, config.grpo.num_prompts_per_step
    if size is None:
        yield Finding((at, "data.use_multiple_dataloader"), "needed with use_multiple_dataloader: prompts a loader")
    elif prompts % size:
        below = prompts // size * size
        sizes = " or ".join(str(number) for number in (below, below + size) if number)
        yield Finding(
            (at, "grpo.num_prompts_per_step"),
            f"grpo.num_prompts_per_step = {prompts} is not a multiple of {size}; nearest that is: {sizes}",
        )
    elif data.custom_dataloader is None and data.train and prompts != size * len(data.train):
        yield Finding(
            (at, "grpo.num_prompts_per_step"),
            f"a batch of each of {len(data.train)} datasets is {len(data.train)} x {size} = "
            f"{size * len(data.train)} prompts, grpo.num_prompts_per_step is {prompts}; make them equal, or name a "
            "custom_dataloader that mixes them otherwise",
        )
