"""Layouts that do not fit the ranks or the model are refused with the key to change, by all in the same words."""

import dataclasses
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.driver.run.checks import check_model
from grpo_mcore.families import ExpertShape, ModelShape, shape_of
from grpo_mcore.layout import DevicePool, EngineDevices, EngineLayout, Finding, LayoutError, PolicyLayout, fits
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import MasterConfig, RecipeError, load_recipe, world_size
from grpo_mcore.tools.launch.spec import launch_spec
from grpo_mcore.tools.plan.workload import workload_of

CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100,
}  # fmt: skip
DENSE = shape_of(CONFIG)
EXPERTS = dataclasses.replace(DENSE, experts=ExpertShape(count=6, active=2, ffn_hidden_size=48))
SECOND_HALF = dataclasses.replace(
    DENSE, experts=ExpertShape(count=6, active=2, ffn_hidden_size=48, dense_layers=(0, 1, 2))
)
MAMBA = shape_of(
    {
        "model_type": "nemotron_h", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "vocab_size": 50, "hybrid_override_pattern": "M*-", "ssm_state_size": 4, "mamba_num_heads": 4,
        "mamba_head_dim": 4, "n_groups": 2,
    }
)  # fmt: skip
SPLIT = {"sequence_parallel": True}


def messages(findings: list[Finding]) -> str:
    return str(LayoutError(*findings))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (DENSE, {"pipeline": 3}),
        (DENSE, {"tensor": 8}),
        (DENSE, {"pipeline": 3, "virtual": 2}),
        (DENSE, {"pipeline": 2, "first_layers": 2}),
        (DENSE, {"pipeline": 3, "first_layers": 1, "last_layers": 1}),
        (EXPERTS, {"expert": 3, "expert_tensor": 2, "data": 6}),
        (EXPERTS, {"tensor": 4, **SPLIT}),
        (SECOND_HALF, {"pipeline": 2}),
        (MAMBA, {"tensor": 2}),
    ],
)
def test_allowed_layouts(shape: ModelShape, sizes: dict[str, Any]) -> None:
    layout = PolicyLayout(**sizes)
    assert fits(layout, layout.world_size, shape) == []


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        (DENSE, {"tensor": 16}, "does not divide num_attention_heads 8"),
        (DENSE, {"tensor": 3}, r"tensor_model_parallel_size: 3 does not .*_heads 8, .* can be one of \[1, 2, 4, 8\]"),
        (dataclasses.replace(DENSE, num_heads=24), {"tensor": 6},
         r"6 does not divide .*num_key_value_heads 4 of .* can be one of \[1, 2, 4, 8\]"),
        (dataclasses.replace(DENSE, num_heads=12, head_dim=1), {"tensor": 12}, "rows of queries, keys and values 20"),
        (dataclasses.replace(DENSE, wide_qk_norm=True), {"tensor": 8}, "heads 4, over which their norm is split"),
        (MAMBA, {"tensor": 4}, r"4 does not divide n_groups 2 of this nemotron_h model; it can be one of \[1, 2\]"),
        (DENSE, {"pipeline": 4}, "6 of 6 layers do not divide over 4 stages"),
        (DENSE, {"pipeline": 3, "first_layers": 1}, "5 of 6 layers do not divide over the other 2 stages"),
        (DENSE, {"pipeline": 2, "first_layers": 6}, "0 of 6 layers do not divide over the other 1 stages"),
        (DENSE, {"pipeline": 2, "first_layers": 2, "last_layers": 2}, "2 of 6 layers .* over the other 0 stages"),
        (DENSE, {"pipeline": 2, "virtual": 2}, r"2 does not divide the layers of every stage \(3\)"),
        (DENSE, {"pipeline": 2, "virtual": 2, "first_layers": 1}, r"does not divide the layers .* \(1, 5\)"),
        (DENSE, {"virtual": 2}, "2 model chunks per stage need pipeline_model_parallel_size above 1"),
        (DENSE, {"data": 2, "expert": 2}, "expert_model_parallel_size: 2: this qwen3 model has no experts"),
        (DENSE, {"data": 2, "expert_tensor": 2}, "has no experts"),
        (EXPERTS, {"data": 4, "expert": 4}, "4 does not divide the 6 experts"),
        (EXPERTS, {"data": 32, "expert_tensor": 32}, "does not divide the experts' intermediate size 48"),
        (dataclasses.replace(EXPERTS, biases=True), {"data": 2, "expert_tensor": 2}, "experts of .* stay whole"),
        (EXPERTS, {"tensor": 2}, "experts under tensor parallelism need sequence_parallel: true"),
    ],
)  # fmt: skip
def test_refused_by_the_model(shape: ModelShape, sizes: dict[str, Any], message: str) -> None:
    layout = PolicyLayout(**sizes)
    found = fits(layout, layout.world_size, shape)
    with pytest.raises(LayoutError, match=message) as refused:
        raise LayoutError(*found)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value), "it crosses processes"
    assert len(found) == 1


