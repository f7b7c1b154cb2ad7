"""Whole GRPO runs with teachers: in process with one of another size, and over three nodes with one that is killed.
What is logged is computed again with transformers."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray._raylet import AuthenticationTokenLoader
from ray.cluster_utils import Cluster as RayNodes

from grpo_mcore.cli.main import main
from grpo_mcore.driver.policy.teacher_engines import TeacherEngines
from grpo_mcore.driver.policy.teachers import Teacher
from grpo_mcore.observe.samples import read_samples, sample_steps
from grpo_mcore.tools.demo.arithmetic import make_base_config, make_tokenizer
from tests.functional.runs import Run, Task, assert_one_message, finished, grpo_recipe, run_here

AT = "on_policy_distillation/"
SIZES = {"intermediate_size": 64, "num_layers": 3, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def teacher(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another size with the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    make_base_config(folder, task.folder / "tokenizer", seed=9, hidden_size=32, max_positions=64, **SIZES)
    return folder


def recipe_with(task: Task, model: Path, teacher: Path, **estimator: Any) -> dict[str, Any]:
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"max_num_steps": 2, "adv_estimator": estimator or {"name": "opd"}}
    recipe["on_policy_distillation"] = {"enabled": True, "teacher_model_by_agent_name": {"it": str(teacher)}}
    recipe["checkpointing"] = {"enabled": False}
    return recipe


@pytest.fixture(scope="module")
def run(task: Task, model: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of two optimizer steps."""
    recipe = recipe_with(task, model, teacher)
    recipe["checkpointing"] = {"save_period": 1, "keep_top_k": 5}
    return run_here("train", tmp_path_factory.mktemp("opd"), recipe, "policy.train_global_batch_size=8")


def rows_of(run: Run, step: int) -> list[dict[str, Any]]:
    return read_samples(sample_steps(run.logs, "train")[step])


