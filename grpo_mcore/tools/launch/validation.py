"""Find the settings of a recipe that a cluster would reject, or silently get wrong, an hour later. Every problem names
its key and line."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from grpo_mcore.families import read_hf_config, shape_of, with_overrides
from grpo_mcore.families.known import known_config
from grpo_mcore.recipe import DEFAULT, Finding, MasterConfig, Problem, Recipe, RecipeError, layout_findings, shown
from grpo_mcore.recipe.errors import leaf_values
from grpo_mcore.recipe.loading.load import recipe_folders
from grpo_mcore.recipe.validation.rules import check_rows, tables

Target = Literal["slurm", "k8s", "local"]

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
RESERVED_VARIABLES = re.compile(r"^(SLURM_|SBATCH_|RAY_|GRPO_MCORE_|CUDA_VISIBLE_DEVICES$)")
RESERVED_OPTIONS = ("nodes", "ntasks", "ntasks-per-node", "time", "signal", "export", "output")
K8S_NAME = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
K8S_VALUE = "[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
K8S_VALUES = {
    **dict.fromkeys(
        ("service_account", "volume_claim"), (K8S_NAME, "a Kubernetes name (lower-case letters, digits and -)")
    ),
    # These two are written into labels, too.
    "queue": (K8S_VALUE, "at most 63 letters, digits, -, _ and ."),
    "priority_class": ("[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", "at most 63 lower-case letters, digits, - and ."),
    "namespace": ("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a name of at most 63 lower-case letters, digits and -"),
    "gcs_redis_address": (r"(redis://)?[-\w.]+:\d+", "HOST:PORT"),
    "rdma_resource": (f"{K8S_NAME}/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?", '"DOMAIN/NAME" of a device plugin'),
    "volume_path": (r"/[^:]+", "an absolute folder without a colon"),
}
"""Pattern of each key of launch.k8s, and how a message describes it."""

RECIPE_FOLDER = "/etc/grpo-mcore"
"""Folder of the recipe, and of the texts that travel with it, in a pod."""

Check = Callable[[MasterConfig], Iterator[Finding]]


IMPORT = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)[:.][A-Za-z_]\w*")
READ_BY_NODES = re.compile(r"(^|\.)(model_name|data_path|tokenizer\.name)$")
"""Keys of models and data, which may be names on the hub or paths."""
TEXT_FILE = re.compile(r"(^|\.)(prompt_file|system_prompt_file|tokenizer\.chat_template)$")
"""Keys of text files; a chat template may also be its text."""
CONFIG_MAP_BYTES = 900_000
"""Kubernetes takes 1 MiB with the recipe and all names."""
MOUNT = re.compile(r"(?:/[^:,]*|tmpfs):(/[^:,]*)(:[\w+=-]+)?")
"""A mount of pyxis, whose flags are joined by +, such as ro+rprivate."""


def seconds(limit: str) -> int:
    """Return the seconds of "D-HH:MM:SS" or "HH:MM:SS"."""
    days, _, clock = limit.rpartition("-")
    hours, minutes, rest = clock.split(":")
    return ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(rest)


def validate(recipe: Recipe, target: Target) -> None:
    """Raise RecipeError with every finding for `target`, if there is any. Memory and time of the recipe's `launch` must
    be filled in."""
    findings = [finding for check in CHECKS[target] for finding in check(recipe.config)]
    findings += check_rows(tables()["launch"][target], recipe.config)
    if findings:
        raise RecipeError([_problem(finding, recipe) for finding in findings], shown(recipe.path))


def _problem(finding: Finding, recipe: Recipe) -> Problem:
    """Place a finding at the first of its keys that the recipe sets."""
    for key in finding.keys:
        source = recipe.provenance.get(key, DEFAULT)
        if source != DEFAULT:
            return Problem(source, key, finding.message)
    return Problem(shown(recipe.path), finding.keys[0], finding.message)


def _layouts(config: MasterConfig) -> Iterator[Finding]:
    """Layouts must fit the devices, and the model where it is known here; tensor-parallel groups must fit in a node."""
    name, gpu = config.policy.model_name, config.cluster.platform != "cpu"
    settings = read_hf_config(name) if (Path(name) / "config.json").is_file() else known_config(name)
    shape = shape_of(with_overrides(settings, config.policy.hf_config_overrides)) if settings else None
    yield from layout_findings(config, shape, gpu=gpu)
    gpus, size = config.cluster.gpus_per_node, config.policy.megatron_cfg.tensor_model_parallel_size
    if gpu and gpus % size:
        yield Finding(
            ("policy.megatron_cfg.tensor_model_parallel_size", "cluster.gpus_per_node"),
            f"cluster.gpus_per_node {gpus} is not a multiple of {size}: the policy's tensor-parallel groups would lie "
            "across nodes",
        )


def _time(config: MasterConfig) -> Iterator[Finding]:
    launch = config.launch
    assert launch.time_limit is not None
    limit, needed = seconds(launch.time_limit), launch.save_before_end_s + config.cluster.start_timeout_s
    if limit <= needed:
        yield Finding(
            ("launch.time_limit", "launch.save_before_end_s", "cluster.start_timeout_s"),
            f"{launch.time_limit} leaves no time to train: cluster.start_timeout_s and launch.save_before_end_s take "
            f"{needed:g} s of it",
        )


def _environment(config: MasterConfig) -> Iterator[Finding]:
    for name, text in config.cluster.env_vars.items():
        if text is not None and RESERVED_VARIABLES.match(name):
            yield Finding((f"cluster.env_vars.{name}",), "is set by the launcher itself")


def _mounts(config: MasterConfig) -> Iterator[Finding]:
    launch, expected = config.launch, '"FROM:TO" or "FROM:TO:ro", two absolute folders without commas'
    for text in launch.mounts:
        if not MOUNT.fullmatch(text):
            yield Finding(("launch.mounts",), f'expected {expected}, got "{text}"')


def code_files(paths: Sequence[str]) -> list[str]:
    """Return the files of launch.code. A folder stands for all files below it that are not hidden or compiled."""
    files: list[str] = []
    for path in map(Path, paths):
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        hidden = (".", "__pycache__")
        files += [
            file.as_posix() for file in below if file.is_file() and not any(p.startswith(hidden) for p in file.parts)
        ]
    return files


def own_modules(config: MasterConfig) -> dict[str, str]:
    """Return the modules in the working directory that the recipe names by import path, as key -> file."""
    modules = {}
    for parts, value in _values(config):
        path = IMPORT.fullmatch(value) if isinstance(value, str) else None
        if path is None or path[1].startswith("grpo_mcore."):
            continue
        if (file := Path(*path[1].split(".")).with_suffix(".py")).is_file():
            modules[".".join(parts)] = file.as_posix()
    return modules


def models_and_data(config: MasterConfig) -> dict[str, Path]:
    """Return the models and data that the recipe names by a path of this machine, as key -> absolute path. A path that
    several keys name is returned once."""
    paths: dict[str, Path] = {}
    for parts, value in _values(config):
        if not READ_BY_NODES.search(key := ".".join(parts)):
            continue
        if isinstance(value, str) and Path(value).exists() and Path(value).absolute() not in paths.values():
            paths[key] = Path(value).absolute()
    return paths


def text_files(config: MasterConfig) -> dict[tuple[str, ...], str]:
    """Return the recipe's prompt files and chat template that exist on this machine, as parts of the key -> path."""
    return {
        parts: name
        for parts, name in _values(config)
        if TEXT_FILE.search(".".join(parts)) and isinstance(name, str) and "{" not in name and Path(name).is_file()
    }


