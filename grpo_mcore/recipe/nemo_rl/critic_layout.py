"""Reads `ppo`, `value` and `rm`: keys that PPO shares with GRPO go to the section `grpo`, what the section of the
critic does not say is as in `policy`, and a reward model has a head of one output."""

from collections.abc import Collection

from grpo_mcore.recipe.errors import Problem
from grpo_mcore.recipe.nemo_rl.distillation_layout import into_section
from grpo_mcore.recipe.nemo_rl.nemo_rl_keys import without_nemo_rl_keys
from grpo_mcore.recipe.schema.grpo import GRPOConfig
from grpo_mcore.recipe.schema.ppo import PPOConfig
from grpo_mcore.recipe.yaml_tree import Node

OF_POLICY_ALONE = ("generation", "router_replay", "refit_buffer_size_gb", "refit_verify", "refit_parity")
"""Keys of `policy` that are not the critic's."""
NO_EFFECT = ("warmup_generation_lead_steps", "drop_incomplete_targets_on_restore")


def ppo_layout(tree: Node, problems: list[Problem], notes: list[Problem]) -> Node:
    """Return the tree with the keys of `ppo` that are GRPO's in the section `grpo`. A section `ppo` is enabled unless
    it says otherwise. `notes` gets a line for each key that moves."""
    section = tree.value.get("ppo")
    if section is None or not section.is_mapping:
        return tree
    value, own, moved = dict(tree.value), dict(section.value), dict[str, Node]()
    for name in [name for name in own if name not in PPOConfig.model_fields]:
        target = "async_grpo" if name == "async_ppo" else name
        if target in GRPOConfig.model_fields:
            node = own.pop(name)
            if name == "async_ppo" and node.is_mapping:
                node = _without(node, NO_EFFECT, notes)
            moved[target] = node
            notes.append(node.problem(f"used as grpo.{target}"))
    own.setdefault("enabled", Node(True, section.source, "ppo"))
    value["ppo"] = section.having(own)
    if moved:
        into_section(value, "grpo", moved, section, problems)
    return tree.having(value)


def value_layout(tree: Node, problems: list[Problem], notes: list[Problem]) -> Node:
    """Return the tree with a whole policy as the section `value`: that of `policy` with what the recipe says of the
    critic in place of its own. A recipe with `ppo` need not have the section."""
    ppo, policy, section = tree.find("ppo.enabled"), tree.value.get("policy"), tree.value.get("value")
    if policy is None or not policy.is_mapping:
        return tree
    if section is None or section.value is None:
        if ppo is None or ppo.value is not True:
            return tree
        section = Node({}, ppo.source, "value")
    if not section.is_mapping:
        return tree
    shadow = Node({"policy": section}, section.source, "")
    section = without_nemo_rl_keys(shadow, problems, notes).value["policy"]
    base = policy.having({name: node for name, node in policy.value.items() if name not in OF_POLICY_ALONE})
    section = _without(section, ("head", *OF_POLICY_ALONE), notes)
    if (megatron := section.value.get("megatron_cfg")) is not None and megatron.is_mapping:
        section.value["megatron_cfg"] = _without(megatron, ("env_vars",), notes)
    whole = _over(base, section)
    whole.value["head"] = Node("value", section.source, "value.head")
    if (own := whole.value.get("model_name")) is not None and own.value is None and "model_name" in policy.value:
        whole.value["model_name"] = policy.value["model_name"]
    return tree.having({**tree.value, "value": whole})


def rm_layout(tree: Node, problems: list[Problem], notes: list[Problem]) -> Node:
    """Return the tree of a recipe that trains a reward model (`algorithm_of`) with a head of one output for the policy,
    and NeMo RL's `policy.reward_model_cfg` in the section `rm`."""
    rm, policy = tree.value.get("rm"), tree.value.get("policy")
    other = {"grpo", "dpo"} & tree.value.keys()
    if other or rm is None or not rm.is_mapping or policy is None or not policy.is_mapping:
        return tree
    value, settings = dict(tree.value), {**policy.value, "head": Node("value", rm.source, "policy.head")}
    theirs = settings.pop("reward_model_cfg", None)
    if theirs is not None and theirs.is_mapping:
        for name, node in theirs.value.items():
            if name == "reward_model_type":
                into_section(value, "rm", {name: node}, rm, problems)
                notes.append(node.problem("used as rm.reward_model_type"))
            elif name != "enabled" or node.value is not True:
                problems.append(node.problem("only enabled: true and reward_model_type go with a section rm"))
    return tree.having({**value, "policy": policy.having(settings)})


def _without(section: Node, names: Collection[str], notes: list[Problem]) -> Node:
    """Return a section without keys that have no effect in it. `notes` gets a line for each."""
    notes += [node.problem("dropped: it has no effect here") for name, node in section.value.items() if name in names]
    return section.having({name: node for name, node in section.value.items() if name not in names})


def _over(base: Node, top: Node) -> Node:
    """Return a copy of `base` with the values of `top` in place of its own, mappings merged."""
    merged = dict(base.copy().value)
    for name, node in top.value.items():
        below = merged.get(name)
        both = below is not None and below.is_mapping and node.is_mapping
        merged[name] = _over(below, node) if below is not None and both else node
    return top.having(merged)
