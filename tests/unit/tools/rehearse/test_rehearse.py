"""A recipe in virtual time: what it predicts, what it leaves in its folder, and how it is called."""

import inspect
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.cli.main import main
from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.driver.policy.teacher_engines import TeacherEngineWorker
from grpo_mcore.observe import audit, read_ledger
from grpo_mcore.recipe import MasterConfig, load_recipe
from grpo_mcore.tools.plan.run_plan import make_plan, plan_device, plan_shape
from grpo_mcore.tools.rehearse.faults import Fault, named_fault, recipe_faults
from grpo_mcore.tools.rehearse.modelled_engine import ModelledEngine, ModelledTeacherEngine
from grpo_mcore.tools.rehearse.modelled_policy import ModelledRank, ModelledTeacher
from grpo_mcore.tools.rehearse.rehearsal_text import sweep_settings, sweep_text
from grpo_mcore.tools.rehearse.rehearse import Rehearsal, RehearsalError, modelled_recipe
from tests.simulation.simulation import Case

MODEL = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe for two nodes of four GPUs, whose model is known by its config alone."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    plain = {
        "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": 100, "val_period": 0},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_name": "modelled", "train_global_batch_size": 32, "train_micro_batch_size": 1,
            "max_total_sequence_length": 1024, "refit_buffer_size_gb": 0.5,
            "generation": {"vllm_cfg": {"tensor_parallel_size": 2}},
        },
        "data": {"train": {"data_path": "train.jsonl"}},
        "env": {"math": {"num_workers": 1}},
        "cluster": {"platform": "gpu", "num_nodes": 2, "gpus_per_node": 4},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


