"""Whole runs with images, in this process: several turns with an image each, and SFT."""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.base.processes import free_port
from grpo_mcore.cli.main import main
from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from grpo_mcore.families.images import image_size
from grpo_mcore.observe import read_metrics
from grpo_mcore.observe.samples import read_samples
from grpo_mcore.tools.demo.colours import make_colour_task
from grpo_mcore.tools.report.run_files import recorded_run
from grpo_mcore.tools.verdict.collect import of_run
from grpo_mcore.tools.verdict.judge import Judge
from tests.functional.runs import finished
from tests.gym_server import AGENT, GymServer
from tests.pictures import noise

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "grpo-vision-cpu.yaml"
TURNS = 3


class Shows(EnvironmentInterface):
    """Answers each turn but the last with another picture."""

    def step(self, message_log_batch: Sequence[Sequence[Any]], metadata: Sequence[dict[str, Any]]) -> EnvironmentReturn:
        turns = [sum(message["generated"] for message in messages) for messages in message_log_batch]
        marks = [sum(message["content"].count("<|image_pad|>") for message in log) for log in message_log_batch]
        assert marks == turns, "one image a turn so far"
        said = [[{"type": "image", "image": noise(64, 32 + 32 * turn, turn)}, {"type": "text", "text": "red"}]
                for turn in turns]  # fmt: skip
        return EnvironmentReturn(
            observations=[{"role": "user", "content": parts} for parts in said],
            metadata=list(metadata),
            next_stop_strings=[None] * len(turns),
            rewards=[float(len(log[-1]["content"]) % 2) for log in message_log_batch],
            terminateds=[turn == TURNS for turn in turns],
            answers=[None] * len(turns),
            reasons=[""] * len(turns),
        )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("colours")
    make_colour_task(folder / "task", folder / "base", rows=16)
    rows = (folder / "task" / "train.jsonl").read_text().splitlines()
    damaged = json.loads(rows[0])
    png = base64.b64decode(damaged["image"].partition(",")[2])
    damaged["image"] = "data:image/png;base64," + base64.b64encode(png[:-40]).decode()
    (folder / "task" / "train.jsonl").write_text("\n".join([json.dumps(damaged), *rows[1:]]) + "\n")
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["policy"]["model_name"] = str(folder / "base")
    recipe["policy"]["megatron_cfg"]["tensor_model_parallel_size"] = 1
    for part, file in (("train", "train"), ("validation", "val")):
        recipe["data"][part]["data_path"] = str(folder / "task" / f"{file}.jsonl")
    recipe["cluster"] |= {"backend": "local", "gpus_per_node": 1}
    return recipe


