"""The recipes of the documents that the project was created from run one step.

The tests change only the model, the paths, the number of steps and of prompts, and wandb (not part of the test
environment), and run everything in this process.
"""

import contextlib
import io
import json
from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.tools.demo.arithmetic import make_base_config
from tests.functional.runs import Run, Task, called
from tests.unit.recipe.spec_templates import DPO_TEMPLATE, GRPO_TEMPLATE, GYM_GRPO, SFT_TEMPLATE

BATCH = "policy.train_global_batch_size"


@pytest.fixture(scope="module")
def model(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights and room for the 1024 tokens of the templates."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    make_base_config(folder, task.folder / "tokenizer", **sizes, head_dim=32, max_positions=1024)
    return folder


@pytest.fixture
def run(tmp_path: Path, task: Task, model: Path, monkeypatch: pytest.MonkeyPatch):
    """Return run(verb, template, words), which works in a folder with the files that the templates name."""
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in task.train.read_text().splitlines()]
    gym = [{**row, "ground_truth": row["output"], "output": f"It is {row['output']}"} for row in rows]
    tools = [{"type": "function", "function": {"name": "mod", "parameters": {"type": "object", "properties": {}}}}]
    chats = [
        {"messages": [_message("user", row["input"]), _message("assistant", row["output"])], "tools": tools}
        for row in rows
    ]
    Path("grpo_data").mkdir()
    for name, content in (
        ("grpo_data/train.jsonl", gym),
        ("grpo_data/val.jsonl", gym[:4]),
        ("grpo_train.jsonl", gym),
        ("sft_train.jsonl", chats),
    ):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in content))

    def run(verb: str, template: str, *words: str) -> Run:
        Path("recipe.yaml").write_text(template)
        common = (f"policy.model_name={model}", "cluster.backend=local", "cluster.platform=cpu")
        return called(tmp_path, verb, "recipe.yaml", *common, "logger.wandb_enabled=false", *words)

    return run


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(GYM_GRPO, id="gym"),
        pytest.param(GRPO_TEMPLATE, id="quick reference", marks=pytest.mark.every_state),
    ],
)
def test_grpo(run, template: str) -> None:
    checked = run("train", template, "--check")
    assert checked.code == 0, checked.err
    done = run("train", template, "grpo.max_num_steps=1", "grpo.num_prompts_per_step=4", f"{BATCH}=64")
    assert done.code == 0, done.err
    assert "4 prompts x 16 generations = 64 samples = 1 optimizer step x 64" in done.out
    [line] = done.metrics()
    assert (line["step"], line["num_samples"]) == (1, 64)
    assert line["num_trained_samples"] >= 62, done.out  # random text occasionally makes the verifier fail
    assert Path("results/gym_grpo/step_1/training_info.json").is_file()


def test_sft(run) -> None:
    done = run("sft", SFT_TEMPLATE, "sft.max_num_steps=1")
    assert done.code == 0, done.err
    assert [line["step"] for line in done.metrics()] == [1]
    assert Path("results/gym_sft/hf/config.json").is_file()


def test_dpo_on_pairs_of_gym_rollouts(run) -> None:
    rollouts = [
        {"responses_create_params": {"input": [_message("user", f"{n}%2=")]}, "reward": reward,
         "response": {"output": [{"type": "message", "role": "assistant", "content": [
             {"type": "output_text", "text": str(answer), "annotations": []}]}]}}
        for n in range(140) for answer, reward in ((1 - n % 2, 1.0), (n % 2, 0.0))
    ]  # fmt: skip
    Path("rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["data", "gym-to-dpo", "--input", "rollouts.jsonl", "--output", "dpo_train.jsonl"]) == 0
    done = run("dpo", DPO_TEMPLATE, "dpo.max_num_steps=1")
    assert done.code == 0, done.err
    [line] = done.metrics()
    assert (line["step"], line["num_valid_samples"]) == (1, 128)
    assert Path("results/gym_dpo/hf/config.json").is_file()
