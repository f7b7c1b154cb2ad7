from pathlib import Path

import pytest

from grpo_mcore.recipe import RecipeError, load_recipe
from tests.unit.recipe.conftest import MINIMAL


def test_a_minimal_recipe_has_defaults_and_sources(load) -> None:
    recipe = load(MINIMAL, "grpo.seed=7")
    assert recipe.config.policy.model_name == "models/tiny"
    assert recipe.config.policy.train_global_batch_size == 512
    assert recipe.provenance["policy.model_name"] == "r.yaml:2"
    assert recipe.provenance["data.train.0.data_path"] == "r.yaml:5"
    assert recipe.provenance["policy.train_global_batch_size"] == "default"
    assert recipe.provenance["grpo.seed"] == "command line"
    dotted = load("env: {a.b: {environment: math, num_workers: 1}}\n" + MINIMAL)
    assert dotted.provenance["env.a.b.num_workers"] == "r.yaml:1"
    assert recipe.overrides == ("grpo.seed=7",)


def test_sections_work_like_dicts(load) -> None:
    config = load(MINIMAL).config
    assert config["grpo"]["num_prompts_per_step"] == config.grpo.num_prompts_per_step == 32
    assert "validation" in config["data"] and "nonsense" not in config["data"]
    assert config["grpo"].get("nonsense", 3) == 3
    config["logger"]["log_dir"] = "elsewhere"
    assert config.logger.log_dir == "elsewhere"
    with pytest.raises(KeyError):
        config["grpo"]["nonsense"]
    with pytest.raises(KeyError):
        config["grpo"]["model_dump"]


def test_derived_values(load) -> None:
    text = MINIMAL + "loss_fn: {kl_input_clamp_value: null}\n"
    config = load(text, "policy.max_total_sequence_length=100", "policy.train_micro_batch_size=3").config
    policy = config.policy
    assert policy.tokenizer.name == "models/tiny"
    assert policy.logprob_batch_size == 3
    assert policy.sequence_packing.train_mb_tokens == policy.sequence_packing.logprob_mb_tokens == 300
    assert policy.generation.max_new_tokens == policy.generation.vllm_cfg.max_model_len == 100
    assert policy.megatron_cfg.optimizer.clip_grad == policy.max_grad_norm == 1.0
    assert policy.megatron_cfg.optimizer.bf16 is True
    assert policy.generation.vllm_cfg.precision == "bfloat16"
    assert policy.generation.val_temperature == 1.0
    assert policy.megatron_cfg.scheduler.end_weight_decay == 0.01
    assert config.data.max_input_seq_length == 100
    assert config.loss_fn.kl_input_clamp_value is None, "null is a value where nothing is derived"


def test_inheritance_by_name_path_and_list(write) -> None:
    write(MINIMAL + "grpo: {seed: 1, max_num_steps: 10, val_period: 3}\n", "base.yaml")
    write("grpo: {max_num_steps: 20}\n", "parts/steps.yaml")
    child = write("defaults: [base, parts/steps.yaml]\ngrpo: {val_period: 5}\n", "child.yaml")
    grandchild = write("defaults: ../child.yaml\ngrpo:\n  seed: 9\n", "deep/grandchild.yaml")
    grpo = load_recipe(child).config.grpo
    assert (grpo.seed, grpo.max_num_steps, grpo.val_period) == (1, 20, 5)
    recipe = load_recipe(grandchild)
    assert recipe.config.grpo.seed == 9
    assert recipe.provenance["grpo.seed"] == "deep/grandchild.yaml:3"
    assert recipe.provenance["grpo.max_num_steps"] == "parts/steps.yaml:1"
    names = [file.name for file in recipe.files]
    assert names[0] == "grandchild.yaml" and set(names) == {"grandchild.yaml", "child.yaml", "steps.yaml", "base.yaml"}


def test_self_in_the_list_sets_the_order(write) -> None:
    write("grpo: {seed: 5}\n", "late.yaml")
    child = write("defaults: [_self_, late]\n" + MINIMAL + "grpo: {seed: 1}\n")
    assert load_recipe(child).config.grpo.seed == 5


def test_inheritance_finds_the_recipes_of_the_project(write) -> None:
    recipe = load_recipe(write("defaults:\n  - grpo_math_1B\ngrpo: {seed: 3}\n"))
    assert recipe.config.policy.model_name == "Qwen/Qwen2.5-1.5B"
    assert Path(recipe.provenance["policy.model_name"].rpartition(":")[0]).name == "grpo_math_1B.yaml"


