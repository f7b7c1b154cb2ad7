"""The teachers of a run: models that score the policy's samples, token by token, and do not train.

Each has ranks, a layout and a size of its own, or is vLLM engines. It has nodes to itself, or shares the policy's
devices in turns: its weights are then on the device only while it scores. It holds no state, so one that is lost is
started again and scores the same samples.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor

from grpo_mcore.batching.prefix_trees import prefix_sketch
from grpo_mcore.cluster import BackgroundWork, is_fault
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.driver.policy.teacher_engines import TeacherEngines
from grpo_mcore.recipe import MasterConfig, OnPolicyDistillationConfig
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.trajectory import TrajectoryRef
from grpo_mcore.rollout.workers import Ref
from grpo_mcore.step.step_batch import RankStep, StepBatch, prompt_prefixes, rank_steps

logger = logging.getLogger(__name__)


class TeacherError(ValueError):
    """A prompt without a teacher."""


def teacher_name(alias: str) -> str:
    """Return what the names of a teacher's workers begin with."""
    return f"teacher-{re.sub(r'[^A-Za-z0-9_.]', '_', alias)}"


def teacher_alias(config: OnPolicyDistillationConfig, prompt: DatumSpec) -> str:
    """Return the alias of a prompt's teacher: its agent's or its task's name, or the default. Raises TeacherError,
    naming the prompt, if there is none."""
    aliases, names = config.teacher_model_by_agent_name, _names_of(prompt)
    for name in names:
        if name in aliases:
            return name
    if config.strict_agent_name_match:
        raise TeacherError(
            f"prompt {prompt['uid']}: {' and '.join(map(repr, names))} is no alias of a teacher "
            f"({', '.join(aliases)}), and on_policy_distillation.strict_agent_name_match is true"
        )
    return config.default_teacher_alias or next(iter(aliases))


def _names_of(prompt: DatumSpec) -> list[str]:
    """Return the names by which a prompt may choose its teacher: of its NeMo Gym agent, if it has one, and its task."""
    agent = prompt["extra_env_info"].get("agent_ref")
    return [*([agent["name"]] if isinstance(agent, dict) and "name" in agent else []), prompt["task_name"]]


def check_aliases(config: OnPolicyDistillationConfig, prompts: Sequence[DatumSpec]) -> None:
    """Warn of teachers that none of these prompts would have. Raises TeacherError for a prompt without a teacher."""
    used = {teacher_alias(config, prompt) for prompt in prompts}
    if unused := [alias for alias in config.teacher_model_by_agent_name if alias not in used]:
        known = list(dict.fromkeys(name for prompt in prompts for name in _names_of(prompt)))
        logger.warning(
            "on_policy_distillation.teacher_model_by_agent_name: none of the first %d prompts has the teacher %s; "
            "their agents and tasks are %s",
            len(prompts), " or ".join(unused), ", ".join(known),
        )  # fmt: skip