def test_samples_record_the_teachers_logprobs_and_the_metrics_are_theirs(run: Run, teacher: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert run.code == 0, run.err
    network = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    for step, metrics in enumerate(run.metrics(), start=1):
        gaps, rows = [], rows_of(run, step)
        assert len(rows) == 16
        for row in rows:
            tokens = torch.tensor(row["token_ids"])[None]
            with torch.no_grad():
                scores = torch.log_softmax(network(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
            trained = np.array(row["policy_logprobs"][1:]) != 0
            mine = np.array(row["teacher_logprobs"][1:])
            assert np.abs(mine[trained] - scores.numpy()[trained]).max() < 1e-5
            assert not mine[~trained].any()
            gap = (mine - np.array(row["policy_logprobs"][1:]))[trained]
            assert row["advantage"] == pytest.approx(gap.mean(), abs=1e-6), "the mean of its tokens"
            gaps.append(gap)
        every = np.concatenate(gaps)
        assert metrics[AT + "teacher_student_logprob_gap_mean"] == pytest.approx(every.mean(), abs=1e-6)
        assert metrics[AT + "adv_mean"] == pytest.approx(every.mean(), abs=1e-6)
        assert metrics[AT + "adv_std"] == pytest.approx(every.std(), abs=1e-6)
        assert metrics["timing/teachers"] > 0
        assert metrics["grad_norm"] > 0


def test_a_recorded_step_is_replayed_with_its_teacher(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run.logs), "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "loss differs by 0.0e+00, the gradient's norm by 0.0e+00 of it, a token's log-prob by at most 0.0e+00" in out


def test_resumes_bit_for_bit(run: Run, task: Task, model: Path, teacher: Path, tmp_path: Path) -> None:
    recipe = recipe_with(task, model, teacher)
    recipe["checkpointing"] = {"save_period": 1, "keep_top_k": 5}
    words = ("policy.train_global_batch_size=8", "--resume", str(run.checkpoints / "step_1"))
    resumed = finished("train", tmp_path, recipe, *words)
    assert resumed.outcome() == run.outcome()[1:]


def test_the_policy_itself_teaches_exactly_nothing(task: Task, model: Path, tmp_path: Path) -> None:
    run = finished("train", tmp_path, recipe_with(task, model, model), "grpo.max_num_steps=1")
    (step,) = run.metrics()
    assert {step[AT + name] for name in ("teacher_student_logprob_gap_mean", "adv_mean", "adv_std")} == {0.0}
    assert step["grad_norm"] == 0 and step["loss"] == 0


def engine_for_a_teacher(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["on_policy_distillation"]["non_colocated_teachers"] = {"default_teacher_cfg": {"backend": "vllm"}}
    return recipe


def test_a_weighted_teacher_on_an_engine_beside_the_rewards(
    run: Run, task: Task, model: Path, teacher: Path, tmp_path: Path
) -> None:
    """The samples of the first step are those of `run`, whose teacher of the same weights is a Megatron model."""
    megatron = {(row["uid"], row["generation"]): row for row in rows_of(run, 1)}
    recipe = engine_for_a_teacher(recipe_with(task, model, teacher, name="rloo", opd_weight=0.5))
    run = finished("train", tmp_path, recipe, "grpo.max_num_steps=1")
    for row in rows_of(run, 1):
        other = megatron.pop((row["uid"], row["generation"]))
        assert list(row["token_ids"]) == list(other["token_ids"])
        difference = np.array(row["teacher_logprobs"]) - np.array(other["teacher_logprobs"])
        assert np.abs(difference).max() < 1e-5
    assert not megatron
    (step,), rewards = run.metrics(), {}
    for row in rows_of(run, 1):
        rewards.setdefault(row["uid"], []).append(row["reward"])
    for row in rows_of(run, 1):
        trained = np.array(row["policy_logprobs"]) != 0
        gap = (np.array(row["teacher_logprobs"]) - np.array(row["policy_logprobs"]))[trained].mean()
        others = rewards[row["uid"]]
        rloo = row["reward"] - (sum(others) - row["reward"]) / (len(others) - 1)
        assert row["advantage"] == pytest.approx(rloo + 0.5 * gap, abs=1e-6)
    assert step[AT + "adv_mean"] != step[AT + "teacher_student_logprob_gap_mean"]


def test_the_whole_vocabulary_teaches(
    task: Task, model: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reverse KL falls; it is what the gap of the sampled tokens estimates."""
    recipe = recipe_with(task, model, teacher)
    recipe["on_policy_distillation"]["divergence"] = {"enabled": True}
    run = finished("train", tmp_path, recipe, "grpo.max_num_steps=5", "policy.megatron_cfg.optimizer.lr=3.0e-3")
    steps = run.metrics()
    assert 0 < steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert all(step["grad_norm"] > 0 and step["zero_advantage_rate"] == 0 for step in steps)
    assert -steps[0][AT + "teacher_student_logprob_gap_mean"] == pytest.approx(steps[0]["loss"], rel=1.0)
    assert main(["diagnose", str(run.logs), "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["findings"] == [] and diagnosis["step"] == 1, "the step is replayed with its teacher"
    assert [note.partition(":")[0] for note in diagnosis["not judged"]] == ["recipe", "advantages"]


def test_the_policys_whole_distribution_teaches_no_more_than_rounding(task: Task, model: Path, tmp_path: Path) -> None:
    """A pass that trains rounds differently where samples share prefixes; elsewhere the difference is exactly 0."""
    recipe = recipe_with(task, model, model)
    recipe["on_policy_distillation"]["divergence"] = {"enabled": True, "kl_type": "jsd"}
    run = finished("train", tmp_path, recipe, "grpo.max_num_steps=1")
    (step,) = run.metrics()
    assert abs(step["loss"]) < 1e-12 and step["grad_norm"] < 1e-6


def test_a_teacher_with_another_tokenizer_is_refused_by_name(task: Task, model: Path, tmp_path: Path) -> None:
    import json

    other = tmp_path / "other"
    make_tokenizer(other / "tokenizer")
    make_base_config(other, other / "tokenizer", hidden_size=32, max_positions=64, **SIZES)
    content = json.loads((other / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["3"], vocab["4"] = vocab["4"], vocab["3"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    run = run_here("train", tmp_path, recipe_with(task, model, other), "--check")
    assert_one_message(run, 1, str(other), "has another tokenizer than the policy: '3' is number", "2 of")
    missing = run_here("train", tmp_path, recipe_with(task, model, tmp_path / "nowhere"), "--check")
    assert_one_message(missing, 1, "on_policy_distillation.teacher_model_by_agent_name.it: there is no folder")


def test_what_a_teacher_cannot_do_is_said_before_anything_starts(task: Task, model: Path, tmp_path: Path) -> None:
    recipe = recipe_with(task, model, model)
    recipe["on_policy_distillation"]["divergence"] = {"enabled": True, "topk_logits_k": 10**6}
    run = run_here("train", tmp_path, recipe, "--check")
    assert_one_message(run, 1, "divergence.topk_logits_k: 1000000 is more than the", "null compares all of them")
    recipe = engine_for_a_teacher(recipe_with(task, model, model))
    run = run_here("train", tmp_path, recipe, "--check", "policy.max_total_sequence_length=64")
    assert_one_message(run, 1, "an engine needs one position more than the longest sample, 65, and the model has 64")
    words = "on_policy_distillation.strict_agent_name_match=true"
    assert_one_message(run_here("train", tmp_path, recipe, "--check", words), 1, "is no alias of a teacher (it)")


def test_a_teacher_with_a_hint_is_the_model_after_the_hint(task: Task, model: Path, tmp_path: Path) -> None:
    """The policy's own start model teaches, and reads the answer first; what the policy reads stays as it is. Its rows
    are longer than the policy's longest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = recipe_with(task, model, model)
    recipe["data"]["train"] |= {"hint_key": "output", "hint_prompt": "{hint}{hint}{hint}{hint}={prompt}"}
    run = finished("train", tmp_path, recipe, "grpo.max_num_steps=1")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in rows_of(run, 1):
        trained = np.array(row["policy_logprobs"]) != 0
        first = int(trained.argmax())
        prompt = tokenizer.decode(row["token_ids"][:first])
        number = prompt.removeprefix("<bos><user>").removesuffix("%2=<assistant>")
        hint = str(1 - int(number) % 2)
        told = tokenizer(f"<bos><user>{hint * 4}={number}%2=<assistant>", add_special_tokens=False)["input_ids"]
        answer = row["token_ids"][first:]
        tokens = torch.tensor([told + answer])
        with torch.no_grad():
            scores = network(tokens).logits[0].log_softmax(-1)[len(told) - 1 : -1]
        expected = scores.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()
        assert np.abs(np.array(row["teacher_logprobs"])[first:] - expected).max() < 1e-5
    assert main(["replay", str(run.logs), "--step", "1"]) == 1


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three Ray nodes on this machine, which runs join."""
    AuthenticationTokenLoader.instance().reset_cache()  # of an earlier Ray of this process
    nodes = RayNodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=2)
        nodes.add_node(num_cpus=2)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def run_with_a_killed_teacher(
    folder: Path, recipe: dict[str, Any], teacher: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> Run:
    """Kill the teacher's last rank before the second step."""
    score, steps, log = Teacher.score, [], []

    def killed(self: Teacher, *args: Any) -> Any:
        steps.append(len(args[0]))
        if len(steps) == 2:
            os.kill(self.ranks.workers[-1].place().pid, signal.SIGKILL)
        before = self.ranks
        try:
            return score(self, *args)
        finally:
            log.append(self.ranks is before)

    monkeypatch.setattr(Teacher, "score", killed)
    recipe["cluster"] = {"platform": "cpu", "max_engine_restarts": 1, "retry_wait_s": 0.0}
    run = finished("train", folder, recipe, *words)
    assert steps == [16, 16] and log == [True, False], "the second step met a new teacher"
    assert [line["num_trained_samples"] for line in run.metrics()] == [16, 16]
    test_samples_record_the_teachers_logprobs_and_the_metrics_are_theirs(run, teacher)
    return run


@pytest.mark.every_state  # a minute and a half of a core: three nodes, and eight processes that import vLLM or torch
@pytest.mark.timeout(400)
def test_over_nodes_a_killed_teacher_costs_no_sample_and_an_engine_says_what_the_policy_does(
    task: Task, model: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, three_nodes: None
) -> None:
    """The policy's two data-parallel ranks and the engine's two tensor-parallel ones are on a node each, the teacher on
    the third. After each refit all checksums are compared, and the engine's log-probs with the policy's."""
    recipe = recipe_with(task, model, teacher)
    recipe["policy"] |= {"refit_verify": "full", "refit_parity": 1.0001}
    recipe["policy"]["generation"]["vllm_cfg"] |= {"tensor_parallel_size": 2}
    recipe["on_policy_distillation"]["non_colocated_teachers"] = {"enabled": True}
    words = ("cluster.num_nodes=3", "cluster.gpus_per_node=1")
    run = run_with_a_killed_teacher(tmp_path, recipe, teacher, monkeypatch, *words)
    assert "on 2 nodes, engines on 2" in run.out
    assert all(line["refit/checked"] > 0 and line["token_mult_prob_error"] <= 1.0001 for line in run.metrics())


@pytest.mark.every_state
def test_a_killed_teacher_of_another_layout_beside_the_policy_costs_no_sample(
    task: Task, model: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Student DP 2, teacher TP 2: it gives its devices back, and takes them again."""
    recipe = recipe_with(task, model, teacher)
    layout = {"default_teacher_cfg": {"tensor_model_parallel_size": 2}}
    recipe["on_policy_distillation"]["non_colocated_teachers"] = layout
    recipe["policy"]["generation"]["num_engines"] = 1
    run_with_a_killed_teacher(tmp_path, recipe, teacher, monkeypatch, "cluster.gpus_per_node=2")


@pytest.mark.every_state
def test_a_killed_engine_of_a_teacher_costs_no_sample(
    task: Task, model: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before the second step's samples reach it."""
    score, engines = TeacherEngines.score, []

    def killed(self: TeacherEngines, *args: Any) -> Any:
        engines.append(self.workers[0].place().pid)
        if len(engines) == 2:
            os.kill(engines[1], signal.SIGKILL)
        return score(self, *args)

    monkeypatch.setattr(TeacherEngines, "score", killed)
    recipe = engine_for_a_teacher(recipe_with(task, model, teacher))
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 1, "max_engine_restarts": 1, "retry_wait_s": 0.0}
    run = finished("train", tmp_path, recipe)
    assert len(engines) == 3 and engines[0] == engines[1] != engines[2], "the second step met a new engine"
    assert [line["num_trained_samples"] for line in run.metrics()] == [16, 16]
    test_samples_record_the_teachers_logprobs_and_the_metrics_are_theirs(run, teacher)
