"""Fetch all that a recipe reads from the Hugging Face hub, and prove that a run finds it without a network; or copy its
models from a shared cache to a node's own disk.

The Hugging Face libraries read where their cache is, and whether they may use the network, when they are imported. So
one process fetches, and a second one opens everything once more with the hub switched off:
`python -m grpo_mcore.tools.prefetch RECIPE [key=value ...]` prints one JSON object per item.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from grpo_mcore.base.processes import die_with_parent
from grpo_mcore.recipe import (
    MasterConfig,
    PolicyConfig,
    algorithm_of,
    environment_class,
    load_recipe,
    samples_together,
    teacher_policies,
)

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
OTHER_CACHES = (
    *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE"),
    *("TRANSFORMERS_CACHE", "HF_MODULES_CACHE"),
)
"""Variables that would keep a part of the cache outside HF_HOME."""

Kind = Literal["model", "tokenizer", "reward model", "data"]


class PrefetchError(Exception):
    """The models of a recipe cannot be copied to a node's disk."""


@dataclass(frozen=True)
class Need:
    """Something that a run opens. `key`: the recipe's key that names it. `name`: a folder, a file or a name on the
    hub."""

    kind: Kind
    key: str
    name: str


@dataclass(frozen=True)
class Found:
    """Result of opening what a run needs. `size`: bytes or rows, in words. `error`: None if it opened."""

    need: Need
    size: str = ""
    error: str | None = None


def models_of(config: MasterConfig) -> dict[str, PolicyConfig]:
    """Return the models of a recipe by the keys that name them: policy, critic and teachers."""
    models = {"policy.model_name": config.policy}
    if config.value is not None and config.ppo.enabled:
        models["value.model_name"] = config.value
    at = "on_policy_distillation.teacher_model_by_agent_name"
    return models | {f"{at}.{alias}": model for alias, model in teacher_policies(config).items()}


def needs_of(config: MasterConfig) -> list[Need]:
    """Return the models, tokenizers and datasets that a run of the recipe opens."""
    policy = config.policy
    needs = [Need("model", key, model.model_name) for key, model in models_of(config).items()]
    if policy.tokenizer.name != policy.model_name:
        needs.append(Need("tokenizer", "policy.tokenizer.name", str(policy.tokenizer.name)))
    for name, section in config.env.items():
        env_class, settings = environment_class(name, section)
        if env_class == "reward_model" and "model_name" in settings:
            needs.append(Need("reward model", f"env.{name}.model_name", str(settings["model_name"])))
    for part in ("train", "validation"):
        for index, entry in enumerate(getattr(config.data, part)):
            name = str(entry.data_path or entry.dataset_name)
            needs.append(Need("data", f"data.{part}[{index}]", name))
    return needs


def prefetch(words: Sequence[str], folder: Path | None) -> tuple[list[Found], list[Found]]:
    """Fetch what a recipe needs, then open it without a network. Return what came of each. `words`: the recipe and
    overrides. `folder`: the cache, for HF_HOME; None: the cache of this process."""
    cache = {}
    if folder is not None:
        cache = {"HF_HOME": str(folder.absolute())}
    env = {name: value for name, value in os.environ.items() if not (cache and name in OTHER_CACHES)} | cache
    online = {name: value for name, value in env.items() if name not in OFFLINE}  # to fetch is what was asked for
    fetched = _in_a_process(words, online)
    return fetched, _in_a_process(words, env | OFFLINE)


def _in_a_process(words: Sequence[str], env: Mapping[str, str]) -> list[Found]:
    program = [sys.executable, "-P", "-m", "grpo_mcore.tools.prefetch", *words]
    bound = partial(die_with_parent, os.getpid(), signal.SIGTERM)
    done = subprocess.run(program, env=env, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=bound)
    lines = done.stdout.splitlines()
    items = [json.loads(line) for line in lines if line.startswith('{"need": ')]
    return [Found(Need(**item["need"]), item["size"], item["error"]) for item in items]