@dataclass
class Teacher:
    """One teacher. `config`: the recipe with the teacher in place of the policy. `start`: spawns its ranks or engines,
    and returns them when they are ready. `ranks`: the ones that run."""

    alias: str
    config: MasterConfig
    start: Callable[[], PolicyGroup | TeacherEngines]
    ranks: PolicyGroup | TeacherEngines
    restarts: Retries = field(default_factory=lambda: Retries(0, 0.0))

    def score(
        self,
        samples: Mapping[int, TrajectoryRef],
        background: BackgroundWork | None = None,
        prompts: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> dict[int, Ref]:
        """Return references to what `PolicyWorker.score` says of each sample, by index in the step: log-probs, or
        hidden states for a loss over whole distributions. `prompts`: other prompts than the policy's, after which the
        teacher reads samples, by index. Ranks that are lost meanwhile are started again. Raises their error if that
        fails too often."""
        while True:
            ranks = self.ranks
            try:
                if isinstance(ranks, TeacherEngines):
                    scored = ranks.score(samples, prompts, background)
                else:
                    steps = teacher_steps(samples, self.config, ranks, prompts)
                    with ranks.run_alongside(background):
                        ranks.onload()
                        scored = ranks.score(steps, self.config.on_policy_distillation.divergence.enabled)
                        ranks.offload()
            except Exception as error:
                if not is_fault(error):
                    raise
                self.restarts.failed(error)
                logger.warning("the teacher %s is lost and starts again: %s", self.alias, str(error).partition("\n")[0])
                ranks.cluster.stop(ranks.workers)
                self.ranks = self.start()
                continue
            self.restarts.reset()
            return {index: scored[index] for index in samples}


@dataclass
class Teachers:
    """All teachers of a run by alias; aliases of one model and layout share a Teacher."""

    config: OnPolicyDistillationConfig
    by_alias: Mapping[str, Teacher]

    @property
    def colocated(self) -> bool:
        """Whether they share the policy's devices, so that it must make room for them."""
        return any(teacher.ranks.offloads for teacher in self.by_alias.values())

    def alias_of(self, prompt: DatumSpec) -> str:
        return teacher_alias(self.config, prompt)

    def aliases(self, batch: StepBatch) -> list[str]:
        """Return the alias of each sample's teacher, by index in the step."""
        return [self.alias_of(group.prompt) for group in batch.groups for _ in group.samples]

    def score(self, batch: StepBatch, background: BackgroundWork | None = None) -> StepBatch:
        """Return the step with references to what the teachers say of its samples."""
        aliases = self.aliases(batch)
        prompts = [group.prompt for group in batch.groups for _ in group.samples]
        ranks = self.score_ranks(batch.ranks, batch.samples, prompts, aliases, background)
        return replace(batch, ranks=ranks, teachers=tuple(aliases))

    def score_ranks(
        self,
        ranks: Sequence[RankStep],
        samples: Sequence[TrajectoryRef],
        prompts: Sequence[DatumSpec],
        aliases: Sequence[str],
        background: BackgroundWork | None = None,
    ) -> tuple[RankStep, ...]:
        """Return the ranks' shares of a step with references to what the teachers say of their samples. `samples`,
        `prompts`, `aliases`: each sample of the step, its prompt, and the alias of its teacher, by index in the
        step."""
        hints = {i: prompt["teacher_prompt"] for i, prompt in enumerate(prompts) if "teacher_prompt" in prompt}
        indices = sorted(index for rank in ranks for index in rank.trajectories)
        scored: dict[int, Ref] = {}
        for teacher in {id(teacher): teacher for teacher in self.by_alias.values()}.values():
            of_teacher = {i: samples[i] for i in indices if self.by_alias[aliases[i]] is teacher}
            if of_teacher:
                scored |= teacher.score(of_teacher, background, {i: hints[i] for i in of_teacher if i in hints})
        return tuple(replace(rank, teacher={index: scored[index] for index in rank.trajectories}) for rank in ranks)


def teacher_steps(
    samples: Mapping[int, TrajectoryRef],
    config: MasterConfig,
    ranks: PolicyGroup,
    prompts: Mapping[int, Tensor] = MappingProxyType({}),
) -> Sequence[RankStep]:
    """Distribute samples, by index in the step, over the teacher's data-parallel ranks and bins. Where they are fewer
    than these, copies of the first one, under indices of their own, fill the ranks. `prompts`: by index, those that
    take the place of samples' own. A bin holds at least the longest sample, also with its hint."""
    indices = list(samples)
    kept = [_after(prompts[index], sample) if index in prompts else sample for index, sample in samples.items()]
    missing = max(0, ranks.layout.data - len(kept))
    copies = range(max(indices) + 1, max(indices) + 1 + missing)
    hints = dict(prompts)
    if indices[0] in hints:
        hints |= dict.fromkeys(copies, hints[indices[0]])
    indices += copies
    kept += kept[:1] * missing
    config = _with_room(config, max(sample.length for sample in kept))
    _, steps = rank_steps(
        {index: sample.ref for index, sample in zip(indices, kept, strict=True)},
        [sample.length for sample in kept],
        config,
        ranks.layout,
        optimizer_steps=1,
        prefixes=prompt_prefixes(kept) if ranks.shares_prefixes else None,
    )
    return [replace(step, prompts={i: hints[i] for i in step.trajectories if i in hints}) for step in steps]


def _after(prompt: Tensor, sample: TrajectoryRef) -> TrajectoryRef:
    """Return a sample as it is after another prompt."""
    length = sample.length - sample.prompt_length + len(prompt)
    sketch = prefix_sketch(prompt.tolist())
    return replace(sample, length=length, prompt_length=len(prompt), prompt_sketch=sketch)


def _with_room(config: MasterConfig, tokens: int) -> MasterConfig:
    """Return the recipe with room for a sample of this many tokens in a bin."""
    changes = {
        name: config.policy[name].model_copy(update={"train_mb_tokens": tokens})
        for name in ("sequence_packing", "dynamic_batching")
        if config.policy[name].enabled and config.policy[name].train_mb_tokens < tokens
    }
    return config.model_copy(update={"policy": config.policy.model_copy(update=changes)}) if changes else config