def rehearsed(recipe: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    config, folder = recipe.with_name("config.json"), recipe.with_name("out")
    command = ["rehearse", str(recipe), "--steps", "3", "--config-json", str(config), "--folder", str(folder), "--json"]
    assert main([*command, *words]) == 0
    return json.loads(capsys.readouterr().out)


def audited(recipe: Path) -> Any:
    return audit(read_ledger(recipe.with_name("out") / "checkpoints" / "ledger.jsonl"))


def planned(recipe: Path, words: Sequence[str], *phases: str) -> float:
    """Return the seconds that a plan expects of these phases."""
    config = load_recipe(recipe, words).config
    shape = plan_shape(config, str(recipe.with_name("config.json")))
    plan = make_plan(config, shape, plan_device(config, None, None))
    return sum(phase.likely for phase in plan.times.phases if phase.name in phases)


def test_a_recipe_is_rehearsed_and_leaves_a_run_folder(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = rehearsed(recipe, capsys)
    assert values["steps"] == 3 and values["devices"] == 8
    mean, median, late = values["step"]
    assert 0 < median <= late and abs(mean - values["phases"]["total"]) < 1e-6
    assert 0 < values["busy"] <= 1 and values["age"] == 0
    assert values["gpu_hours"] == pytest.approx(100 * mean * 8 / 3600)
    told = audited(recipe)
    assert told.fates["trained on"] == 24 and not told.flaws
    assert main(["ledger", str(recipe.with_name("out") / "checkpoints")]) == 0


def test_plan_and_rehearsal_agree(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples are drawn in one and expected in the other; without the wait for the longest they take equally long."""
    words = ("rehearse.spread=0", "policy.generation.max_new_tokens=384", "loss_fn.reference_policy_kl_penalty=0.1")
    phases = rehearsed(recipe, capsys, *words)["phases"]
    for name, timer in (("training", "train"), ("log-probs", "logprobs"), ("generation", "generate")):
        assert phases[timer] == pytest.approx(planned(recipe, words, name), rel=0.15, abs=0.005), name


@pytest.mark.slow
def test_a_recipe_is_rehearsed_again_in_place_of_the_last_time(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    command = ["rehearse", recipe.name, "--config-json", "config.json", "--steps"]
    assert [main([*command, steps]) for steps in ("2", "1")] == [0, 0], capsys.readouterr().err
    assert sorted(path.name for path in Path("results/rehearse/recipe/checkpoints").glob("step_*")) == ["step_1"]


def test_an_engine_that_is_killed_costs_time_and_no_prompt(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = rehearsed(recipe, capsys, "--kill", "engine-1@step2.generate", "--nodes", "4")
    told = audited(recipe)
    assert (values["steps"], values["devices"], told.restarts) == (3, 16, 1)
    assert told.fates["trained on"] == 24 and not told.flaws


def test_a_rank_that_is_killed_between_critic_and_policy_trains_nothing_twice(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("ppo.critic_epochs=2", "grpo.num_prompts_per_step=32", "grpo.num_generations_per_prompt=1")
    values = rehearsed(recipe, capsys, *words, "rehearse.spread=0")
    assert values["phases"]["train"] == pytest.approx(planned(recipe, words, "critic", "training"), rel=0.15)
    shutil.rmtree(recipe.with_name("out"))
    saved = ("checkpointing.save_period=1", "checkpointing.metric_name=null", "cluster.max_restarts=1")
    values = rehearsed(recipe, capsys, *words, *saved, "--kill", "policy-3@step2.train")
    told = audited(recipe)
    assert values["steps"] == 3 and told.fates["trained on"] == 96 and not told.flaws


@pytest.mark.slow
def test_a_teacher_is_rehearsed_and_one_that_is_killed_costs_no_sample(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two aliases of one model share its ranks."""
    section = "on_policy_distillation."
    words = (
        "grpo.adv_estimator.name=opd", "rehearse.spread=0", f"{section}enabled=true",
        f"{section}teacher_model_by_agent_name={{a: Qwen/Qwen3-8B, b: Qwen/Qwen3-8B}}",
        f"{section}default_teacher_alias=b",
    )  # fmt: skip
    phases = rehearsed(recipe, capsys, *words)["phases"]
    assert phases["teachers"] == pytest.approx(planned(recipe, words, "teachers"), rel=0.15)
    shutil.rmtree(recipe.with_name("out"))
    engines = f"{section}non_colocated_teachers={{default_teacher_cfg: {{backend: vllm}}}}"
    for more in ((), (engines,)):
        values = rehearsed(recipe, capsys, *words, *more, "--kill", "teacher-a-3@step2.teachers")
        told = audited(recipe)
        assert values["steps"] == 3 and told.fates["trained on"] == 24 and not told.flaws and not told.restarts
        assert values["phases"]["teachers"] > 5 * phases["teachers"], "its ranks, or engines, started again"
        shutil.rmtree(recipe.with_name("out"))


@pytest.mark.parametrize(
    ("model", "real"),
    [
        (ModelledEngine, EngineWorker),
        (ModelledRank, PolicyWorker),
        (ModelledTeacher, PolicyWorker),
        (ModelledTeacherEngine, TeacherEngineWorker),
    ],
)
def test_models_take_what_workers_take(model: type, real: type) -> None:
    for name, method in inspect.getmembers(model, inspect.isfunction):
        taken = list(inspect.signature(method).parameters.values())
        if name.startswith("_") or not hasattr(real, name) or any(one.kind is one.VAR_POSITIONAL for one in taken):
            continue
        wanted = inspect.signature(getattr(real, name)).parameters.values()
        if not any(one.kind is one.VAR_POSITIONAL for one in wanted):
            assert [one.name for one in taken] == [one.name for one in wanted], f"{model.__name__}.{name}"


def test_what_has_no_model_is_refused(tmp_path: Path) -> None:
    config = Case(0).recipe(tmp_path)
    local = config.model_dump()
    local["cluster"] |= {"backend": "local", "max_restarts": 0, "gpus_per_node": 1}
    with pytest.raises(RehearsalError, match="cluster.backend is local"):
        modelled_recipe(MasterConfig.model_validate(local), tmp_path, None)
    tuning = MasterConfig.model_construct(_fields_set={"sft"})
    with pytest.raises(RehearsalError, match="the recipe is one of sft"):
        modelled_recipe(tuning, tmp_path, None)
    agents = config.model_copy(update={"env": {"gym": {"environment": "nemo_gym"}}})
    with pytest.raises(RehearsalError, match="env.gym: a rehearsal has no model of agents"):
        modelled_recipe(agents, tmp_path, None)


def test_faults_are_named_and_drawn(tmp_path: Path) -> None:
    assert named_fault("engine-3@step2.generate") == Fault("kill", "engine-3", phase="generate", step=2)
    with pytest.raises(ValueError, match="WORKER@stepN.PHASE, with one of the phases generate, reward"):
        named_fault("engine-3@step2.sleep")
    config = replace(Case(0), engines=2).recipe(tmp_path)
    assert recipe_faults(config, 5, 4) == recipe_faults(config, 5, 4) != recipe_faults(config, 6, 4)
    assert sweep_settings(["a.b=1,2", "c=x"]) == [{"a.b": "1", "c": "x"}, {"a.b": "2", "c": "x"}]
    with pytest.raises(ValueError, match="--sweep a.b: expected"):
        sweep_settings(["a.b"])


def test_a_sweep_says_why_the_best_is_best_by_its_tokens(tmp_path: Path) -> None:
    """The larger step takes longer, and its tokens less time."""

    def run(tokens_per_second: float, **phases: float) -> Rehearsal:
        seconds = sum(phases.values())
        return Rehearsal(
            5, 1, (seconds, seconds, seconds), {**phases, "total": seconds}, tokens_per_second, 0.9, 0.0, 0.004, 0.1,
            0.2, 1, tmp_path, {},
        )  # fmt: skip

    small, large = run(1000.0, train=0.5, refit=0.5), run(2000.0, train=1.0, refit=0.5)
    text = sweep_text([({"grpo.num_prompts_per_step": "16"}, small), ({"grpo.num_prompts_per_step": "32"}, large)])
    assert text.splitlines()[-1] == (
        "num_prompts_per_step=32 is best: against the next one, refit takes 0.333 s less for 1,000 tokens of a device"
    )
    assert "0.004" in text.splitlines()[1]
