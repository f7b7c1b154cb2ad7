"""NeMo Gym in a recipe: switches that stand between the environments, and what a Gym needs of the engines."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mcore.recipe.errors import Finding, Problem, in_yaml
from grpo_mcore.recipe.master import MasterConfig
from grpo_mcore.recipe.yaml_tree import Node

GYM = "nemo_gym"
ANY_INTERFACE = ("0.0.0.0", "::", "*", "")
_VLLM = "policy.generation.vllm_cfg."
_KWARGS = _VLLM + "http_server_serving_chat_kwargs."


def normalise(tree: Node, problems: list[Problem]) -> Node:
    """The tree without NeMo RL's switches in `env`, done as they say. Applying it twice changes nothing.

    should_use_nemo_gym: true, then datasets that name no environment themselves are the Gym's; false, then there is no
    Gym.
    """
    env = tree.find("env")
    if env is None or not env.is_mapping:
        return tree
    sections = dict(env.value)
    use = sections.pop("should_use_nemo_gym", None)
    sections.pop("should_log_nemo_gym_responses", None)
    mask = sections.pop("should_mask_flagged_samples", None)
    if mask is not None and mask.value is False:
        problems.append(Problem(mask.source, mask.key, "samples that the Gym flags (mask_sample) are always left out"))
    tree = Node({**tree.value, "env": Node(sections, env.source, env.key, env.replaces)}, tree.source, tree.key)
    if use is None:
        return tree
    if not isinstance(use.value, bool):
        problems.append(Problem(use.source, use.key, f"expected true or false, got {in_yaml(use.plain())}"))
    elif not use.value:
        sections.pop(GYM, None)
    elif GYM not in sections:
        problems.append(Problem(use.source, use.key, f"there is no section env.{GYM}; give its head_server_url"))
    elif (data := tree.find("data")) is not None and data.is_mapping and "env_name" not in data.value:
        default = data.value.get("default")
        kept = default.value if default is not None and default.is_mapping else {}
        name = Node(GYM, use.source, "data.default.env_name")
        data = Node(
            {**data.value, "default": Node({**kept, "env_name": name}, data.source, "data.default")},
            data.source,
            data.key,
            data.replaces,
        )
        tree = Node({**tree.value, "data": data}, tree.source, tree.key)
    return tree


def check_endpoint(config: MasterConfig) -> Iterator[Finding]:
    """The endpoint's keys; and a Gym's agents ask it, so it must be there and sample as training has it."""
    generation = config.policy.generation
    vllm = generation.vllm_cfg
    kwargs = vllm.http_server_serving_chat_kwargs
    if vllm.http_server_host in ANY_INTERFACE:
        yield Finding(
            (_VLLM + "http_server_host",),
            "the endpoint listens on one interface; name its address, or leave it null for the cluster's",
        )
    if kwargs.enable_auto_tools != (kwargs.tool_parser is not None):
        yield Finding(
            (_KWARGS + "tool_parser", _KWARGS + "enable_auto_tools"),
            "calls are read where both are set: enable_auto_tools: true and a tool_parser, such as hermes",
        )
    gyms = [name for name, section in config.env.items() if section.get("environment", name) == GYM]
    if not gyms:
        return
    at = f"env.{gyms[0]}"
    if not vllm.expose_http_server:
        yield Finding(
            (_VLLM + "expose_http_server", at), "the agents of a NeMo Gym ask the policy's endpoint: set it to true"
        )
    for name in ("stop_strings", "val_top_k"):
        if generation[name] is not None:
            yield Finding(
                (f"policy.generation.{name}", at),
                f"{in_yaml(generation[name])} cannot be asked for through a NeMo Gym; leave it null",
            )
