"""Handles keys of NeMo RL that do not exist here, by the tables of nemo_rl_keys.yaml. A key that has another name here
is moved there, and a key that changes nothing is dropped; each leaves a note for `grpo-mcore config --imported`. Any
other is an error that says what to use instead."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_mcore.recipe.errors import Problem, in_yaml
from grpo_mcore.recipe.nemo_rl.dtensor_policy import dtensor_as_megatron
from grpo_mcore.recipe.nemo_rl.eval_layout import SAME_KEYS
from grpo_mcore.recipe.schema.grpo import GRPOConfig
from grpo_mcore.recipe.schema.master import GYM
from grpo_mcore.recipe.schema.ppo import PPOConfig
from grpo_mcore.recipe.schema.section import is_path
from grpo_mcore.recipe.yaml_tree import Node


@cache
def key_tables() -> dict[str, dict[str, Any]]:
    """Return the tables of nemo_rl_keys.yaml by name."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


CLIP = ("policy.megatron_cfg.optimizer.clip_grad", "policy.max_grad_norm")


def renamed_keys() -> Iterator[tuple[str, str]]:
    """Yield (key, other key with the same meaning), of which the one that is set later decides."""
    yield from ((path, entry["to"]) for path, entry in key_tables()["mapped"].items())
    yield CLIP
    yield from SAME_KEYS
    yield from (
        (f"ppo.{name}", f"grpo.{name}") for name in GRPOConfig.model_fields if name not in PPOConfig.model_fields
    )


def without_nemo_rl_keys(tree: Node, problems: list[Problem], notes: list[Problem]) -> Node:
    """Return the tree without the keys of the tables. `problems` gets those that would change something, and `notes`
    what became of the others."""
    tree, tables = apply_async_rl(tree.copy(), problems, notes), key_tables()
    tree = dtensor_as_megatron(tree, problems, notes)
    if (clip := tree.find(CLIP[0])) is not None and clip.value is not None and tree.find(CLIP[1]) is None:
        tree.value["policy"].value["max_grad_norm"] = clip
    for key in ("grpo.adv_estimator", "data.sampler"):
        node = tree.find(f"{key}.name")
        if node is not None and is_path(node.value):  # how recipes of 0.2 name custom code
            _move(tree, f"{key}.name", {"to": f"{key}.path"}, problems, notes)
    for path, entry in tables["mapped"].items():
        _move(tree, path, entry, problems, notes)
    for path, entry in tables["values"].items():
        _replace_value(tree, path, entry, notes)
    _split_tokens_of_experts(tree, notes)
    _without_truncation(tree, notes)
    _batched_by_length(tree, notes)
    for path, entry in tables["refused_values"].items():
        for section, name in _places(tree, path):
            if section.value[name].plain() in entry["values"]:
                node = section.value.pop(name)
                problems.append(node.problem(f"{in_yaml(node.plain())}: {entry['why']}"))
    for path, entry in tables["dropped_while"].items():
        nodes = [tree.find(key) for key in entry["key"]]
        values = [None if node is None else node.value for node in nodes]
        if any(value in entry["is"] if "is" in entry else value is not None for value in values):
            for section, name in _places(tree, path):
                _note(notes, section.value.pop(name), f"dropped: {entry['why']}")
    for table in ("dropped", "refused", "refused_unless"):
        for path, entry in tables[table].items():
            for section, name in _places(tree, path):
                node = section.value.pop(name)
                if (instead := _instead(table, entry, node.plain())) is not None:
                    culprit = _switched_on(node)
                    problems.append(culprit.problem(f"a key of NeMo RL; {instead}"))
                else:
                    _note(notes, node, f"dropped: {entry}" if table == "dropped" else "dropped: no effect here")
    return tree


def _note(notes: list[Problem], node: Node, message: str) -> None:
    """Add a note on what became of a key, unless its value switches nothing on."""
    if not is_off(node.plain()):
        notes.append(node.problem(message))


