"""recipes/presets: the keys of one algorithm, for any recipe. recipes/variants: the demo with each of them."""

import re
from pathlib import Path

import pytest
import yaml

from grpo_mcore.cli.main import main
from grpo_mcore.recipe import RecipeError, load_recipe, resolved_yaml

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "variants"
VARIANTS = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "curriculum")  # of data, not of an algorithm
PRESETS = sorted((FOLDER.parent / "presets").glob("*.yaml"))
ALGORITHMS = [path for path in PRESETS if path.stem != "async"]  # which goes beside any of them
DEMO = "grpo-arithmetic-cpu"
COMMON = {
    *("grpo.adv_estimator", "grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"),
    *("grpo.use_dynamic_sampling", "grpo.batch_multiplier"),
    *(f"loss_fn.{key}" for key in ("policy_term", "policy_term_options", "disable_ppo_ratio", "use_cispo")),
    *(f"loss_fn.{key}" for key in ("token_level_loss", "sequence_level_importance_ratios", "use_kl_in_reward")),
    *(f"loss_fn.{key}" for key in ("sequence_length_normalizer", "ratio_clip_min", "ratio_clip_max")),
    *("loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type"),
}
NAMES = ["async", "cispo", "dapo", "dr-grpo", "gdpo", "grpo", "gspo", "reinforce-plus-plus", "rloo"]
WITHOUT_A_VARIANT = [
    *("clip-cov", "dppo-kl", "dppo-tv", "flash-reinforce", "gfpo", "gmpo", "kl-cov", "luspo", "maxrl", "opo", "ppo"),
    *("remax", "sao", "sapo", "vespo"),
]
OF_AN_ALGORITHM = ("grpo.", "loss_fn.", "ppo.", "policy.train_global_batch_size", "env.math.format_pattern")
OF_PLACES = {"checkpointing.checkpoint_dir", "logger.log_dir"}


def test_each_variant_has_a_preset() -> None:
    assert [path.stem for path in VARIANTS] == NAMES
    assert [path.stem for path in PRESETS] == sorted(NAMES + WITHOUT_A_VARIANT)


@pytest.mark.parametrize("name", WITHOUT_A_VARIANT)
def test_a_preset_goes_on_a_recipe_with_a_policy_term_of_its_own(name: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(f"defaults: {DEMO}\nloss_fn: {{policy_term: kl_cov, policy_term_options: {{beta: 2.0}}}}\n")
    config = load_recipe(own, [f"defaults=presets/{name}"]).config
    assert config.loss_fn.policy_term_options == {}
    named = {name.replace("-", "_"), *({"clip"} if name == "luspo" else ())}
    critic = {name} if config.ppo.enabled else set()
    assert named & {config.loss_fn.policy_term, config.grpo.adv_estimator.name, *critic}


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_a_variant_is_the_demo_with_the_preset_of_its_name(path: Path) -> None:
    recipe = load_recipe(path)
    demo = load_recipe(FOLDER.parent / "grpo-arithmetic-cpu.yaml").config
    names = [f"{file.parent.name}/{file.stem}" for file in recipe.files]
    assert names == [f"variants/{path.stem}", f"presets/{path.stem}", "recipes/grpo-arithmetic-cpu"]
    here = {key for key, source in recipe.provenance.items() if f"/{path.name}:" in source}
    assert here >= OF_PLACES
    assert all(key.startswith(OF_AN_ALGORITHM) for key in here - OF_PLACES)
    assert recipe.config.checkpointing.checkpoint_dir == f"results/variants/{path.stem}/checkpoints"
    assert recipe.config.logger.log_dir == f"results/variants/{path.stem}/logs"
    ours, theirs = recipe.config.model_dump(), demo.model_dump()
    assert any(ours[section] != theirs[section] for section in ("grpo", "loss_fn"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_holds_only_an_algorithm_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert set(yaml.safe_load(text)) <= {"grpo", "loss_fn", "ppo", "value", "value_loss_fn"}
    head = re.split("^[a-z]+:", text, flags=re.MULTILINE)[0].splitlines()
    assert 2 <= len(head) <= 4 and all(line.startswith("# ") for line in head)
    assert re.search(r"arXiv \d{4}\.\d{5}", head[0])


@pytest.mark.slow
@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_of_two_presets_of_algorithms_the_last_decides_alone(path: Path) -> None:
    """Each sets the same keys, so that nothing of the recipe's own algorithm is left."""
    keys = {f"{section}.{key}" for section, values in yaml.safe_load(path.read_text()).items() for key in values}
    words = ["env.math.format_pattern=.*"]  # gdpo needs two rewards
    alone = load_recipe(DEMO, [f"defaults=presets/{path.stem}", *words])
    number = ALGORITHMS.index(path)
    neighbours = [ALGORITHMS[number - 1], ALGORITHMS[number - 5]]
    for other in {*neighbours, FOLDER.parent / "presets" / "dapo.yaml"}:  # which sets most keys
        after_other = load_recipe(DEMO, [f"defaults=[presets/{other.stem}, presets/{path.stem}]", *words])
        theirs = yaml.safe_load(other.read_text())
        common = {f"{section}.{key}" for section, values in theirs.items() for key in values} & keys
        assert common >= COMMON
        for key in common:
            section, name = key.split(".")
            values = [getattr(getattr(recipe.config, section), name) for recipe in (after_other, alone)]
            if name in ("adv_estimator", "reward_shaping"):  # of what is off, settings may be left
                values = [getattr(value, {"adv_estimator": "name"}.get(name, "enabled")) for value in values]
            assert values[0] == values[1], (key, other.stem)


def test_a_preset_is_put_on_any_recipe_below_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["grpo-qwen3-8B-1n4g", "loss_fn.ratio_clip_min=0.5"]
    assert main(["config", "--preset", "gspo", "--preset", "async", *words]) == 0
    presets = ["defaults=presets/gspo", "defaults=presets/async"]
    recipe = load_recipe(words[0], [*presets, words[1]])
    assert capsys.readouterr().out.endswith(resolved_yaml(recipe))
    loss = recipe.config.loss_fn
    assert (loss.ratio_clip_min, loss.ratio_clip_max, loss.sequence_level_importance_ratios) == (0.5, 4e-4, True)
    assert recipe.config.grpo.async_grpo.enabled
    assert recipe.provenance["loss_fn.ratio_clip_max"].startswith("recipes/presets/gspo.yaml:")


def test_a_preset_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="command line: defaults: no recipe 'presets/gsp' .*nearest: gspo"):
        load_recipe(DEMO, ["defaults=presets/gsp"])


def test_a_variant_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("variants/gspo").path == FOLDER / "gspo.yaml"