def _values(config: MasterConfig) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (parts of the key, value) of all that a job reads of its recipe."""
    return leaf_values(config.model_dump(exclude={"launch"}))


def is_below(name: str) -> bool:
    """Return whether a path is below the working directory, so that the file travels under its name."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def carried_texts(config: MasterConfig) -> dict[tuple[str, ...], Path]:
    """Return the text files that travel to Kubernetes, all but those on the volume, as parts of the key -> path."""
    files = {parts: Path(name) for parts, name in text_files(config).items()}
    return {parts: file for parts, file in files.items() if not file.is_relative_to(config.launch.k8s.volume_path)}


def _data_on_slurm(config: MasterConfig) -> Iterator[Finding]:
    """Check that nodes see the models, data and texts. A shipped prompt lies with the code and may be node-local."""
    targets = [mount[1] for text in config.launch.mounts if (mount := MOUNT.fullmatch(text))]
    shipped = [folder.absolute() for folder in recipe_folders()]
    texts = {".".join(parts): Path(name).absolute() for parts, name in text_files(config).items()}
    for key, path in (models_and_data(config) | texts).items():
        with_code = any(path.is_relative_to(folder) for folder in shipped)
        if not with_code and any(path.is_relative_to(local) for local in NODE_LOCAL):
            yield Finding((key,), f"{path} is on this node only; put it on the shared file system")
        elif config.launch.container and not any(path.is_relative_to(target) for target in targets):
            folder = path if path.is_dir() else path.parent
            yield Finding(
                (key, "launch.mounts"), f"the container does not see {path}: add {folder}:{folder} to launch.mounts"
            )