def _move(tree: Node, path: str, entry: dict[str, Any], problems: list[Problem], notes: list[Problem]) -> None:
    """Move the value at `path`, in units of `entry["unit"]`, to the key `entry["to"]`. It keeps its place and its
    written name for messages."""
    *sections, name = entry["to"].split(".")
    for section, old in _places(tree, path):
        node, present = section.value.pop(old), tree.find(entry["to"])
        if "unit" in entry and isinstance(node.value, int | float):
            node = node.having(node.value / entry["unit"])
        if present is not None and present.is_list and node.is_mapping:  # names of variables, without their values
            names = [child for child in present.value if isinstance(child.value, str)]
            present = present.having({child.value: child.having(None) for child in names})
        if present is not None and present.is_mapping and node.is_mapping:
            present_keys = present.value
            if all(
                name not in present_keys or present_keys[name].plain() in (None, child.plain())
                for name, child in node.value.items()
            ):
                node = node.having(present_keys | node.value)
                present = None
        if present is not None and present.value is not None and present.plain() != node.plain():
            message = f"contradicts {present.key} = {in_yaml(present.plain())} ({present.source})"
            problems.append(node.problem(message))
            continue
        target = tree
        for depth, part in enumerate(sections):
            inner = target.value.get(part)
            if inner is None or inner.value is None:
                inner = target.value[part] = Node({}, node.source, ".".join(sections[: depth + 1]))
            target = inner
        target.value[name] = node
        _note(notes, node, f"used as {entry['to']}")


def _replace_value(tree: Node, path: str, entry: dict[str, Any], notes: list[Problem]) -> None:
    """Replace the value at `path` where NeMo RL writes it differently."""
    for section, name in _places(tree, path):
        node = section.value[name]
        for written, meant in entry["values"]:
            if node.value == written and type(node.value) is type(written):
                section.value[name] = node.having(meant)
                notes.append(node.problem(f"{in_yaml(written)} is {in_yaml(meant)}: {entry['why']}"))


def _split_tokens_of_experts(tree: Node, notes: list[Problem]) -> None:
    """Turn sequence parallelism on where a recipe turns it off although experts are spread over ranks under tensor
    parallelism: Megatron-Core needs it there, and it changes no result."""
    prefix = "policy.megatron_cfg."
    split = tree.find(prefix + "sequence_parallel")
    names = ("tensor_model_parallel_size", "expert_model_parallel_size")
    sizes = [node.value if (node := tree.find(prefix + name)) is not None else 1 for name in names]
    if split is not None and split.value is False and all(isinstance(size, int) and size > 1 for size in sizes):
        split.value = True
        notes.append(split.problem("false is true: experts under tensor parallelism need it"))


def _without_truncation(tree: Node, notes: list[Problem]) -> None:
    """Drop the type of truncated importance sampling where the recipe sets its bound to null, which turns it off in
    NeMo RL."""
    bound, by_age = (tree.find(f"loss_fn.truncated_importance_sampling_ratio{end}") for end in ("", "_by_age"))
    if bound is None or bound.value is not None or (by_age is not None and by_age.value is not None):
        return
    for end in ("type", "ratio_min"):
        for section, name in _places(tree, f"loss_fn.truncated_importance_sampling_{end}"):
            _note(notes, section.value.pop(name), "dropped: truncated_importance_sampling_ratio is null")


def _batched_by_length(tree: Node, notes: list[Problem]) -> None:
    """Turn the packing off that a recipe with dynamic batching does not ask for: NeMo RL packs only on request."""
    dynamic = tree.find("policy.dynamic_batching.enabled")
    if dynamic is not None and dynamic.value is True and tree.find("policy.sequence_packing.enabled") is None:
        policy = tree.value["policy"]
        packing = policy.value.setdefault("sequence_packing", dynamic.having({}))
        packing.value = {**(packing.value or {}), "enabled": dynamic.having(False)}
        notes.append(dynamic.problem("used with policy.sequence_packing.enabled: false"))


