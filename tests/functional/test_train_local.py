"""Whole GRPO runs in process (cluster.backend: local): repeatable, resumable, with all terms of the loss."""

import copy
import dataclasses
import functools
import json
import math
import operator
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.cli.main import main
from grpo_mcore.driver.checkpoints.checkpoint_files import policy_folder
from grpo_mcore.driver.checkpoints.copy_to_url import open_store, run_number, sizes_of, whole_steps
from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.driver.record.run_record import PASS_RATES_FILE
from grpo_mcore.driver.run.checks import check_model
from grpo_mcore.driver.run.setup import start_cluster, start_policy
from grpo_mcore.observe import audit, read_ledger
from grpo_mcore.observe.band import band_text, make_band, settings_of
from grpo_mcore.observe.run_folder import EventFile, read_metrics
from grpo_mcore.observe.samples import SampleFiles, generated_mask, read_samples, sample_steps
from grpo_mcore.recipe import load_recipe
from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.tools.diagnose import (
    DiagnosedRun,
    diagnose,
    of_advantages,
    of_answers,
    of_logprobs,
    of_loss,
    of_mask,
    of_prompts,
    of_rewards,
    of_settings,
)
from grpo_mcore.tools.replay.replay import recorded_step
from grpo_mcore.tools.report.run_files import recorded_run
from grpo_mcore.tools.verdict.judge import Judge, JudgedSample
from tests.functional.recorded_runs import Inside, looking_inside
from tests.functional.runs import Run, Task, assert_one_message, finished, grpo_recipe, make_base_config, run_here
from tests.unit.tools.report_pages import assert_trace_format


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path) -> dict[str, Any]:
    recipe = grpo_recipe(task, model)
    recipe["checkpointing"] = {"save_period": 1, "keep_top_k": 2, "metric_name": None}
    # Prompts that were not tried have the pass rate of their task, so each draw depends on all groups before.
    # Half of them are passed over, unless the model is always right.
    recipe["data"]["sampler"] = {"enabled": True, "thresholds": [0.99, 1.0], "weights": [0.5, 1.0], "column": "task"}
    return recipe


@pytest.fixture(scope="module")
def whole(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Inside]:
    """Run all 4 steps in this process."""
    with looking_inside() as inside:
        words = ("grpo.val_at_start=true", "grpo.val_at_end=true")
        run = finished("train", tmp_path_factory.mktemp("whole"), recipe, *words)
    return run, inside


@pytest.fixture(scope="module")
def mirrored(recipe: dict[str, Any], bucket: str) -> dict[str, Any]:
    """Return the recipe with a copy of the checkpoints in an object store."""
    return recipe | {"checkpointing": recipe["checkpointing"] | {"mirror": f"{bucket}/half"}}