def test_three_turns_with_an_image_each_are_trained_on(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Engine and policy agree about every token; a damaged image costs its samples and no other. The files of samples
    hold what a step takes to be computed again, and a run to be followed."""
    changed = json.loads(json.dumps(recipe))
    changed["grpo"] |= {
        "num_prompts_per_step": 8, "num_generations_per_prompt": 2, "max_num_steps": 2, "max_num_epochs": 1,
        "max_rollout_turns": TURNS, "val_period": 0, "val_at_start": False, "val_at_end": False,
    }  # fmt: skip
    changed["policy"] |= {"train_global_batch_size": 16, "max_total_sequence_length": 96}
    changed["policy"]["generation"]["max_new_tokens"] = 4
    del changed["data"]["validation"]
    changed["env"] = {"shows": {"environment": "tests.functional.test_train_images:Shows"}}
    changed["checkpointing"] = {"enabled": False, "checkpoint_dir": str(tmp_path / "checkpoints")}
    changed["logger"] = {"log_dir": str(tmp_path / "logs")}
    run = finished("train", tmp_path, changed)
    steps = list(read_metrics(next((tmp_path / "logs").glob("exp_*/metrics.jsonl")), "train"))
    assert len(steps) == 2 and all(abs(step["token_mult_prob_error"] - 1) < 1e-4 for step in steps)
    assert "cannot be decoded" in run.out + run.err
    assert main(["replay", str(run.logs), "--step", "1"]) == 0
    assert main(["verdict", str(run.logs), "--step", "1"]) == 0
    case, _ = of_run(*recorded_run(run.logs), 1, 4, tmp_path)
    judge = Judge(case.folder, case.sampling)
    for sample in case.samples:
        mixed = replace(sample, images=tuple((span, noise(*image_size(file), 99)) for span, file in sample.images))
        close, far = ((judge.logprobs(each) - sample.policy)[sample.generated].abs().max() for each in (sample, mixed))
        assert close < 1e-4 < 1e-3 < far, "the judge sees the images"
    again = finished("train", tmp_path / "again", changed, "--follow", str(run.logs))
    followed = json.loads((again.logs / "summary.json").read_text())["followed"]
    assert followed["tokens"] > 100 and followed["differs_first"] is None


def test_images_that_agents_send_are_trained_on(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents of a Gym, whose tasks and environment show images: equal texts with images of equal size."""

    def parts(picture: bytes) -> list[dict[str, Any]]:
        url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        return [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "red"}]

    asked = [[{"role": "user", "content": parts(noise(64, 64, seed))}] for seed in range(4)]
    tasks = [{"responses_create_params": {"input": asked[i]}, "turns": 2, "said": parts(noise(64, 64, 9))}
             for i in range(4)]  # fmt: skip
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    changed, port = json.loads(json.dumps(recipe)), free_port()
    changed["grpo"] |= {
        "num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 1, "max_num_epochs": 1,
        "val_period": 0, "val_at_start": False, "val_at_end": False,
    }  # fmt: skip
    changed["policy"] |= {"train_global_batch_size": 8, "max_total_sequence_length": 96, "is_vlm": True}
    server = {"expose_http_server": True, "http_server_port": port, "http_server_api_key_env_var": "VISION_TEST_KEY"}
    changed["policy"]["generation"]["max_new_tokens"] = 4
    changed["policy"]["generation"].setdefault("vllm_cfg", {}).update(server)
    changed["data"] = {"train": {"dataset_name": "NemoGymDataset", "data_path": str(tmp_path / "tasks.jsonl")}}
    gym = GymServer(f"http://127.0.0.1:{port}", "a-secret-of-tests", recipe["policy"]["model_name"])
    changed["env"] = {"should_use_nemo_gym": True, "nemo_gym": {"head_server_url": gym.head_url, "agent_name": AGENT}}
    changed["checkpointing"] = {"enabled": False}
    changed.pop("logger", None)
    monkeypatch.setenv("VISION_TEST_KEY", "a-secret-of-tests")
    run = finished("train", tmp_path, changed)
    gym.close()
    [step] = run.metrics()
    assert gym.faults == [] and step["num_trained_samples"] == 8
    assert abs(step["token_mult_prob_error"] - 1) < 1e-4, "the policy has seen the images that the engine has"
    rows = read_samples(run.logs / "samples" / "train" / "step_000001.parquet")
    shown = [[image["digest"] for turn in row["turns"] for image in turn["images"] or ()] for row in rows]
    assert len({tuple(digests) for digests in shown}) == 4 and {len(digests) for digests in shown} == {2}
    assert sum(len(row["images"] or ()) for row in rows) == 8, "each once a group"


@pytest.mark.every_state
def test_sft_learns_from_images(recipe: dict[str, Any], tmp_path: Path) -> None:
    changed = {key: json.loads(json.dumps(recipe[key])) for key in ("policy", "cluster")}
    changed["data"] = {"default": {"processor": "vlm_hf_data_processor"}, "train": recipe["data"]["validation"]}
    changed["policy"] |= {"train_global_batch_size": 4}
    changed["sft"] = {"max_num_steps": 30, "max_num_epochs": 30, "val_period": 0}
    changed["checkpointing"] = {"enabled": False, "checkpoint_dir": str(tmp_path / "checkpoints")}
    changed["logger"] = {"log_dir": str(tmp_path / "logs")}
    finished("sft", tmp_path, changed)
    losses = [row["loss"] for row in read_metrics(next((tmp_path / "logs").glob("exp_*/metrics.jsonl")), "train")]
    assert losses[-1] < 0.2 < 2 < losses[0]