def _instead(table: str, entry: Any, value: Any) -> str | None:
    """Return what to use instead of a key with this value, or None if the key can be dropped."""
    if table == "dropped":
        return None
    if table == "refused":
        return None if is_off(value) else entry
    dropped = value is None or any(value == known and type(value) is type(known) for known in entry["values"])
    return None if dropped else entry["instead"]


def is_off(value: Any) -> bool:
    """Return whether a value switches nothing on: null, false, 0, 1 (a parallel size), empty, or `enabled: false`."""
    if isinstance(value, dict):
        if "enabled" in value:
            return is_off(value["enabled"])
        return all(is_off(item) for name, item in value.items() if not name.startswith("_"))
    return value in (None, False, 0, 1, "", []) and value is not True


def _places(tree: Node, path: str) -> list[tuple[Node, Any]]:
    """Return, for each mapping or list that holds the last part of a path, the mapping or list and the key's name or
    position in it."""
    places: list[tuple[Node, Any]] = []
    nodes = [tree]
    for part in path.split("."):
        if part == "*":
            places = [(node, i) for node in nodes if node.is_list for i in range(len(node.value))]
        else:
            places = [(node, part) for node in nodes if node.is_mapping and part in node.value]
        if not places:
            break
        nodes = [node.value[name] for node, name in places]
    return places


def _switched_on(node: Node) -> Node:
    """Return the first value under a key that switches something on."""
    if node.is_mapping and "enabled" in node.value:
        return node.value["enabled"]
    for _, child in node.children():
        if not is_off(child.plain()):
            return _switched_on(child)
    return node


SAMPLERS = {"in_order": "in_order", "weight_fifo": "oldest_first", "windowed": "oldest_first",
            "ready_first": "oldest_first"}  # fmt: skip
"""Value of grpo.async_grpo.group_order for each sampler of NeMo RL's asynchronous controller."""


def apply_async_rl(tree: Node, problems: list[Problem], notes: list[Problem]) -> Node:
    """Return the tree with `async_rl`, the section of NeMo RL's asynchronous controller, as `grpo.async_grpo`."""
    section = tree.find("async_rl")
    rest = {name: node for name, node in tree.value.items() if name != "async_rl"}
    if section is None or not section.is_mapping or not section.value:
        return tree.having(rest)
    theirs = dict(section.value)
    sampler = dict(theirs.pop("sampler", Node({}, section.source, "async_rl.sampler")).children())
    name = sampler.pop("name", Node("in_order", section.source, "async_rl.sampler.name"))
    if name.value not in SAMPLERS:
        message = f"expected {', '.join(SAMPLERS)}, got {in_yaml(name.plain())}; custom samplers are not supported"
        problems.append(name.problem(message))
        return tree.having(rest)
    in_order = theirs.pop("force_in_order", None)  # of older recipes, which have no sampler
    if in_order is not None and in_order.value is False and "sampler" not in section.value:
        name = in_order.having("windowed")
    freshest = sampler.pop("sample_freshest_first", None)
    order = "freshest_first" if freshest is not None and freshest.value is True else SAMPLERS[name.value]
    ours = {
        "enabled": Node(True, section.source, "async_rl"),
        "in_flight_weight_updates": Node(True, section.source, "async_rl"),
        "group_order": name.having(order),
    }
    _note(notes, name, f"used as grpo.async_grpo.group_order: {order}, with enabled and in_flight_weight_updates")
    mapped = {
        "max_lookahead_versions": "max_trajectory_age_steps",
        "max_staleness_versions": "max_trajectory_age_steps",
        "max_weight_staleness_versions": "max_trajectory_age_steps",
        "max_inflight_prompts": "max_groups_in_flight",
        "recompute_kv_cache_after_weight_updates": "recompute_kv_cache_after_weight_updates",
        "refit_invalidate_kv_cache": "recompute_kv_cache_after_weight_updates",
    }
    for key, node in (sampler | theirs).items():
        if key in mapped:
            ours[mapped[key]] = node
            _note(notes, node, f"used as grpo.async_grpo.{mapped[key]}")
        else:
            _note(notes, node, "dropped: lost engines, environments and samples are handled as docs/faults.md says")
    grpo = tree.find("grpo") or Node({}, section.source, "grpo")
    async_grpo = grpo.value.get("async_grpo")
    for key, node in async_grpo.children() if async_grpo is not None else ():
        if key in ours and ours[key].plain() != node.plain():
            message = f"contradicts {node.key} = {in_yaml(node.plain())} ({node.source})"
            problems.append(Problem(ours[key].source, ours[key].key, message))
        ours.setdefault(key, node)
    async_grpo = Node(ours, section.source, "grpo.async_grpo")
    rest["grpo"] = grpo.having({**grpo.value, "async_grpo": async_grpo})
    loss = rest.get("loss_fn") or Node({}, section.source, "loss_fn")
    key = "use_importance_sampling_correction"
    age = ours.get("max_trajectory_age_steps")
    correction = loss.value.get(key) if loss.is_mapping else None
    if (
        loss.is_mapping
        and not (age is not None and age.value == 0)
        and (correction is None or correction.value is not True)
    ):
        # NeMo RL asks for it with grpo.async_grpo alone, where its recipes set it.
        corrected = Node(True, section.source, f"loss_fn.{key}")
        rest["loss_fn"] = loss.having({**loss.value, key: corrected})
        message = f"loss_fn.{key} is true with it: samples are of older weights than those that train"
        notes.append(Problem(section.source, "async_rl", message))
    return tree.having(rest)