@pytest.mark.parametrize(
    ("engine", "shape", "message"),
    [
        (EngineLayout(8), DENSE, ""),
        (EngineLayout(256), dataclasses.replace(DENSE, num_heads=256, ffn_hidden_size=256), "padded vocabulary 128"),
        (EngineLayout(3), DENSE, "tensor_parallel_size: 3 does not divide num_attention_heads 8.*num_key_value_heads"),
        (EngineLayout(4), MAMBA, "num_key_value_heads|n_groups 2"),
        (EngineLayout(4, expert_parallel=True), EXPERTS, "expert_parallel_size: 4 does not divide the 6 experts"),
        (EngineLayout(2, expert_parallel=True), EXPERTS, ""),
        (EngineLayout(2, expert_parallel=True), DENSE, "expert_parallel_size: 2: .* no experts; set it to 1"),
        (EngineLayout(2), dataclasses.replace(EXPERTS, biases=True),
         "which have biases, into engines of one rank only"),
        (EngineLayout(8), dataclasses.replace(DENSE, wide_qk_norm=True), "over which their norm is split"),
    ],
)  # fmt: skip
def test_engines_and_models(engine: EngineLayout, shape: ModelShape, message: str) -> None:
    devices = EngineDevices(engine, 1, DevicePool(1, 768), counted=True)
    said = messages(fits(PolicyLayout(data=768), 768, shape, devices))
    assert re.search(message, said) if message else said == ""


@pytest.mark.parametrize(
    ("engine", "count", "pool", "counted", "message"),
    [
        (EngineLayout(12, nodes=2), 1, DevicePool(3, 8), True, "the 12 ranks of an engine .* neither a divisor nor"),
        (EngineLayout(16), 0, DevicePool(1, 8), True, "1 engines of 16 ranks do not fit 1 nodes x 8 devices"),
        (EngineLayout(1), 9, DevicePool(1, 8), True, "9 engines of 1 ranks do not fit"),
        (EngineLayout(5, nodes=3), 1, DevicePool(3, 2), False, "the 5 ranks of an engine do not divide over 3 nodes"),
    ],
)
def test_engines_that_do_not_fit_the_devices(
    engine: EngineLayout, count: int, pool: DevicePool, counted: bool, message: str
) -> None:
    devices = EngineDevices(engine, count, pool, counted)
    assert re.search(message, messages(fits(PolicyLayout(data=pool.ranks), pool.ranks, None, devices)))


