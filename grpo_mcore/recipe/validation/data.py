"""Rules of `data`: datasets and environments must exist, and data loaders must fill a step."""

from collections.abc import Iterator

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import samples_together
from grpo_mcore.recipe.errors import in_yaml, nearest_hint
from grpo_mcore.recipe.schema.data import (
    FILE_DATASETS,
    PREFERENCE_DATASETS,
    DatasetEntry,
    dataset_by_name,
    unknown_dataset,
)
from grpo_mcore.recipe.schema.master import RecipeSections, algorithm_of, only_evaluates, runs_grpo


def check_data(config: RecipeSections) -> Iterator[Finding]:
    """There must be training data, and each dataset must have what it needs and an environment."""
    if only_evaluates(config) and not config.data.validation:
        yield Finding(("data.validation",), "no data to evaluate on; give data.dataset_name, or data.validation")
    if not config.data.train and not only_evaluates(config):
        yield Finding(
            ("data.train",), "no training dataset; give data.train, or data.dataset_name and data.train_data_path"
        )
    for part, entries in (("train", config.data.train), ("validation", config.data.validation)):
        for position, entry in enumerate(entries):
            prefix = f"data.{part}.{position}."
            if entry.dataset_name.endswith((".jsonl", ".json", ".parquet")):
                yield Finding(
                    (prefix + "dataset_name",),
                    f"{entry.dataset_name} is a file: give it as data_path, with dataset_name ResponseDataset if its "
                    "rows have input and output",
                )
                continue
            yield from _check_dataset(entry, prefix, config)
            if entry.env_name is None and (runs_grpo(config) or only_evaluates(config)) and len(config.env) > 1:
                yield Finding(
                    (prefix + "env_name", f"data.{part}"),
                    f"{entry.dataset_name}: name the environment that scores it with env_name: {', '.join(config.env)} "
                    "(_override_: true in env leaves out those that a recipe inherits)",
                )
            if entry.env_name is not None and entry.env_name not in config.env:
                hint = nearest_hint(entry.env_name, config.env)
                known = ", ".join(config.env) or "no entries"
                yield Finding(
                    (prefix + "env_name",), f"{in_yaml(entry.env_name)} is not in env, which has {known}{hint}"
                )


def _check_dataset(entry: DatasetEntry, prefix: str, config: RecipeSections) -> Iterator[Finding]:
    algorithm = algorithm_of(config)
    name = dataset_by_name(entry.dataset_name)
    if name is None and not {".", ":"} & set(entry.dataset_name):
        yield Finding((prefix + "dataset_name",), unknown_dataset(entry.dataset_name))
    elif name in PREFERENCE_DATASETS and samples_together(config, algorithm) == 1:
        yield Finding(
            (prefix + "dataset_name",),
            f"{name} holds pairs of answers for DPO and Bradley-Terry reward models; a recipe for them has a section "
            "dpo or rm",
        )
    elif algorithm == "rm" and entry.processor not in (None, "reward_model_processor"):
        yield Finding((prefix + "processor",), "a reward model reads whole conversations; remove the key")
    elif name in FILE_DATASETS and not entry.data_path:
        yield Finding((prefix + "data_path", prefix + "dataset_name"), f"{entry.dataset_name} needs a data_path")


def check_loaders(config: RecipeSections) -> Iterator[Finding]:
    """If each dataset has a data loader of its own, a step must consist of whole batches."""
    data, key = config.data, "data.num_prompts_per_dataloader"
    size, prompts = data.num_prompts_per_dataloader, config.grpo.num_prompts_per_step
    if not data.use_multiple_dataloader or not runs_grpo(config) or size is None:
        return
    if prompts % size:
        below = prompts // size * size
        sizes = " or ".join(str(number) for number in (below, below + size) if number)
        yield Finding(
            (key, "grpo.num_prompts_per_step"),
            f"grpo.num_prompts_per_step = {prompts} is not a multiple of {size}; nearest that is: {sizes}",
        )
    elif data.custom_dataloader is None and data.train and prompts != size * len(data.train):
        yield Finding(
            (key, "grpo.num_prompts_per_step"),
            f"one batch of each of {len(data.train)} datasets is {len(data.train)} x {size} = "
            f"{size * len(data.train)} prompts, but grpo.num_prompts_per_step is {prompts}; make them equal, or name a "
            "custom_dataloader that mixes the datasets differently",
        )