def apply_gym_switches(tree: Node, problems: list[Problem]) -> Node:
    """Return the tree without the switches that NeMo RL has in `env`, with their effects applied. Idempotent.

    should_use_nemo_gym: true makes NeMo Gym the environment of datasets that name none; false removes its section.
    `reward_penalties`, a top-level section in NeMo RL, becomes a key of that section.
    """
    env = tree.find("env")
    if env is None or not env.is_mapping:
        return tree
    older = {"penguin": GYM, "should_use_penguin": "should_use_nemo_gym"}  # its name before it was published
    older["should_log_penguin_responses"] = "should_log_nemo_gym_responses"
    sections = {older.get(name, name): node for name, node in env.value.items()}
    use = sections.pop("should_use_nemo_gym", None)
    sections.pop("should_log_nemo_gym_responses", None)
    mask = sections.pop("should_mask_flagged_samples", None)
    if mask is not None and mask.value is False:
        message = "samples that NeMo Gym flags (mask_sample) are always left out"
        problems.append(mask.problem(message))
    gym, penalties = sections.get(GYM), tree.value.get("reward_penalties")
    if penalties is not None and gym is not None and gym.is_mapping:
        tree = tree.having({name: node for name, node in tree.value.items() if name != "reward_penalties"})
        if penalties.value is not None:
            gym_keys = {**gym.value, "reward_penalties": penalties}
            sections[GYM] = gym.having(gym_keys)
    tree = tree.having({**tree.value, "env": env.having(sections)})
    if use is None:
        return tree
    if not isinstance(use.value, bool):
        problems.append(use.problem(f"expected true or false, got {in_yaml(use.plain())}"))
    elif not use.value:
        sections.pop(GYM, None)
    elif GYM not in sections:
        problems.append(use.problem(f"there is no section env.{GYM}; give its head_server_url"))
    elif (data := tree.find("data")) is not None and data.is_mapping and "env_name" not in data.value:
        default = data.value.get("default")
        kept = default.value if default is not None and default.is_mapping else {}
        name = Node(GYM, use.source, "data.default.env_name")
        default = Node({**kept, "env_name": name}, data.source, "data.default")
        data = data.having({**data.value, "default": default})
        tree = tree.having({**tree.value, "data": data})
    return tree
