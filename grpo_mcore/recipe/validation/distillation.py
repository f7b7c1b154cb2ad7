"""Rules of distillation: which teachers there are, their layouts, and the options that fit their advantage."""

from collections.abc import Iterator

from pydantic import ValidationError

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import (
    compares_distributions,
    nodes_left,
    teacher_copies,
    teacher_findings,
    teacher_settings,
)
from grpo_mcore.recipe.errors import nearest_hint
from grpo_mcore.recipe.schema.keys import nearest_key
from grpo_mcore.recipe.schema.master import RecipeSections, algorithm_of
from grpo_mcore.recipe.schema.megatron import MegatronConfig
from grpo_mcore.recipe.validation.rules import engine_argument_findings, tables

_AT = "on_policy_distillation."
_ESTIMATOR = "grpo.adv_estimator."


def check_teachers(config: RecipeSections) -> Iterator[Finding]:
    """Teachers must exist where the advantage needs their log-probs, and must be used where they exist."""
    section, estimator = config.on_policy_distillation, config.grpo.adv_estimator
    names = section.teacher_model_by_agent_name
    given_answers = algorithm_of(config) == "sft"
    needed = estimator.name == "opd" or estimator.opd_weight > 0 or given_answers
    if needed and not section.enabled and not given_answers:
        key = "name" if estimator.name == "opd" else "opd_weight"
        yield Finding(
            (_ESTIMATOR + key, _AT + "enabled"),
            "needs a teacher: set on_policy_distillation.enabled: true and teacher_model_by_agent_name",
        )
    if not section.enabled:
        for position, entry in enumerate(config.data.train):
            if entry.hint_key is not None:
                yield Finding((f"data.train.{position}.hint_key",), "is for teachers of on_policy_distillation alone")
        return
    if not needed:
        yield Finding(
            (_AT + "enabled", _ESTIMATOR + "name"),
            "has no effect without grpo.adv_estimator.name: opd, or opd_weight above 0 with another estimator",
        )
    if not names:
        yield Finding((_AT + "teacher_model_by_agent_name", _AT + "enabled"), "names no teacher: {alias: model}")
    default = section.default_teacher_alias
    if default is not None and default not in names:
        yield Finding(
            (_AT + "default_teacher_alias",), f"{default!r} is not a teacher{nearest_hint(default, list(names))}"
        )
    if default is None and len(names) > 1 and not section.strict_agent_name_match:
        yield Finding(
            (_AT + "default_teacher_alias", _AT + "teacher_model_by_agent_name"),
            f"is needed with {len(names)} teachers; or set strict_agent_name_match: true",
        )
    if given_answers:
        if not section.divergence.enabled or len(names) > 1:
            message = "answers of the data are compared over the whole vocabulary, with one teacher; set it to true"
            yield Finding((_AT + "divergence.enabled", _AT + "enabled"), message)
    elif section.divergence.enabled and (estimator.name != "opd" or section.use_orm_advantage or len(names) > 1):
        yield Finding(
            (_AT + "divergence.enabled", _ESTIMATOR + "name", _AT + "use_orm_advantage"),
            "is a loss of its own, with one teacher: it needs grpo.adv_estimator.name: opd without use_orm_advantage",
        )
    places = section.non_colocated_teachers
    for alias in places.teacher_overrides:
        if alias not in names:
            yield Finding(
                (f"{_AT}non_colocated_teachers.teacher_overrides.{alias}",),
                f"{alias!r} is not a teacher{nearest_hint(alias, list(names))}",
            )
    yield from _layouts(config)


