"""Several environments in one run: each prompt is scored by the one of its dataset, and all train together."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.functional.recorded_runs import recording_groups
from tests.functional.runs import Task, assert_one_message, finished, grpo_recipe, make_base_config, run_here
from tests.unit.environments.code.sandbox_here import needs_sandbox

ROOT = Path(__file__).resolve().parents[2]
TESTS = [{"input": "1\n", "output": "2\n"}]


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a recipe with four datasets of two prompts. The model answers 0 or 1."""
    folder = tmp_path_factory.mktemp("data")
    rows = [json.loads(line) for line in task.train.read_text().splitlines()]
    entries = []
    for number, name in enumerate(("sums", "ones", "programs", "own")):
        path = folder / f"{name}.jsonl"
        chosen = [row | ({"tests": TESTS} if name == "programs" else {}) for row in rows[2 * number : 2 * number + 2]]
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        entries.append({"data_path": str(path), "task_name": name, "env_name": "math" if name == "sums" else name})
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": 2}
    recipe["policy"]["train_global_batch_size"] = 32
    recipe["data"] = {"train": entries, "validation": entries[:2]}
    recipe["env"] = {
        "math": {"num_workers": 1},
        "ones": {
            "environment": "rules",
            "num_workers": 1,
            "components": {
                "one": {"type": "contains", "any": ["1"], "weight": 2.0},
                "short": {"type": "length", "max": 1, "weight": 0.5},
            },
        },
        "programs": {"environment": "code", "num_workers": 1, "sandbox": "none_i_trust_the_code"},
        "own": {"environment": "tests.functional.worlds:Talkative", "verdict_timeout_s": 60, "each": 0.25},
    }
    return recipe


def test_each_prompt_is_scored_by_its_environment(recipe: dict[str, Any], tmp_path: Path) -> None:
    with recording_groups() as groups:
        run = finished("train", tmp_path, recipe, "grpo.val_at_end=true")
    seen: dict[str, int] = {}
    for group in groups:
        task_name = group.prompt["task_name"].removesuffix("-2")  # the second of this name is the validation set
        for sample, score in zip(group.samples, group.scores, strict=True):
            said = sample.ref.turns[-1].text
            seen[task_name] = seen.get(task_name, 0) + 1
            if task_name == "sums":
                assert score.reason in ("correct", "no answer found") or score.reason.startswith("wrong: ")
                assert score.reward == float(score.reason == "correct")
            elif task_name == "ones":
                assert score.rewards_by_name == {"one": float("1" in said), "short": float(len(said) <= 1)}
                assert score.reward == 2.0 * ("1" in said) + 0.5 * (len(said) <= 1)
            elif task_name == "programs":
                assert (score.reward, score.reason) == (0.0, "no code block found")
            else:
                assert (score.reward, score.reason) == (0.25 * len(said), "talkative")
    # 2 steps x 2 prompts x 4 samples of each dataset, and the validation of two: 2 prompts x 1 sample.
    assert seen == {"sums": 18, "ones": 18, "programs": 16, "own": 16}
    assert [line["num_samples"] for line in run.metrics()] == [32, 32]
    assert [line["num_failed_samples"] for line in run.metrics()] == [0, 0]
    [validation] = run.metrics("validation")
    counted = {name for name in validation if name.endswith("/num_samples")}
    assert counted == {"sums-2/num_samples", "ones-2/num_samples"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env.math.num_worker=1"], "env.math.num_worker: unknown key; did you mean 'num_workers'?"),
        (
            ["env.ones.num_worker=1"],
            "in the recipe's section env.ones: env.rules.num_worker: unknown key; did you mean",
        ),
        (["env.programs.environment=cod"], "unknown environment 'cod': did you mean 'code'?"),
        (["env.own.verdict_timeout_s=0"], "env.own.verdict_timeout_s must be a number of seconds above 0, got 0"),
        (["cluster.step_timeout_s=60"], "env.own.verdict_timeout_s is 60 s, which is not below cluster.step_timeout_s"),
    ],
)
def test_a_wrong_section_ends_the_run_before_it_starts(
    recipe: dict[str, Any], tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_mcore.algorithms.grpo.setup", None)  # setup would start the policy
    assert_one_message(run_here("train", tmp_path, recipe, *words), 1, message)


@needs_sandbox
def test_the_recipe_for_programs_runs_a_step(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a model with random weights, and the problems of examples/code_problems."""
    monkeypatch.chdir(ROOT)  # the recipe names its data relative to it
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    make_base_config(tmp_path / "model", task.folder / "tokenizer", **sizes, head_dim=32, max_positions=1024)
    recipe = yaml.safe_load((ROOT / "recipes" / "grpo-code-cpu.yaml").read_text())
    recipe["data"]["default"]["prompt_file"] = str(ROOT / "recipes" / "prompts" / "code.txt")
    words = [f"policy.model_name={tmp_path / 'model'}", "grpo.max_num_steps=1", "policy.generation.max_new_tokens=8"]
    words += ["cluster.backend=local", "policy.generation.vllm_cfg.kv_cache_memory_gb=0.1"]
    run = finished("train", tmp_path, recipe, *words)
    [line] = run.metrics()
    assert (line["num_samples"], line["num_failed_samples"], line["reward"]) == (32, 0, 0.0)