RECIPE = """\
policy:
  model_name: {model}
  train_global_batch_size: 16
  max_total_sequence_length: 64
  generation: {{max_new_tokens: 16}}
data: {{train: {{data_path: {model}/data.jsonl}}}}
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 4}}
cluster: {{gpus_per_node: 4, platform: cpu}}
launch: {{code: []}}
"""
AT = "policy.megatron_cfg."
SIX_HEADS = CONFIG | {"num_attention_heads": 6, "num_key_value_heads": 2}
WITHOUT_MODEL = {
    "TP 3 of 4": {AT + "tensor_model_parallel_size": 3},
    "PP 8 of 4": {AT + "pipeline_model_parallel_size": 8},
    "CP 3 of 4": {AT + "context_parallel_size": 3},
    "EP 3 of 4": {AT + "expert_model_parallel_size": 3},
    "sequence without tensor": {AT + "sequence_parallel": True},
    "uneven without stages": {AT + "num_layers_in_last_pipeline_stage": 2},
    "chunks without stages": {AT + "virtual_pipeline_model_parallel_size": 2},
    "experts without sequence": {AT + "tensor_model_parallel_size": 2, AT + "expert_model_parallel_size": 2},
}
WITH_MODEL = {
    "TP 4 of 6 heads": {AT + "tensor_model_parallel_size": 4},
    "PP 4 of 6 layers": {AT + "pipeline_model_parallel_size": 4},
    "EP without experts": {AT + "expert_model_parallel_size": 2},
    "VPP 2 of 3 layers": {AT + "pipeline_model_parallel_size": 2, AT + "virtual_pipeline_model_parallel_size": 2},
}
ENGINES = {
    "engine TP 3": {"policy.generation.vllm_cfg.tensor_parallel_size": 3},
    "engine EP without experts": {
        "policy.generation.vllm_cfg.tensor_parallel_size": 2,
        "policy.generation.vllm_cfg.expert_parallel_size": 2,
    },
}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SIX_HEADS))
    file = folder / "r.yaml"
    file.write_text(RECIPE.format(model=folder))
    return file


def refusals(recipe_file: Path, keys: dict[str, Any], callers: str) -> dict[str, str]:
    """What each caller says to a recipe that got these values after it was loaded."""
    recipe = load_recipe(recipe_file)
    config: MasterConfig = recipe.config
    for key, value in keys.items():
        section: Any = config
        *path, name = key.split(".")
        for part in path:
            section = section[part]
        section[name] = value
    shape, address = shape_of(SIX_HEADS), Address(0, world_size(config), 0, "", 0)
    work: dict[str, Callable[[], object]] = {
        "check": lambda: check_model(config),
        "plan": lambda: workload_of(config, shape, kernels="cpu"),
        "launch": lambda: launch_spec(recipe, "slurm"),
        "policy": lambda: Policy(config.policy, address, seed=1, timeout_s=1, reference=False),
    }
    said = {}
    for caller in callers.split():
        with pytest.raises((LayoutError, RecipeError)) as refused:
            work[caller]()
        said[caller] = str(refused.value)
    return said


@pytest.mark.parametrize("case", WITHOUT_MODEL)
def test_what_the_config_refuses_all_refuse_in_the_same_words(recipe_file: Path, case: str) -> None:
    keys = WITHOUT_MODEL[case]
    with pytest.raises(RecipeError) as refused:
        load_recipe(recipe_file, [f"{key}={str(value).lower()}" for key, value in keys.items()])
    layout = [problem.message for problem in refused.value.problems if "batch" not in problem.key]
    for caller, said in refusals(recipe_file, keys, "check plan launch policy").items():
        assert all(message in said for message in layout), f"{caller}: {said}"


@pytest.mark.parametrize("case", [*WITH_MODEL, *ENGINES])
def test_what_the_model_refuses_all_refuse_in_the_same_words(recipe_file: Path, case: str) -> None:
    of_policy = case in WITH_MODEL
    said = refusals(recipe_file, (WITH_MODEL | ENGINES)[case], "check plan launch" + " policy" * of_policy)
    key, message = said.pop("check").split(": ", 1)
    assert all(key in text and message in text for text in said.values()), said


def test_layers_of_interleaved_chunks() -> None:
    assert PolicyLayout(pipeline=2, virtual=2).layers(8) == ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))
    uneven = PolicyLayout(pipeline=2, virtual=2, first_layers=6).layers(10)
    assert uneven == ((range(3), range(5, 8)), (range(3, 5), range(8, 10)))


@pytest.mark.parametrize(
    ("layers", "sizes", "counts"),
    [
        (32, {}, [8, 8, 8, 8]),
        (30, {"first_layers": 6}, [6, 8, 8, 8]),
        (30, {"first_layers": 6, "last_layers": 6}, [6, 9, 9, 6]),
    ],
)
def test_layers_of_stages(layers: int, sizes: dict[str, int], counts: list[int]) -> None:
    stages = [chunk for (chunk,) in PolicyLayout(pipeline=4, **sizes).layers(layers)]
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(layers))