def _layouts(config: RecipeSections) -> Iterator[Finding]:
    """Teachers must have keys of policy.megatron_cfg, and fit the devices."""
    places = config.on_policy_distillation.non_colocated_teachers
    configs = [("default_teacher_cfg", places.default_teacher_cfg)]
    configs += [(f"teacher_overrides.{alias}", teacher) for alias, teacher in places.teacher_overrides.items()]
    wrong = False
    for key, teacher in configs:
        try:
            MegatronConfig.model_validate(config.policy.megatron_cfg.model_dump() | teacher.megatron_cfg_overrides)
        except ValidationError as error:
            wrong = True
            for problem in error.errors(include_url=False):
                message = f"{problem['msg']}, got {problem['input']!r}"
                if problem["type"] == "extra_forbidden":
                    near = nearest_key(f"policy.megatron_cfg.{problem['loc'][0]}")
                    hint = f"; nearest: {near.rpartition('.')[2]}" if near else ""
                    message = f"is not a key of policy.megatron_cfg{hint}"
                path = ".".join([key, "megatron_cfg_overrides", *map(str, problem["loc"])])
                yield Finding((f"{_AT}non_colocated_teachers.{path}",), message)
    if wrong:
        return
    if (left := nodes_left(config)) < 1:
        taken = config.cluster.num_nodes - left
        message = f"teachers take {taken} of {config.cluster.num_nodes} nodes, and the policy needs at least one"
        yield Finding((f"{_AT}non_colocated_teachers.enabled", "cluster.num_nodes"), message)
        return
    unfit = list(_engines(config))
    yield from unfit
    for alias in () if unfit else dict.fromkeys(teacher_copies(config).values()):
        for finding in teacher_findings(config, alias):
            keys = (_place(config, alias), f"{_AT}teacher_model_by_agent_name.{alias}")
            whose = "the teacher" if alias == "teacher" else f"the teacher {alias}"  # as a section `teacher` is called
            yield Finding(keys, f"{whose}: {finding.message}")


def _place(config: RecipeSections, alias: str, name: str = "") -> str:
    """Return the key of a teacher's layout, or of the value `name` in it: in its own override if that sets it, else in
    the default."""
    override = config.on_policy_distillation.non_colocated_teachers.teacher_overrides.get(alias)
    ours = override is not None and (not name or name in override.model_fields_set)
    section = f"{_AT}non_colocated_teachers." + (f"teacher_overrides.{alias}" if ours else "default_teacher_cfg")
    return f"{section}.{name}" if name else section


def _engines(config: RecipeSections) -> Iterator[Finding]:
    """A vllm teacher must only score sampled tokens, under the whole distribution, with a layout that vLLM has."""
    generation = config.policy.generation
    for alias, settings in teacher_settings(config).items():
        backend = _place(config, alias, "backend")
        if settings.backend == "megatron":
            for name in ("gpu_memory_utilization", "vllm_kwargs"):
                key = _place(config, alias, name)
                if settings[name] and key.rpartition(".")[0] == backend.rpartition(".")[0]:
                    yield Finding((key, backend), "is for engines: set backend: vllm")
            continue
        if compares_distributions(config):
            message = "vllm scores sampled tokens alone, and a divergence needs hidden states; set it to megatron"
            yield Finding((backend, _AT + "divergence.enabled"), message)
        for name in ("top_k", "top_p"):
            if generation[name] not in (None, 1.0):
                key = f"policy.generation.{name}"
                message = f"vllm scores under the whole distribution, which {key} cuts; set it to megatron"
                yield Finding((backend, key), message)
        for name in ("context_parallel_size", "expert_tensor_parallel_size"):
            if (settings[name] or 1) > 1:
                yield Finding(
                    (_place(config, alias, name), backend), "an engine of vllm has no such ranks; set it to 1"
                )
        megatron = _place(config, alias, "megatron_cfg_overrides")
        if settings.megatron_cfg_overrides and megatron.rpartition(".")[0] == backend.rpartition(".")[0]:
            yield Finding((megatron, backend), "is not for engines; see vllm_kwargs")
        tensor = settings.tensor_model_parallel_size or generation.vllm_cfg.tensor_parallel_size
        experts = settings.expert_model_parallel_size or generation.vllm_cfg.expert_parallel_size
        if experts not in (1, tensor):
            message = f"{experts} is neither 1 nor the {tensor} tensor-parallel ranks that share an engine's experts"
            yield Finding((_place(config, alias, "expert_model_parallel_size"), backend), message)
        section, decided = _place(config, alias, "vllm_kwargs"), tables()["decided"]
        yield from engine_argument_findings(settings.vllm_kwargs, section, tables()["teacher_set_by"], decided)
        hinted = [number for number, entry in enumerate(config.data.train) if entry.hint_key is not None]
        if hinted and "max_model_len" not in settings.vllm_kwargs:
            message = "with a hint an engine must know the longest prompt with its answer: {max_model_len: TOKENS}"
            yield Finding((_place(config, alias, "vllm_kwargs"), f"data.train.{hinted[0]}.hint_key"), message)