def _data_on_kubernetes(config: MasterConfig) -> Iterator[Finding]:
    """Check that models and data are on the volume: pods have only the image and the volume."""
    volume = config.launch.k8s.volume_path
    for key, path in models_and_data(config).items():
        if not path.is_relative_to(volume):
            yield Finding(
                (key,), f"{path} is on this machine only: copy it to the volume and name it there, {volume}/{path.name}"
            )


def _code(config: MasterConfig) -> Iterator[Finding]:
    """launch.code must exist below the working directory, so that its names are those by which it is imported."""
    for name in config.launch.code:
        if not is_below(name):
            yield Finding(("launch.code",), f"{name} is not below the working directory; start the launch where it is")
        elif not Path(name).exists():
            yield Finding(("launch.code",), f"there is no {name} in {Path.cwd()}")


def _folder_on_slurm(config: MasterConfig) -> Iterator[Finding]:
    """Check that the container sees the submitting folder, where a job runs and relative paths start."""
    launch, folder = config.launch, Path.cwd()
    if launch.container and not _mounted(PurePosixPath(folder), launch.mounts):
        keys = ("launch.mounts", "launch.container")
        yield Finding(keys, f"the job runs in {folder}, which the container must see and write: add {folder}:{folder}")


def _code_on_kubernetes(config: MasterConfig) -> Iterator[Finding]:
    """Check that code of the working directory travels: pods have only the image and the ConfigMap."""
    code, modules = config.launch.code, own_modules(config)
    for key, file in modules.items():
        if not any(Path(file).is_relative_to(name) for name in code):
            yield Finding((key,), f"{file} is on this machine only: let it travel with launch.code=[{file}]")
    sizes, texts = {}, {".".join(parts): path for parts, path in carried_texts(config).items()}
    for key, path in [*(("launch.code", Path(name)) for name in code_files(code)), *texts.items()]:
        try:
            sizes[str(path)] = len(path.read_text(encoding="utf-8").encode())
        except UnicodeDecodeError:
            yield Finding((key,), f"{path} is no UTF-8 text; convert it, or put it into the image or on the volume")
    if sum(sizes.values()) > CONFIG_MAP_BYTES:
        yield Finding(
            ("launch.code", *texts),
            f"{sum(sizes.values()) / 1e6:.1f} MB do not fit into a ConfigMap (1 MB); the largest is "
            f"{max(sizes, key=lambda file: sizes[file])}: put data into the image or on the volume",
        )


