"""Converts a distillation in NeMo RL's form to a recipe. `distillation` becomes `grpo`, or with `on_policy: false`
`sft`; `teacher`, a whole policy section, and the divergence in `loss_fn` become `on_policy_distillation`."""

from grpo_mcore.recipe.errors import Problem, in_yaml, joined, nearest_hint
from grpo_mcore.recipe.nemo_rl.nemo_rl_keys import without_nemo_rl_keys
from grpo_mcore.recipe.schema.distillation import DivergenceConfig, TeacherConfig
from grpo_mcore.recipe.schema.fine_tuning import SFTConfig
from grpo_mcore.recipe.schema.grpo import GRPOConfig
from grpo_mcore.recipe.schema.policy import PolicyConfig
from grpo_mcore.recipe.yaml_tree import Node

ALIAS = "teacher"
"""Alias of the only teacher."""
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
          "expert_model_parallel_size", "expert_tensor_parallel_size")  # fmt: skip
_OF_TRAINING = {"enabled", "optimizer", "scheduler", "distributed_data_parallel_config", "peft"}


def distillation_layout(tree: Node, problems: list[Problem], notes: list[Problem]) -> Node:
    """Return the tree with the keys of `distillation`, `teacher` and `loss_fn` moved to their places in our recipes.
    `notes` gets a line for each. A tree without `distillation` stays as it is."""
    section = tree.value.get("distillation")
    if section is None or not section.is_mapping:
        return tree
    value = {name: node for name, node in tree.value.items() if name != "distillation"}
    settings, teacher = dict(section.value), value.pop("teacher", None)
    on_policy = settings.pop("on_policy", Node(True, section.source, "distillation.on_policy"))
    if not isinstance(on_policy.value, bool):
        message = f"expected true or false, got {in_yaml(on_policy.plain())}"
        problems.append(on_policy.problem(message))
    divergence = {"enabled": Node(True, section.source, "distillation")}
    if (top_k := settings.pop("topk_logits_k", None)) is not None:
        divergence["topk_logits_k"] = top_k
    if (loss := value.get("loss_fn")) is not None and loss.is_mapping:
        names = set(loss.value) & set(DivergenceConfig.model_fields)
        divergence |= {name: loss.value[name] for name in names}
        rest = {name: node for name, node in loss.value.items() if name not in names}
        value["loss_fn"] = loss.having(rest)
    notes += [_used(node, f"on_policy_distillation.divergence.{name}") for name, node in divergence.items()][1:]
    if on_policy.value is False:
        value.pop("grpo", None)
        for name in set(settings) & set(GRPOConfig.model_fields) - set(SFTConfig.model_fields):
            node = settings.pop(name)
            notes.append(node.problem("dropped: the answers are those of the data"))
        notes += [_used(node, f"sft.{name}") for name, node in settings.items()]
        into_section(value, "sft", settings, section, problems)
    else:
        notes += [_used(node, f"grpo.{name}") for name, node in settings.items()]
        settings.setdefault("adv_estimator", Node.of({"name": "opd"}, section.source, "distillation"))
        into_section(value, "grpo", settings, section, problems)
    teaching = {
        "enabled": Node(True, section.source, "distillation"),
        "divergence": Node(divergence, section.source, "distillation"),
    }
    if teacher is not None and teacher.is_mapping:
        if (switch := tree.find("policy.dtensor_as_megatron")) is not None:
            teacher = teacher.having({"dtensor_as_megatron": switch} | teacher.value)
        teaching |= _teacher(teacher, problems, notes)
    into_section(value, "on_policy_distillation", teaching, section, problems)
    return tree.having(value)


def _used(node: Node, key: str) -> Problem:
    return node.problem(f"used as {key}")


def into_section(
    sections: dict[str, Node], name: str, values: dict[str, Node], written: Node, problems: list[Problem]
) -> None:
    """Add values to a section of the recipe, which may hold some of them already."""
    present = sections.get(name)
    known = dict(present.value) if present is not None and present.is_mapping else {}
    for key, node in values.items():
        if key in known and known[key].plain() != node.plain():
            message = f"contradicts {known[key].key} = {in_yaml(known[key].plain())} ({known[key].source})"
            problems.append(node.problem(message))
    sections[name] = Node({**known, **values}, written.source, name)


def _teacher(policy: Node, problems: list[Problem], notes: list[Problem]) -> dict[str, Node]:
    """Return the keys of `on_policy_distillation` that name the teacher and its layout, made of its section
    `policy`."""
    policy = without_nemo_rl_keys(Node({"policy": policy}, policy.source, ""), problems, notes).value["policy"]
    layout, megatron = dict[str, Node](), policy.value.get("megatron_cfg")
    if megatron is not None and megatron.is_mapping:
        settings = {name: node for name, node in megatron.value.items() if name not in _OF_TRAINING}
        layout |= {name: settings.pop(name) for name in _SIZES if name in settings}
        layout["megatron_cfg_overrides"] = megatron.having(settings)
    for key, node in policy.children():
        if key not in PolicyConfig.model_fields:
            hint = nearest_hint(key, list(PolicyConfig.model_fields))
            problems.append(node.problem(f"unknown key of a teacher{hint}"))
        elif key == "hf_config_overrides" and node.value:
            problems.append(node.problem("not supported for a teacher; change its config.json"))
        elif key == "logprob_batch_size":
            layout["micro_batch_size"] = node
        elif key in TeacherConfig.model_fields:
            layout[key] = node
        elif key not in ("model_name", "megatron_cfg", "hf_config_overrides", "dtensor_as_megatron"):
            notes.append(node.problem("dropped: a teacher reads the policy's samples, and no more"))
    if (model := policy.value.get("model_name")) is None or model.value is None:
        problems.append(Problem(policy.source, joined(policy.key, "model_name"), "this key is required"))
        return {}
    notes += [
        _used(model, f"on_policy_distillation.teacher_model_by_agent_name.{ALIAS}"),
        *(
            _used(node, f"on_policy_distillation.non_colocated_teachers.default_teacher_cfg.{name}")
            for name, node in layout.items()
        ),
    ]
    places = policy.having({"default_teacher_cfg": policy.having(layout)})
    models = policy.having({ALIAS: model})
    return {"teacher_model_by_agent_name": models, "non_colocated_teachers": places}