def test_a_recipe_may_have_the_name_of_the_one_it_inherits(write) -> None:
    recipe = load_recipe(write("defaults: sft\nsft: {seed: 3}\n", "sft.yaml"))
    assert recipe.config.sft.seed == 3 and recipe.config.sft.max_num_steps == 60


def test_override_replaces_instead_of_merging(write) -> None:
    write(MINIMAL + "logger:\n  num_val_samples_to_print: 3\n  wandb: {project: p, name: n}\n", "base.yaml")
    merged = load_recipe(write("defaults: base\nlogger: {wandb: {name: m}}\n")).config.logger
    assert (merged.num_val_samples_to_print, merged.wandb.project, merged.wandb.name) == (3, "p", "m")
    text = "defaults: base\nlogger:\n  wandb: {_override_: true, name: m}\n"
    replaced = load_recipe(write(text, "middle.yaml")).config.logger
    assert (replaced.num_val_samples_to_print, replaced.wandb.project, replaced.wandb.name) == (3, None, "m")
    # The mark survives being inherited as one of several.
    write("logger: {wandb: {_override_: true, name: k}}\n", "marked.yaml")
    write("defaults: marked\nlogger: {wandb: {entity: e}}\n", "part.yaml")
    wandb = load_recipe(write("defaults: [base, part]\n", "list.yaml")).config.logger.wandb
    assert (wandb.project, wandb.name, wandb.entity) == (None, "k", "e")


def test_missing_parent_circle_and_wrong_kind(write) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(write("x: 1\ndefaults:\n  - grpo_math_1b\n"))
    line = str(error.value).splitlines()[1]
    assert line.startswith("  r.yaml:3: defaults: no recipe 'grpo_math_1b' in .")
    assert line.endswith("; nearest: grpo_math_1B")
    write("defaults: b\n", "a.yaml")
    with pytest.raises(RecipeError) as error:
        load_recipe(write("defaults: a\n", "b.yaml"))
    assert str(error.value).splitlines()[1] == (
        "  a.yaml:1: defaults: the recipes inherit in a circle: b.yaml -> a.yaml -> b.yaml"
    )
    with pytest.raises(RecipeError, match=r"r.yaml:1: defaults: expected the name of a recipe, got 3"):
        load_recipe(write("defaults: [3]\n"))
    with pytest.raises(RecipeError, match=r"r.yaml: expected a mapping of keys, got \[1, 2\]"):
        load_recipe(write("[1, 2]\n"))


def test_a_missing_recipe_says_where_it_was_looked_for(write) -> None:
    write("", "other.yaml")
    with pytest.raises(RecipeError) as error:
        load_recipe("gone.yaml")
    assert str(error.value).splitlines()[1].startswith("  no recipe 'gone.yaml' in .")


def test_files_are_found_beside_the_recipe_that_names_them(write, tmp_path) -> None:
    write("x", "sub/prompts/cot.txt")
    write("{}", "sub/train.jsonl")
    write("{}", "here.jsonl")
    write("{}", "sub/here.jsonl")
    recipe = load_recipe(
        write(
            """\
            policy: {model_name: m}
            data:
              train:
                - {data_path: train.jsonl, prompt_file: prompts/cot.txt}
                - {data_path: here.jsonl}
                - {data_path: org/on-the-hub}
                - {data_path: "tr*.jsonl"}
            """,
            "sub/r.yaml",
        )
    )
    first, second, third, fourth = recipe.config.data.train
    assert (first.data_path, first.prompt_file) == ("sub/train.jsonl", "sub/prompts/cot.txt")
    assert second.data_path == "here.jsonl" and third.data_path == "org/on-the-hub"
    assert fourth.data_path == "sub/tr*.jsonl"


@pytest.mark.parametrize("name", ["grpo_math_8B", "grpo-math-1B", "grpo_llama3.1_8B_2n8g.yaml"])
def test_names_are_found_with_either_dash(name: str) -> None:
    found = load_recipe(name).path.stem
    assert found.replace("_", "-") == name.replace("_", "-").removesuffix(".yaml")


def test_every_recipe_of_the_project_loads() -> None:
    folder = Path(__file__).parents[3] / "recipes"
    for name in ("grpo_math_1B", "grpo_math_1B_megatron", "sft", "grpo-llama3.1-8B-2n8g"):
        load_recipe(folder / f"{name}.yaml")
    entry = load_recipe(folder / "grpo_math_1B.yaml").config.data.train[0]
    assert entry.prompt_file is not None and "{}" in Path(entry.prompt_file).read_text()