def split_option(option: str) -> tuple[str, str]:
    """Return name and value of a long option of sbatch, such as --qos=high, "--qos high" or '--comment="my run"'; the
    value is "" without one. Raises ValueError for anything else."""
    parts = re.fullmatch(r"--([a-z][a-z-]*)(?:[= ](.*))?", option)
    if parts is None or not option.isprintable():
        raise ValueError(f"expected one long option of sbatch, got {option!r}")
    value = parts[2] or ""
    if re.search(r"[\\'\"]", value):
        with suppress(ValueError):  # an apostrophe
            value = " ".join(shlex.split(value))
    return parts[1], value


def gpus_of(name: str, value: str) -> int | None:
    """Return the GPUs in each node that --gpus-per-node or --gres asks for, such as 8 of gpu:h100:8; None if it names
    none."""
    pattern = (
        r"(?:[\w.-]+:)?(\d+)"
        if name == "gpus-per-node"
        else r"(?:.*,)?gpu(?::[\w.-]*[A-Za-z][\w.-]*)?(?::(\d+))?(?:,.*)?"
    )
    if name not in ("gpus-per-node", "gres") or (count := re.fullmatch(pattern, value)) is None:
        return None
    return int(count[1] or 1)


LONGEST_SIGNAL_S = 65_535
"""The earliest signal before the time limit that sbatch accepts."""


def _slurm(config: MasterConfig) -> Iterator[Finding]:
    if config.launch.save_before_end_s > LONGEST_SIGNAL_S:
        yield Finding(("launch.save_before_end_s",), f"sbatch signals at most {LONGEST_SIGNAL_S} s before the limit")
    for name in config.cluster.env_vars:
        if {"*", "?"} & set(name):
            yield Finding(("cluster.env_vars",), f"{name}: sbatch takes names of variables only, no patterns")
    for option in config.launch.slurm.options:
        try:
            name, value = split_option(option)
        except ValueError as error:
            yield Finding(("launch.slurm.options",), str(error))
            continue
        gpus = gpus_of(name, value)
        if name in RESERVED_OPTIONS:
            yield Finding(("launch.slurm.options",), f"--{name} follows from the recipe; change the recipe instead")
        elif gpus != _gpus_per_node(config) and (gpus is not None or name == "gpus-per-node"):
            needed = f"the recipe asks for {_gpus_per_node(config)} GPUs in each node (cluster.gpus_per_node)"
            yield Finding(("launch.slurm.options",), f"--{name}={value}: {needed}")


def _gpus_per_node(config: MasterConfig) -> int:
    engines = config.policy.generation.colocated.resources.gpus_per_node or 0
    return 0 if config.cluster.platform == "cpu" else max(config.cluster.gpus_per_node, engines)


def _stage_on_slurm(config: MasterConfig) -> Iterator[Finding]:
    stage_to, launch = config.launch.stage_to, config.launch
    if stage_to and launch.container and not _mounted(PurePosixPath(stage_to), launch.mounts):
        yield Finding(
            ("launch.stage_to", "launch.mounts"),
            f"the container does not see {stage_to}: add {stage_to}:{stage_to} to launch.mounts",
        )


def _shared_on_slurm(config: MasterConfig) -> Iterator[Finding]:
    """Every node must see the checkpoint folder: a restarted job may run on other nodes."""
    save, launch = config.checkpointing, config.launch
    folder = PurePosixPath(save.checkpoint_dir)
    if not save.enabled:
        return
    keys = ("checkpointing.checkpoint_dir", "launch.mounts")
    if any(folder.is_relative_to(local) for local in NODE_LOCAL):
        yield Finding(keys, f"{folder} is on one node only; choose a folder of the shared file system")
    elif launch.container and folder.is_absolute() and not _mounted(folder, launch.mounts):
        yield Finding(keys, f"{folder} is inside the container and gone with it; mount a shared folder there")


def _mounted(folder: PurePosixPath, mounts: list[str]) -> bool:
    parts = (text.split(":") for text in mounts)
    return any(
        len(part) > 1 and folder.is_relative_to(part[1]) and "ro" not in "".join(part[2:]).split("+") for part in parts
    )