@pytest.fixture(scope="module")
def half(mirrored: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the first 2 of these steps."""
    words = ("grpo.max_num_steps=2", "logger.tensorboard_enabled=true", "grpo.val_at_end=true")
    return finished("train", tmp_path_factory.mktemp("half"), mirrored, *words)


@pytest.fixture(scope="module")
def resumed(mirrored: dict[str, Any], half: Run) -> tuple[Run, Inside]:
    """Run the other 2 on a machine without the files of `half`, which come from the mirror, after another run has made
    a log folder there."""
    half.checkpoints.rename(half.folder / "checkpoints of half")
    half.logs.rename(half.folder / "logs of half")
    (half.folder / "logs" / "exp_002").mkdir()
    with looking_inside() as inside:
        run = finished("train", half.folder, mirrored, "--resume")
    return run, inside


@pytest.fixture(scope="module")
def penalised(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Inside]:
    """Run with another seed, 2 optimizer steps per RL step, and a KL penalty."""
    words = ["grpo.seed=2", "grpo.max_num_steps=2", "policy.train_global_batch_size=8"]
    words += ["loss_fn.reference_policy_kl_penalty=0.05", "checkpointing.enabled=false", "logger.profile_steps=[2]"]
    with looking_inside() as inside:
        run = finished("train", tmp_path_factory.mktemp("penalised"), recipe, *words)
    return run, inside


# The same seed, the same run.


def test_engine_and_policy_agree_on_a_cut_distribution(recipe: dict[str, Any], tmp_path: Path) -> None:
    words = ["grpo.max_num_steps=1", "checkpointing.enabled=false"]
    words += ["policy.generation.top_k=6", "policy.generation.top_p=0.9", "loss_fn.reference_policy_kl_penalty=0.01"]
    with looking_inside() as inside:
        run = finished("train", tmp_path, recipe, *words)
    assert any(logprob == 0.0 for _, logprobs in inside.samples.values() for logprob in logprobs), "nothing was cut"
    (step,) = run.metrics()
    assert step["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert step["kl_penalty"] == pytest.approx(0.0, abs=1e-6), "the reference has the same cut"


def test_batched_by_length_a_step_is_the_same(
    recipe: dict[str, Any], whole: tuple[Run, Inside], tmp_path: Path
) -> None:
    words = ["grpo.max_num_steps=1", "checkpointing.enabled=false", "policy.sequence_packing.enabled=false"]
    dynamic = "policy.dynamic_batching"
    words += [f"{dynamic}.enabled=true", f"{dynamic}.sequence_length_round=4", f"{dynamic}.train_mb_tokens=32"]
    run = finished("train", tmp_path, recipe, *words)
    packed, batched = whole[0].metrics()[0], run.metrics()[0]
    assert batched["plan/bins_per_rank"] > packed["plan/bins_per_rank"]
    for name in ("loss", "grad_norm", "approx_entropy", "token_mult_prob_error"):
        assert batched[name] == pytest.approx(packed[name], rel=1e-5, abs=1e-7), name


def test_a_step_computes_the_prompt_of_a_group_once(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("01+02=" * 7 + "{}")
    words = ["grpo.max_num_steps=2", "checkpointing.enabled=false", "policy.max_total_sequence_length=64"]
    words += [f"data.default.prompt_file={tmp_path / 'prompt.txt'}", "loss_fn.reference_policy_kl_penalty=0.05"]
    steps = []
    for name, choice in (("whole", ["policy.sequence_packing.shared_prefix.enabled=false"]), ("shared", [])):
        run = finished("train", tmp_path / name, recipe, *words, *choice)
        steps.append(run.metrics())
        assert ("of the tokens computed: samples share prefixes" in run.out) == (name == "shared")
    for whole, once in zip(*steps, strict=True):
        assert whole["plan/computed_tokens"] == 1.0 and once["plan/computed_tokens"] < 0.6
        assert once["token_mult_prob_error"] <= 1.0001
        for name in ("reward", "loss", "grad_norm", "kl_penalty", "approx_entropy", "token_mult_prob_error"):
            assert once[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_every_sample_is_on_disk_with_its_log_probs(whole: tuple[Run, Inside]) -> None:
    run, inside = whole
    assert list(sample_steps(run.logs, "validation")) == [0, 4]
    for step, line in zip(range(1, 5), run.metrics(), strict=True):
        samples = read_samples(sample_steps(run.logs, "train")[step])
        assert len(samples) == 16
        assert sum(sample["reward"] for sample in samples) / 16 == line["reward"]
        errors = []
        for sample in samples:
            tokens, logprobs = inside.samples[step, sample["uid"], sample["generation"]]
            assert sample["token_ids"][-len(tokens) :] == tokens
            assert sample["engine_logprobs"][-len(tokens) :] == pytest.approx(logprobs)
            pairs = zip(logprobs, sample["policy_logprobs"][-len(tokens) :], strict=True)
            errors += [math.exp(abs(engine - policy)) for engine, policy in pairs]
        assert sum(errors) / len(errors) == pytest.approx(line["token_mult_prob_error"], abs=1e-6)
    events = list(EventFile(run.logs))
    stages = {"refit/open", "refit/stage", "refit/commit"}
    assert {event["what"] for event in events} >= {"begin", "generate", "reward", "train", "validation", *stages}
    micro_batches = [len(event["parts"]) - 1 for event in events if "parts" in event]
    assert micro_batches == [line["plan/bins_per_rank"] for line in run.metrics()]


def test_a_profiled_step_is_in_the_trace(penalised: tuple[Run, Inside], tmp_path: Path) -> None:
    run, _ = penalised
    assert [path.name for path in (run.logs / "profile").iterdir()] == ["step_000002"]
    assert main(["report", str(run.logs), "--trace", str(tmp_path / "trace.json")]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert_trace_format(trace)
    events = trace["traceEvents"]
    train, *of_rank = (event for event in events if event["name"] == "train" and event["args"]["step"] == 2)
    assert of_rank, "one for each optimizer step"
    for step in of_rank:
        assert train["ts"] <= step["ts"] and step["ts"] + step["dur"] <= train["ts"] + train["dur"]
    multiplied = [event for event in events if event["name"] == "aten::mm"]
    inside = [event for event in multiplied if train["ts"] <= event["ts"] <= train["ts"] + train["dur"]]
    assert 0 < len(inside) < len(multiplied)  # the others are of the passes before it, also of the engine's
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {names[event["pid"]].partition(",")[0] for event in multiplied} == {"policy-0"}, "one trace of one process"


def test_a_recorded_step_is_replayed_to_the_bit(whole: tuple[Run, Inside], capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = whole
    capsys.readouterr()
    assert main(["replay", str(run.logs), "--step", "4"]) == 0
    out = capsys.readouterr().out
    assert "loss differs by 0.0e+00, the gradient's norm by 0.0e+00 of it, a token's log-prob by at most 0.0e+00" in out


def test_the_verdict_on_a_recorded_step_is_none(whole: tuple[Run, Inside], capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = whole
    capsys.readouterr()
    assert main(["verdict", str(run.logs), "--step", "4", "--samples", "3"]) == 0
    line, *table = capsys.readouterr().out.splitlines()
    assert line.startswith("none: ") and {words.split()[0] for words in table[1:3]} == {"policy", "engine"}
    assert table[-1] == f"again: grpo-mcore verdict {run.logs} --step 4"
    assert main(["verdict", str(run.logs), "--step", "1", "--samples", "3"]) == 0, "the model itself"
    assert main(["verdict", str(run.logs), "--step", "3"]) == 1
    assert "step_2 is not kept: step 3 began with its weights" in capsys.readouterr().err


def test_a_weight_changed_by_hand_is_found(
    whole: tuple[Run, Inside], recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = whole
    good, changed = run.checkpoints / "step_3", tmp_path / "step_3"
    config = load_recipe(run.folder / "recipe.yaml").config
    with start_cluster(config, tmp_path) as cluster:
        policy = start_policy(config, cluster, check_model(config))
        policy.load(policy_folder(good))
        (worker,) = policy.workers
        second = worker.target.chunks[0].module.decoder.layers[1]  # type: ignore[attr-defined]
        second.mlp.linear_fc2.weight.data[0] += 0.5
        policy.start_save(str(changed / "policy"), optimizer=True)
        assert policy.is_saved(wait=True)
    words = ["replay", str(run.folder), "--step", "4"]
    assert main([*words, "--save", str(tmp_path / "good.pt")]) == 0
    assert main([*words, "--checkpoint", str(changed), "--against", str(tmp_path / "good.pt")]) == 1
    out = capsys.readouterr().out
    assert "first in the log-prob of token" in out  # against what the run recorded, which has no layers
    assert "first in the output of layer 2" in out


@pytest.fixture(scope="module")
def case(whole: tuple[Run, Inside], tmp_path_factory: pytest.TempPathFactory) -> DiagnosedRun:
    """Return the run's fourth step for a diagnosis."""
    run = whole[0].logs
    folder, config = recorded_run(run)
    settings, scratch = settings_of(config.model_dump(mode="json")), tmp_path_factory.mktemp("case")
    return DiagnosedRun(folder, config, 4, *recorded_step(run, 4), whole[0].metrics(), settings, scratch)


def test_a_run_as_it_should_be_has_nothing_to_name(case: DiagnosedRun, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["diagnose", str(case.run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["step"], said["findings"]) == ("without an alarm", 4, [])
    assert said["not judged"] == ["recipe: it names no band (logger.alarms.band); --recipe names what to compare with"]
    changed = case.run.parents[1] / "recipe.yaml"
    assert main(["diagnose", str(case.run), "--step", "3", "--recipe", str(changed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1, "of those up to 3 the last one with a checkpoint"
    recipe = case.config.model_dump(mode="json")
    file, runs = case.scratch / "band.json", dict.fromkeys(range(20), (recipe, case.lines, []))
    file.write_text(band_text(make_band("own", "1", runs)))
    assert main(["diagnose", str(case.run), "--band", str(file)]) == 0
    assert "inside its band of 20 runs\nnothing differs in step 4\n" in capsys.readouterr().out
    recipe["grpo"]["max_num_steps"] = 9
    file.write_text(band_text(make_band("own", "1", runs)))
    assert main(["diagnose", str(case.run), "--band", str(file)]) == 1
    assert "it is of another recipe (own): grpo.max_num_steps is 4 here and 9 there" in capsys.readouterr().err


FAULTS: list[tuple[Any, Callable[[Any], object], str, str]] = [
    (of_mask, lambda row: row["policy_logprobs"].insert(0, row["policy_logprobs"].pop()), "mask", "was "),
    (of_prompts, lambda row: row["turns"][1].update(text="="), "prompts", "are the same: 'Answer.='"),
    (of_prompts, lambda row: row["turns"][1].update(text=str(row["uid"][-1] > "4")), "data", "have 2 texts"),
    (of_prompts, lambda row: row["token_ids"].__setitem__(0, 9), "template", "data and template make '<bos>"),
    (
        of_prompts,
        lambda row: row["turns"][1].update(images=[{"digest": row["uid"]}]),
        "images",
        "other images than the",
    ),
    (of_answers, lambda row: row.update(truncated=True), "truncation", "16 of 16 answers"),
    (of_rewards, lambda row: row.update(reward=row["reward"] + 1), "reward", "16 of 16 recorded answers get another"),
    (of_rewards, lambda row: row.update(truth="7"), "data", "was 7, and is "),
    (of_advantages, lambda row: row.update(advantage=1 - row["advantage"]), "advantages", "its group's rewards give"),
]
"""Function that looks, what is done to each recorded sample, the part that it names, its evidence."""


@pytest.mark.parametrize(("look", "plant", "part", "evidence"), FAULTS)
def test_a_part_that_was_otherwise_is_named(
    case: DiagnosedRun, look: Any, plant: Callable[[Any], object], part: str, evidence: str
) -> None:
    rows = copy.deepcopy(list(case.rows))
    for row in rows:  # a system prompt is the same in all
        row["turns"].insert(0, {"role": "system", "text": "Answer.", "tokens": 0, "generated": False, "flag": None})
    assert list(look(dataclasses.replace(case, rows=rows))) == []
    for row in rows:
        plant(row)
    found = list(look(dataclasses.replace(case, rows=rows)))
    assert found and found[0].part == part and evidence in found[0].evidence
    assert found[0].again.startswith("grpo-mcore ")


def test_answers_are_cut_only_beyond_what_is_usual_in_the_band(case: DiagnosedRun) -> None:
    rows = [dict(row, truncated=True) for row in case.rows]
    of_runs = [line | {"truncation_rate": 1.0} for line in case.lines]
    band = make_band("own", "1", dict.fromkeys(range(20), (case.config.model_dump(mode="json"), of_runs, [])))
    assert list(of_answers(dataclasses.replace(case, rows=rows, band=band))) == []
    band.curves["truncated"][:] = 0.9
    assert [it.part for it in of_answers(dataclasses.replace(case, rows=rows, band=band))] == ["truncation"]


def test_settings_and_the_loss_that_were_otherwise_are_named(case: DiagnosedRun) -> None:
    key = "policy.megatron_cfg.optimizer.lr"
    (found,) = of_settings(case.config, {**case.reference, key: 3e-5})
    assert (found.part, found.evidence) == (key, "0.001 in the run, 3e-05 in the recipe")
    metrics = case.recorded.metrics
    other = dataclasses.replace(case.recorded, metrics=metrics | {"loss": metrics["loss"] + 0.5})
    (found,) = of_loss(dataclasses.replace(case, recorded=other))
    assert found.part == "loss" and "--step 4 --layout TP1" in found.again
    findings, notes = diagnose(dataclasses.replace(case, config=load_recipe("grpo-math-8B").config, _prompts=None))
    assert findings and any(note.startswith("reward: ") for note in notes), "one hides no other"


def test_an_engine_that_was_otherwise_is_named(case: DiagnosedRun, tmp_path: Path) -> None:
    """It drew at another temperature, or from weights that no step has had."""
    lines = [line | {"token_mult_prob_error": 1.0 + 0.2 * (line["step"] > 2)} for line in case.lines]
    (found,) = of_logprobs(dataclasses.replace(case, lines=lines))
    assert found.part == "refit" and "agree until step 2 and differ from step 3 on by a factor of 1.2" in found.evidence
    run = tmp_path / case.run.name
    shutil.copytree(case.run, run)
    rows = copy.deepcopy(read_samples(sample_steps(run, "train")[1]))
    judge = Judge(Path(case.config.policy.model_name), Sampling(4, temperature=1.5))
    for row in rows:
        generated = torch.tensor(generated_mask(row["turns"], len(row["token_ids"])))
        sample = JudgedSample("", torch.tensor(row["token_ids"]), generated, None, None)
        row["engine_logprobs"] = torch.where(sample.generated, judge.logprobs(sample), 0.0).tolist()
    sample_steps(run, "train")[1].unlink()
    files = SampleFiles(run / "samples", str, 1e9)
    files.add("train", 1, lambda: rows)
    files.close()
    lines = [line | {"token_mult_prob_error": 1.3} for line in case.lines]
    (found,) = of_logprobs(dataclasses.replace(case, run=run, lines=lines, step=1))
    assert found.part == "sampling temperature" and "temperature 1.5 in place of 1" in found.evidence


@pytest.mark.every_state
@pytest.mark.parametrize("layout", ["TP2", "PP2", "CP2"])
def test_a_recorded_step_is_replayed_on_another_layout(
    whole: tuple[Run, Inside], layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = whole
    assert main(["replay", str(run.logs), "--step", "4", "--layout", f"TP1,{layout}"]) == 0
    assert capsys.readouterr().out.count("equal within the limits") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9"], "step 9 are not recorded; there are those of 1 to 4"),
        (["--step", "2"], "step 2 can be replayed only from the checkpoint before it. Steps with one: 1, 4;"),
        (["--step", "4", "--samples", "nobody"], "step 4 has no prompt nobody"),
        (["--step", "4", "--layout", "QP2"], "QP2"),
    ],
)
def test_a_step_that_cannot_be_replayed_is_refused(
    whole: tuple[Run, Inside], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = whole
    assert main(["replay", str(run.logs), *words]) == 1
    assert said in capsys.readouterr().err


def test_one_seed_gives_the_same_run(whole: tuple[Run, Inside], half: Run) -> None:
    """Also in another process: chaos/test_chaos.py."""
    run, _ = whole
    first, again = run.outcome()[:2], half.outcome()[:2]
    assert again == first
    assert any(line["grad_norm"] > 0 for line in first)  # something was learned
    for line in run.metrics():
        assert line["token_mult_prob_error"] <= 1.02
        assert line["num_trained_samples"] == 16


def test_another_seed_gives_another_run(whole: tuple[Run, Inside], penalised: tuple[Run, Inside]) -> None:
    first = whole[0].metrics()[0], penalised[0].metrics()[0]
    for name in ("loss", "approx_entropy", "grad_norm"):
        assert first[0][name] != first[1][name]
    assert {key[1] for key in whole[1].samples} != {key[1] for key in penalised[1].samples}


def test_a_group_holds_different_samples(whole: tuple[Run, Inside]) -> None:
    """Each generation has a seed of its own."""
    _, inside = whole
    by_prompt: dict[tuple[int, str], set[tuple[int, ...]]] = {}
    for (version, uid, _), (tokens, _) in inside.samples.items():
        by_prompt.setdefault((version, uid), set()).add(tuple(tokens))
    assert max(map(len, by_prompt.values())) > 1


# Checkpoints.


def test_a_resumed_run_equals_an_uninterrupted_one(
    whole: tuple[Run, Inside], half: Run, resumed: tuple[Run, Inside]
) -> None:
    run, inside = resumed
    assert run.logs == half.logs  # it continues in the same files
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    assert run.outcome() == whole[0].outcome()
    pools = (whole[0].checkpoints / PASS_RATES_FILE).read_text()
    assert (run.checkpoints / PASS_RATES_FILE).read_text() == pools and len(pools.splitlines()) == 16
    assert sum(line["prompts/passed_over"] for line in run.metrics()) > 0
    later = {key: sample for key, sample in whole[1].samples.items() if key[0] in (3, 4)}
    assert inside.samples == later and len(later) == 32  # tokens and log-probs, bit for bit
    assert "3 to 4, resumed after step 2" in run.out


def test_checkpoints_are_complete_and_older_ones_are_removed(resumed: tuple[Run, Inside]) -> None:
    run, _ = resumed
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == ["copied_as.txt", "ledger.jsonl", "pass_rates.jsonl", "step_3", "step_4"]
    newest = run.checkpoints / "step_4"
    assert sorted(path.name for path in newest.iterdir()) == [
        "config.yaml", "data.pt", "digests.json", "policy", "training_info.json",
    ]  # fmt: skip
    info = json.loads((newest / "training_info.json").read_text())
    tokens = sum(16 * line["generated_length"] for line in run.metrics())
    assert info["save_state"] | {"val_reward": None} == {
        "consumed_samples": 16,
        "current_step": 4,
        "current_epoch": 0,
        "total_steps": 4,
        "total_valid_tokens": tokens,
        "val_reward": None,
        "log_run": "exp_001",
    }
    assert info["metrics"]["train:loss"] == run.metrics()[-1]["loss"]


def test_the_copy_holds_what_the_folder_holds(mirrored: dict[str, Any], resumed: tuple[Run, Inside]) -> None:
    """The run that was resumed in another folder has an id of its own."""
    run, _ = resumed
    store = open_store(mirrored["checkpointing"]["mirror"])
    (_, first), (prefix, second) = whole_steps(store).items()
    assert (first, second, run_number(prefix)) == ([1, 2], [3, 4], 2)
    for name, folder in (("step_4", run.checkpoints / "step_4"), ("logs/exp_001", run.logs)):
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        assert sizes_of(store, f"{prefix}{name}/") == sizes, name
    assert "AWS_" not in run.out + run.err and "mirror" not in json.loads((run.logs / "summary.json").read_text())


def test_a_run_is_read_once_it_is_fetched(
    mirrored: dict[str, Any], resumed: tuple[Run, Inside], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, fetched = resumed[0], str(tmp_path / "half")
    assert main(["fetch", mirrored["checkpointing"]["mirror"], "--to", fetched]) == 0
    for source, output in ((fetched, "there"), (f"{run.checkpoints}", "here")):
        assert main(["export", source, "--output", str(tmp_path / output)]) == 0
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("there", "here")]
    assert weights[0] == weights[1]
    assert main(["ledger", fetched]) == 0
    assert main(["watch", fetched]) == 0
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["replay", fetched, "--step", "4", "--checkpoint", str(run.checkpoints / "step_3")]) == 0
    assert main(["report", fetched, "--output", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "4 steps; resumes: 1" in shown and "step 4 of 4" in shown and "half/exp_001" in shown
    assert "half/exp_001" in (tmp_path / "page.html").read_text()


def test_a_url_that_cannot_be_written_is_refused(recipe: dict[str, Any], bucket: str, tmp_path: Path) -> None:
    refused = run_here("train", tmp_path, recipe, "--check", "checkpointing.mirror=s3://no-such-bucket/run")
    assert_one_message(refused, 1, "checkpointing.mirror s3://no-such-bucket/run: there is no such bucket; make it")


def test_the_recipe_in_a_checkpoint_is_the_recipe_of_the_run(resumed: tuple[Run, Inside]) -> None:
    run, _ = resumed
    saved = load_recipe(run.checkpoints / "step_4" / "config.yaml").config
    assert saved == load_recipe(run.folder / "recipe.yaml").config


def test_a_run_survives_a_full_disk_and_sigterm(
    tmp_path: Path, recipe: dict[str, Any], whole: tuple[Run, Inside], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit the size of files while step 2 is saved, and send SIGTERM in the middle of step 4."""
    save, generate, versions = PolicyWorker.start_save, EngineWorker.generate_together, []

    @functools.wraps(save)  # a call goes by the name of the method
    def save_on_a_full_disk(self: PolicyWorker, folder: str, optimizer: bool) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if folder.endswith("tmp_step_2/policy") else soft, hard))
        try:
            save(self, folder, optimizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    @functools.wraps(generate)
    def terminated_in_step_4(self: EngineWorker, *args: Any) -> Iterator[Any]:
        for trajectories in generate(self, *args):
            before = versions.count(4)
            versions.extend(trajectory.weight_version for trajectory in trajectories)
            if before < 6 <= versions.count(4):
                os.kill(os.getpid(), signal.SIGTERM)
            yield trajectories

    with monkeypatch.context() as patch:
        patch.setattr(PolicyWorker, "start_save", save_on_a_full_disk)
        patch.setattr(EngineWorker, "generate_together", terminated_in_step_4)
        run = run_here("train", tmp_path, recipe, "checkpointing.save_period=2", "grpo.val_at_start=true")
    assert run.code == 128 + signal.SIGTERM, run.err
    printed = " ".join(run.out.split())
    assert "the checkpoint of step 2 was not written" in printed and "the run goes on" in printed
    assert "SIGTERM asked the run to stop: what is trained so far is saved, then the run ends" in run.out
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["ledger.jsonl", "pass_rates.jsonl", "step_3"]
    resumed = finished("train", tmp_path, recipe, "--resume")
    assert resumed.outcome() == whole[0].outcome()
    found = audit(read_ledger(resumed.checkpoints / "ledger.jsonl"))
    assert not found.flaws and found.fates["trained on"] == 16 == sum(found.fates.values())


def test_a_checkpoint_of_another_model(tmp_path: Path, recipe: dict[str, Any], task: Task, whole: Any) -> None:
    other = tmp_path / "other"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    make_base_config(other, task.folder / "tokenizer", **sizes, head_dim=32)
    checkpoint = whole[0].checkpoints / "step_4"
    recipe = recipe | {"policy": recipe["policy"] | {"model_name": str(other)}}
    run = run_here("train", tmp_path, recipe, "--resume", str(checkpoint), "grpo.max_num_steps=5")
    assert_one_message(run, 1, f"{checkpoint / 'policy'} holds another model", "num_layers")


def test_a_branch_from_another_folder_has_a_log_of_its_own(
    recipe: dict[str, Any], whole: tuple[Run, Inside], tmp_path: Path
) -> None:
    """Only the checkpoints' folder is another; both runs have the same logger.log_dir."""
    run, _ = whole
    logs = run.logs  # the newest folder: the branch adds one
    before = {path: path.read_bytes() for path in logs.glob("*.json*")}
    words = [f"logger.log_dir={logs.parent}", "grpo.max_num_steps=5", "--resume", str(run.checkpoints / "step_4")]
    finished("train", tmp_path, recipe, *words)
    assert {path: path.read_bytes() for path in logs.glob("*.json*")} == before
    (own,) = [folder for folder in logs.parent.glob("exp_*") if folder != logs]
    shutil.move(own, tmp_path / "own")  # the other tests know one run there
    assert [line["step"] for line in read_metrics(tmp_path / "own" / "metrics.jsonl", "train")] == [5]


# Files and output of a run.


def test_files_and_summary(resumed: tuple[Run, Inside]) -> None:
    run, _ = resumed
    summary = json.loads((run.logs / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["seconds"] > 0 and summary["tokens_per_second"] > 0
    assert 1 <= summary["max_token_mult_prob_error"] <= 1.02
    assert {"start", "generate", "train", "refit", "checkpoint", "other"} <= summary["seconds_by_phase"].keys()
    kept = (run.logs / "console.txt").read_text()
    assert "everything is ready after" in kept and "the run is over" in kept and max(map(len, kept.splitlines())) < 140
    compared = {line["what"]: line for line in summary["predicted_against_measured"]}
    for part in ("weights", "gradients", "optimizer", "refit buffer"):
        assert compared[part]["measured"] == pytest.approx(compared[part]["predicted"], rel=0.02), part
    assert {line["unit"] for line in compared.values()} == {"bytes"}, "no data sheet predicts the seconds of a CPU"
    assert list((run.logs / "tensorboard").glob("events.*"))
    assert (run.logs / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_resuming_a_finished_run_changes_nothing(recipe: dict[str, Any], resumed: tuple[Run, Inside]) -> None:
    run, _ = resumed
    names = ("summary.json", "reward_curve.png", "metrics.jsonl")
    before = [(run.logs / name).read_bytes() for name in names]
    again = finished("train", run.folder, recipe, "--resume")
    assert "nothing is left to do: grpo.max_num_steps is 4; raise it to go on" in again.out
    assert "starting policy and engines" not in again.out
    assert again.logs == run.logs and [(run.logs / name).read_bytes() for name in names] == before


def test_changed_values_are_shown_or_refused(recipe: dict[str, Any], resumed: tuple[Run, Inside]) -> None:
    run, _ = resumed
    assert "resuming from" in run.out and "with 3 changed values" in run.out
    assert re.search(r"^  grpo.max_num_steps +2 +4$", run.out, re.MULTILINE)
    refused = run_here("train", run.folder, recipe, "--resume", "grpo.seed=5", "data.shuffle=false")
    assert_one_message(refused, 1, "data.shuffle: true -> false; grpo.seed: 1 -> 5", "which a resumed run keeps")


def test_validating_a_checkpoint_alone(
    whole: tuple[Run, Inside], recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers equal those of the run, and nothing is written but them and the samples."""
    checkpoint = whole[0].checkpoints / "step_4"
    run = finished("train", tmp_path, recipe, "--validate-only", "--resume", str(checkpoint))
    assert run.outcome("validation") == [line for line in whole[0].outcome("validation") if line["step"] == 4]
    assert "validation after step 4: accuracy" in run.out
    assert not run.metrics() and not list(run.checkpoints.iterdir())
    assert main(["watch", str(run.logs), "--once"]) == 0
    assert "over: validated after step 4, nothing was trained" in capsys.readouterr().out
    columns, key = ["uid", "reward", "token_ids"], operator.itemgetter("uid")
    mine, theirs = (read_samples(sample_steps(logs, "validation")[4], columns) for logs in (run.logs, whole[0].logs))
    assert sorted(mine, key=key) == sorted(theirs, key=key)


def test_what_the_user_sees(half: Run) -> None:
    for text in (
        "4 prompts x 4 generations = 16 samples = 1 optimizer step x 16 = DP 1 x 16 samples",
        "TP 1 x PP 1 x DP 1", "1 x vLLM TP 1 float32", "local, 1 policy rank\n",
        " 1/2 ", " 2/2 ", "validation after step 2: accuracy", "-- validation sample 1 of 1 after step 2",
        "all 2 steps are done", "predicted against measured", "where everything lies", str(half.checkpoints / "step_2"),
        str(half.logs / "reward_curve.png"),
    ):  # fmt: skip
        assert text in half.out, text


# All terms of the loss.


def test_the_kl_penalty_is_zero_until_the_policy_moves(penalised: tuple[Run, Inside]) -> None:
    run, inside = penalised
    penalties = [metrics["kl_penalty"] for metrics in inside.optimizer_steps]
    assert len(penalties) == 4
    assert penalties[0] == 0.0 and min(penalties[1:]) > 0
    for line, pair in zip(run.metrics(), (penalties[:2], penalties[2:]), strict=True):
        assert line["kl_penalty"] == pytest.approx(sum(pair) / 2, rel=1e-6)
        assert line["timing/logprobs"] > 0


def test_the_ratio_is_one_until_the_policy_moves_within_the_step(penalised: tuple[Run, Inside]) -> None:
    ratios = [(metrics["probs_ratio_min"], metrics["probs_ratio_max"]) for metrics in penalised[1].optimizer_steps]
    for first, second in (ratios[:2], ratios[2:]):
        assert first == (1.0, 1.0)
        assert second[0] < 1 < second[1]


def test_a_step_without_a_gradient_is_explained_once(tmp_path: Path, recipe: dict[str, Any], task: Task) -> None:
    """An untrained model never solves the task, so there is no reward and no gradient. The user is told why, once."""
    recipe = recipe | {"policy": recipe["policy"] | {"model_name": str(task.untrained)}}
    path = tmp_path / "train.jsonl"
    path.write_text('{"input": "1%2=", "output": "123456"}\n' * 4)
    run = finished("train", tmp_path, recipe | {"data": {"train": {"data_path": str(path)}}}, "grpo.max_num_steps=2")
    assert [line["grad_norm"] for line in run.metrics()] == [0.0, 0.0]
    assert run.out.count("every advantage is 0") == 1 and "step 1: every advantage is 0" in run.out


def test_a_step_without_a_sample_in_the_loss_changes_nothing_and_can_be_saved(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    """Answers of one token are truncated and filtered: the checkpoint is of an optimizer without a step."""
    words = ["grpo.max_num_steps=1", "grpo.overlong_filtering=true", "policy.generation.max_new_tokens=1"]
    words += ["policy.generation.temperature=0.05"]
    run = finished("train", tmp_path, recipe, *words)
    assert "step 1 changed nothing: 0 of 16 samples are in the loss (16 truncated or empty)" in run.out
    assert (run.checkpoints / "step_1" / "training_info.json").is_file()


def test_log_probs_are_not_computed_if_nothing_needs_them(whole: tuple[Run, Inside]) -> None:
    assert not any("timing/logprobs" in line for line in whole[0].metrics())


def test_an_export_of_another_run_is_refused_before_the_start(task: Task, tmp_path: Path) -> None:
    model = tmp_path / "checkpoints" / "hf_step_4" / "model.safetensors"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"of another run")
    recipe = grpo_recipe(task, task.untrained)
    checked = run_here("train", tmp_path, recipe, "--check", "policy.megatron_cfg.scheduler.lr_decay_style=linear")
    assert checked.code == 0, "it writes no such model"
    assert "falls over 1000 steps, and the data is enough for 288 (grpo.max_num_epochs is 9)" in checked.err
    refused = run_here("train", tmp_path, recipe, "--check", "checkpointing.save_hf=last")
    assert_one_message(refused, 1, "holds hf_step_4, a model of another run", "choose another folder, or move it away")
    assert model.read_bytes() == b"of another run"