def find(config: MasterConfig, need: Need) -> Found:
    """Open what a run opens, fetching what is not here unless the hub is switched off."""
    try:
        if need.kind == "data":
            rows = _rows(config, need.key)
            return Found(need, f"{rows:,} row{'s' * (rows != 1)}")
        folder = _open_model(config, need)
    except Exception as error:  # of any of the libraries; it is shown beside the item
        ours = type(error).__module__.startswith("grpo_mcore.")
        return Found(need, error=(str(error) if ours else f"{type(error).__name__}: {error}").splitlines()[0])
    return Found(need, f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e9:,.2f} GB")


def _rows(config: MasterConfig, key: str) -> int:
    """Load a dataset as a run does, and return the number of its rows."""
    from grpo_mcore.data.datasets.registry import load_preference_dataset, load_response_dataset

    part, _, index = key.removeprefix("data.").rstrip("]").partition("[")
    entry = getattr(config.data, part)[int(index)]
    of_pairs = samples_together(config, algorithm_of(config)) == 2
    data = (load_preference_dataset if of_pairs else load_response_dataset)(entry)
    return len(data.dataset) + (0 if data.val_dataset is None else len(data.val_dataset))


def _open_model(config: MasterConfig, need: Need) -> Path:
    """Return the folder of a model or tokenizer, after checks that half a download does not pass."""
    from huggingface_hub import snapshot_download

    from grpo_mcore.data.tokenizer import load_tokenizer
    from grpo_mcore.driver.run.checks import model_folder
    from grpo_mcore.families import read_hf_config, shape_of
    from grpo_mcore.parallel.weights.hf_folder import check_weights, weight_files

    names = config.policy.tokenizer
    if need.kind == "tokenizer":
        load_tokenizer(need.name, names.chat_template, names.chat_template_kwargs)
        return Path(need.name if Path(need.name).is_dir() else snapshot_download(need.name, local_files_only=True))
    folder = Path(model_folder(need.name, need.key))
    if need.kind == "reward model":
        from transformers import AutoConfig

        from grpo_mcore.rollout.tokenizer_file import load_hf_tokenizer

        AutoConfig.from_pretrained(need.name)
        load_hf_tokenizer(need.name)
        weight_files(folder)
        return folder
    model = models_of(config)[need.key]
    check_weights(folder, shape_of(read_hf_config(folder, model.hf_config_overrides), model.head))
    if need.key == "policy.model_name" and names.name == need.name:
        load_tokenizer(need.name, names.chat_template, names.chat_template_kwargs)
    return folder


def stage(config: MasterConfig, folder: Path) -> list[tuple[Need, Path, int]]:
    """Copy the models of a recipe from the hub's cache to a node's own disk, for HF_HUB_CACHE=FOLDER/hub. Return each
    model with its copy and the bytes that were copied; 0 if it was there. Only models: every rank reads those, and the
    driver alone reads data.

    A copy appears whole or not at all. Raises PrefetchError for a model that is not in the cache, or too large.
    """
    from huggingface_hub import constants

    staged = []
    for need in needs_of(config):
        if need.kind == "data" or Path(need.name).is_dir():  # a folder is read where the recipe says
            continue
        name = f"models--{need.name.replace('/', '--')}"
        source, target = Path(constants.HF_HUB_CACHE) / name, folder / "hub" / name
        if target.is_dir():
            staged.append((need, target, 0))
            continue
        if not (source / "snapshots").is_dir():
            raise PrefetchError(
                f"{need.key}: {need.name} is not in {constants.HF_HUB_CACHE}; fetch it with `grpo-mcore prefetch` first"
            )
        size = sum(file.lstat().st_size for file in source.rglob("*") if file.is_file() and not file.is_symlink())
        target.parent.mkdir(parents=True, exist_ok=True)
        if size > (free := shutil.disk_usage(target.parent).free):
            raise PrefetchError(f"{need.key}: {folder} has {free / 1e9:,.1f} GB left, {need.name} {size / 1e9:,.1f} GB")
        part = target.with_name(f".{name}.{os.getpid()}")
        try:
            shutil.copytree(source, part, symlinks=True)
            if not target.is_dir():  # another job of this node may have copied it meanwhile
                part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        staged.append((need, target, size))
    return staged


def main(words: Sequence[str]) -> None:
    config = load_recipe(words[0], words[1:]).config
    for need in needs_of(config):
        print(json.dumps(asdict(find(config, need))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
