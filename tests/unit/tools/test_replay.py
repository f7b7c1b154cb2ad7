"""Where two computations of a step differ first."""

import json
from pathlib import Path

import pytest
import torch

from grpo_mcore.cli.main import main
from grpo_mcore.recipe import MasterConfig, teacher_pools, world_size
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.replay.losses import compare_losses, with_loss
from grpo_mcore.tools.replay.replay import Replay, ReplayError, compare, replay_config
from grpo_mcore.tools.report.run_files import recorded_run
from tests.unit.step import step_cases


def computed(
    loss: float = 0.5, norm: float = 2.0, logprob: float = -1.0, layer: float = 3.0, critic: float = 0.1
) -> Replay:
    layers = {"p#0": {4: torch.full((2, 3), layer, dtype=torch.float64)}}
    metrics = {"loss": loss, "grad_norm": norm, "critic/loss": critic, "critic/grad_norm": 10 * critic}
    return Replay("one", metrics, {"p#0": torch.tensor([0.0, -2.0, logprob])}, layers)


@pytest.mark.parametrize(
    ("other", "first"),
    [
        ({}, None),
        ({"norm": 2.001}, None),
        ({"norm": 2.01}, "the norm of the gradient, though loss and log-probs agree: 2 against 2.01"),
        ({"norm": 9.0, "critic": 0.10001}, "the norm of the gradient, though loss and log-probs agree: 2 against 9"),
        ({"loss": 0.6, "critic": 0.2}, "the critic's loss, though all log-probs agree: 0.1 against 0.2"),
        ({"norm": 9.0, "loss": 0.6}, "the loss, though all log-probs agree: 0.5 against 0.6"),
        ({"loss": 0.6, "logprob": -1.1}, "the log-prob of token 2 of sample p#0: -1.000000 against -1.100000"),
        ({"logprob": -1.1, "layer": 4.0}, "the output of layer 4: at token 0 of sample p#0"),
    ],
)
def test_the_first_difference_is_named_from_the_bottom_up(other: dict[str, float], first: str | None) -> None:
    found = compare(computed(), computed(**other), "float32")
    assert found.ok == (first is None)
    assert first is None or first in str(found.first)


def test_losses_in_one_word_and_a_run_without_a_step_say_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ReplayError, match="--loss own,gspo: name each loss by itself: --loss own --loss gspo"):
        with_loss(step_cases.config(), "own,gspo", tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert main(["verdict", str(tmp_path)]) == 1
    assert "is a run: say with --step which of its recorded steps to judge" in capsys.readouterr().err


def test_a_run_that_may_restart_is_replayed_without_checkpoints() -> None:
    recipe = step_cases.config().model_dump(mode="json")
    recipe["cluster"] |= {"max_restarts": 2, "num_nodes": 2}
    recipe["checkpointing"] |= {"enabled": True, "mirror": "s3://bucket/run", "save_hf": "best"}
    config = replay_config(MasterConfig.model_validate(recipe), None)
    assert (config.cluster.max_restarts, config.checkpointing.enabled) == (0, False)


def test_a_critic_has_the_layout_and_precision_of_the_policys_replay(tmp_path: Path) -> None:
    recipe = step_cases.config().model_dump(mode="json") | {"ppo": {"enabled": True}}
    recipe["policy"]["model_name"] = str(make_tiny_model("qwen3", tmp_path / "model"))
    config = replay_config(MasterConfig.model_validate(recipe), "TP2", "float32")
    assert config.value is not None
    for model in (config.policy, config.value):
        assert (model.megatron_cfg.tensor_model_parallel_size, model.precision) == (2, "float32")


def test_losses_of_a_step_with_a_critic_are_not_compared(tmp_path: Path) -> None:
    plain = step_cases.config().model_dump(mode="json") | {"ppo": {"enabled": True}}
    with pytest.raises(ReplayError, match="--loss: a step with a critic cannot be compared"):
        compare_losses({"own": MasterConfig.model_validate(plain)}, [], 1, None, tmp_path, tmp_path)


def test_teachers_with_nodes_of_their_own_share_the_policys_in_a_replay() -> None:
    recipe = step_cases.config().model_dump(mode="json")
    recipe["cluster"] |= {"num_nodes": 2}
    recipe["grpo"]["adv_estimator"] = {"name": "opd"}
    places = {"enabled": True}
    recipe["on_policy_distillation"] = {
        "enabled": True, "teacher_model_by_agent_name": {"it": "big"}, "non_colocated_teachers": places,
    }  # fmt: skip
    config = replay_config(MasterConfig.model_validate(recipe), None)
    assert not teacher_pools(config) and world_size(config) == 2


def test_relative_checkpoints_of_a_run_lie_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may have its own under the same name in the working directory."""
    for folder in ("a/logs/x/exp_001", "copy/exp_001", "here"):
        (tmp_path / folder).mkdir(parents=True)
    recipe = step_cases.config().model_dump(mode="json")
    recipe["logger"]["log_dir"], recipe["checkpointing"]["checkpoint_dir"] = "./logs/x", "runs"
    for log in ("a/logs/x/exp_001", "copy/exp_001"):
        (tmp_path / log / "hyperparams.json").write_text(json.dumps(recipe))
    monkeypatch.chdir(tmp_path / "here")
    folders = {name: recorded_run(Path(name))[1].checkpointing.checkpoint_dir for name in ("../a/logs", "../copy")}
    assert folders == {"../a/logs": "../a/runs", "../copy": "runs"}
    (tmp_path / "fetched" / "step_1").mkdir(parents=True)
    (tmp_path / "copy").rename(tmp_path / "fetched" / "logs")
    assert recorded_run(Path("../fetched"))[1].checkpointing.checkpoint_dir == "../fetched"


def test_a_missing_metric_is_no_difference() -> None:
    one = Replay("one", {}, {"p#0": torch.zeros(3)})
    assert compare(one, computed(), "float32").first == (
        "the log-prob of token 1 of sample p#0: 0.000000 against -2.000000"
    )
    assert compare(one, one, "float32").ok
