"""Every example runs: the commands of its header, with fewer steps."""

from pathlib import Path

import pytest

from examples.custom_environment.calculator import Calculator, calculate
from examples.custom_environment.make_task import make_task
from examples.custom_loop import custom_loop
from examples.custom_reward.reward import share_of_digits
from tests.functional.preload import preload
from tests.functional.runs import Task, finished, run_here

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_loop_of_your_own_learns() -> None:
    preload()
    rewards = custom_loop.main(steps=10)
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.2


@pytest.mark.parametrize(("response", "share"), [("082", 1.0), ("081", 2 / 3), ("82", 0.0), ("", 0.0), ("0829", 1.0)])
def test_the_reward_of_your_own(response: str, share: float) -> None:
    assert share_of_digits(response, {"ground_truth": "82"}) == pytest.approx(share)


def in_process(task: Task, model: Path) -> list[str]:
    """Return overrides for a recipe of the demo: this model and task, a small step, one process."""
    words = [
        f"policy.model_name={model}",
        f"data.train.data_path={task.train}",
        f"data.validation.data_path={task.val}",
    ]
    words += ["policy.megatron_cfg.tensor_model_parallel_size=1", "cluster.gpus_per_node=1", "cluster.backend=local"]
    words += ["grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=32"]
    return [*words, "policy.generation.vllm_cfg.kv_cache_memory_gb=0.1"]


def test_a_run_from_python_with_the_reward_of_your_own(
    task: Task, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another model and task than the demo's, in process; the reward and its parts come from the recipe."""
    preload()
    from examples.from_python import from_python

    monkeypatch.chdir(tmp_path)
    words = [*in_process(task, model), "grpo.max_num_steps=1", "grpo.max_val_samples=8", "grpo.val_at_start=false"]
    metrics, answer = from_python.main(words, tmp_path / "exported")
    assert list(metrics.index) == [1] and isinstance(answer, str)
    line = metrics.loc[1]
    assert (line["num_samples"], line["num_failed_samples"]) == (32, 0)
    assert 0.0 < line["reward"] == pytest.approx(line["reward/share"] + 0.1 * line["reward/length"])
    assert "accuracy" not in line and (tmp_path / "exported" / "model.safetensors").is_file()
    out = capsys.readouterr().out
    assert "the rewards are graded" in out and "reward/share  " in out
    assert "share " in out and "length 1" in out  # the reasons of the validation samples that are shown


def test_a_run_with_the_objective_of_your_own(task: Task, model: Path, tmp_path: Path) -> None:
    """All six parts of the example; where one does not fit, nothing starts."""
    words = in_process(task, model)
    words += ["grpo.max_num_steps=2", "grpo.val_period=0"]
    words += ["checkpointing.enabled=false", "grpo.val_at_end=false"]
    recipe = {"defaults": str(EXAMPLES / "custom_objective" / "recipe.yaml")}
    refused = run_here("train", tmp_path, recipe, *words, "grpo.reward_shaping.options={fine: 2}")
    assert refused.code == 1
    assert "grpo.reward_shaping.path examples.custom_objective.objective:brevity is called with" in refused.err
    assert "starting" not in refused.out
    run = finished("train", tmp_path, recipe, *words)
    first, second = run.metrics()
    assert second["kl_penalty"] >= 0 and second["grad_norm"] > 0
    assert -1 <= first["advantage_min"] < 0 < first["advantage_max"] <= 1  # ranks
    [lines] = [path.read_text().splitlines() for path in tmp_path.rglob("train.csv")]
    assert len(lines) == 3 and lines[0].startswith("step,reward,")


@pytest.mark.parametrize(
    ("expression", "value"), [("37*45", "1665"), ("1+2", "3"), ("2-30", "-28"), ("2**9", "?"), ("", "?"), ("1*2?", "?")]
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_the_environment_of_your_own_answers_calls_and_scores_answers() -> None:
    conversations = [[{"role": "assistant", "content": said}] for said in ("37*45?", "1665", "1666", "37*?")]
    fields = {"ground_truth": "1665"}
    found = Calculator().step(conversations, [fields] * 4)
    assert [said["content"] for said in found.observations] == ["1665", "", "", "?"]
    assert found.terminateds == [False, True, True, False]
    assert found.rewards == [0.0, 1.0, 0.0, 0.0]
    assert found.next_stop_strings == [["?"]] * 4


def test_a_run_with_the_environment_of_your_own(tmp_path: Path) -> None:
    """Warm-up and GRPO of the example, a few steps of each: the policy calls the calculator, and goes on."""
    folder = tmp_path / "task"
    make_task(folder)
    words = [f"policy.model_name={folder / 'untrained'}", f"data.train.data_path={folder / 'sft.jsonl'}"]
    recipe = {"defaults": str(EXAMPLES / "custom_environment" / "sft.yaml")}
    sft = finished("sft", tmp_path / "sft", recipe, *words, "sft.max_num_steps=20")
    words = [f"policy.model_name={sft.checkpoints / 'hf'}", "grpo.max_num_steps=1", "grpo.max_val_samples=8"]
    words += [f"data.train.data_path={folder / 'train.jsonl'}", f"data.validation.data_path={folder / 'val.jsonl'}"]
    words += ["policy.generation.vllm_cfg.kv_cache_memory_gb=0.1", "grpo.turn_credit={weight: 0.5, mode: gigpo}"]
    recipe = {"defaults": str(EXAMPLES / "custom_environment" / "recipe.yaml")}
    run = finished("train", tmp_path / "grpo", recipe, *words)
    [line] = run.metrics()
    assert (line["num_samples"], line["num_failed_samples"]) == (128, 0)
    assert line["turns_max"] > 1 and line["environment_tokens"] > 0 and 0 <= line["turn_credit/share"] < 1


def test_every_example_has_a_test() -> None:
    """The others: test_data_loaders (custom_dataloader), test_environments (code_problems), test_multi_turn,
    test_spec_commands (configs), test_verifiers (verifiers_task)."""
    here = {"from_python", "custom_environment", "custom_loop", "custom_objective", "custom_reward"}
    elsewhere = {"code_problems", "configs", "custom_dataloader", "sliding_puzzle", "verifiers_task"}
    assert {
        path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"
    } <= here | elsewhere