def _image(config: MasterConfig) -> Iterator[Finding]:
    image, key = config.launch.container, ("launch.container",)
    if not image:
        yield Finding(key, "Kubernetes needs an image: launch.container=REGISTRY/NAME:TAG (see the Dockerfile)")
    elif "@sha256:" not in image and (":" not in image.rpartition("/")[2] or image.endswith(":latest")):
        yield Finding(key, f"{image} may be another image after a restart; give a tag other than latest, or a digest")
    elif image.endswith((".sqsh", ".sif")):
        yield Finding(key, f"{image!r} is not the name of an image in a registry")


def _kubernetes(config: MasterConfig) -> Iterator[Finding]:
    """Check values that the API server accepts inside a RayJob and that would fail later, when its pods are created."""
    k8s = config.launch.k8s
    for key, (pattern, expected) in K8S_VALUES.items():
        value = getattr(k8s, key)
        if value is not None and not re.fullmatch(pattern, value):
            yield Finding((f"launch.k8s.{key}",), f"expected {expected}, got {value!r}")
    for name in k8s.secrets:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or RESERVED_VARIABLES.match(name):
            yield Finding(("launch.k8s.secrets",), f"{name} is no variable that a secret may set")
    stage_to = config.launch.stage_to
    if stage_to and not any(PurePosixPath(stage_to).is_relative_to(path) for path in k8s.volumes):
        yield Finding(
            ("launch.stage_to", "launch.k8s.volumes"),
            f"{stage_to} is on no volume: add launch.k8s.volumes={{{stage_to}: {{hostPath: {{path: {stage_to}}}}}}}",
        )
    secrets = {f"secrets.{name}": reference for name, reference in k8s.secrets.items()}
    secrets |= {"gcs_redis_secret": k8s.gcs_redis_secret} if k8s.gcs_redis_secret else {}
    for key, reference in secrets.items():
        if not re.fullmatch(rf"{K8S_NAME}/[-._a-zA-Z0-9]+", reference):
            yield Finding((f"launch.k8s.{key}",), 'expected "SECRET/KEY", the place of the value and not the value')


def _claim(config: MasterConfig) -> Iterator[Finding]:
    """Pods keep nothing: checkpoints and logs must be on a volume that all pods see."""
    k8s, save = config.launch.k8s, config.checkpointing
    keys = ("launch.k8s.volume_claim", "checkpointing.checkpoint_dir", "cluster.num_nodes")
    if k8s.volume_claim is None and (save.enabled or config.cluster.num_nodes > 1):
        yield Finding(
            keys,
            "checkpoints, logs and several nodes need a volume that all pods see: "
            "launch.k8s.volume_claim=NAME of a ReadWriteMany claim",
        )
    folder = PurePosixPath(save.checkpoint_dir)
    if save.enabled and folder.is_absolute() and not folder.is_relative_to(k8s.volume_path):
        yield Finding(keys[1:2], f"{folder} is not on the shared volume at launch.k8s.volume_path {k8s.volume_path}")


def _memory(config: MasterConfig) -> Iterator[Finding]:
    launch = config.launch
    assert launch.memory_gb_per_node is not None
    if launch.k8s.shm_gb * 2 > launch.memory_gb_per_node:
        yield Finding(
            ("launch.k8s.shm_gb", "launch.memory_gb_per_node"),
            f"/dev/shm of {launch.k8s.shm_gb} GiB counts as memory of the pod and takes more than half of "
            f"launch.memory_gb_per_node {launch.memory_gb_per_node}",
        )


_COMMON: tuple[Check, ...] = (_layouts, _time, _environment, _mounts, _code)
CHECKS: dict[Target, tuple[Check, ...]] = {
    "slurm": (*_COMMON, _slurm, _stage_on_slurm, _shared_on_slurm, _folder_on_slurm, _data_on_slurm),
    "k8s": (*_COMMON, _image, _kubernetes, _claim, _memory, _code_on_kubernetes, _data_on_kubernetes),
    "local": (_environment,),
}
