"""GRPO on samples that harnesses of the package verifiers generate, in three dialects; what goes wrong in each stage.
The world is tests/verifiers_plugins/counting_world.py; all between it and the engine is real."""

import os
import shutil
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.sliding_puzzle.make_model import make_puzzle_model
from examples.verifiers_task.make_task import make_task
from grpo_mcore.base.orphan_reaper import marked
from grpo_mcore.data import load_tokenizer
from grpo_mcore.data.datasets.verifiers_tasks import _tasks
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.environments import create_env_class
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.verifiers.environment import VerifiersEnvironment
from grpo_mcore.generation.chat.engine_chat import EngineChat, Reply
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.generation.endpoint import Endpoint
from grpo_mcore.rollout.trajectory import (
    AgentRequest,
    GenerationRequest,
    Sampling,
    Score,
    Trajectory,
    TrajectoryRef,
    Turn,
)
from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from tests.functional.recorded_runs import recording_groups
from tests.functional.runs import MARK, Run, agents_recipe, run_command, run_here, start_command
from tests.unit.generation.chat.endpoints import Engines
from tests.waiting import wait_until

pytest.importorskip("verifiers", reason="needs the extra verifiers")

PLUGINS = Path(__file__).parents[1] / "verifiers_plugins"
EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers_task"
PLAYED = {
    "chat": ["", "forgets", "changes the answer", "retries", "another model"],
    "messages": ["", "streams", "forgets"],
    "responses": ["", "streams", "asks again"],
}
"""Behaviours by dialect, of three turns each; "asks again" has up to six."""
HANGS = {
    "hang set-up": ("set-up: timeout", None),
    "hang play": ("play: timeout", 1.0),
    "hang finalize": ("finalize: timeout", None),
    "hang score": ("score: timeout", 0.0),
}
"""Reason that is counted, and reward, by what hangs: an agent is scored as it stands, a hung verifier pays nothing."""
FAILS = {
    "fail set-up": ("set-up: TaskError", "set-up fails"),
    "fail finalize": ("finalize: TaskError", "finalize fails"),
    "fail score": ("score: TaskError", "score fails"),
    "sandbox set-up": ("set-up: SandboxError", "the sandbox is gone"),
    "exits": ("play: HarnessError", "the program is broken"),
    "no program": ("play: HarnessError", "its program is not there"),
    "nan reward": ("score: no number", "the reward is nan"),
    "turn rewards 5": ("score: turn_rewards", "5 "),
}
DEADLINES = {"start": 8.0, "rollout": 8.0, "finalize": 8.0, "score": 8.0}


@dataclass
class Played:
    run: Run
    samples: dict[tuple[str, str], list[tuple[TrajectoryRef, Score]]]
    """By task name and behaviour."""
    tokenizer: Any


def recipe(model: Path, worlds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a recipe of one step over the tasks of all worlds, two samples of each."""
    tasks = sum(len(world["verifiers"]["taskset"]["behave"]) for world in worlds.values())
    entries = [{"dataset_name": "Verifiers", "env_name": name, "task_name": name} for name in worlds]
    return agents_recipe(model, tasks, entries, worlds)


def world(
    behave: list[str], dialect: str = "chat", turns: int = 3, notes: Path | None = None, **keys: Any
) -> dict[str, Any]:
    """Return the section of an environment. `notes`: one sample of each task behaves as said; None: all do."""
    harness = {"id": "counting_world", "dialect": dialect}
    taskset = {"behave": behave, "turns": turns, "notes": str(notes or "")}
    return {"verifiers": {"environment": "counting_world", "taskset": taskset, "harness": harness}, **keys}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("verifiers")
    make_puzzle_model(folder / "model0")
    deadlines = {f"{name}_timeout_s": seconds for name, seconds in DEADLINES.items()}
    worlds = {dialect: world(behave, dialect) for dialect, behave in PLAYED.items()}
    worlds["hangs"] = world([*HANGS], turns=2, notes=folder, **deadlines)
    worlds["fails"] = world([*FAILS], turns=2, notes=folder, max_row_attempts=2)
    with pytest.MonkeyPatch.context() as patch, recording_groups() as found:
        patch.syspath_prepend(str(PLUGINS))
        run = run_here("train", folder / "run", recipe(folder / "model0", worlds))
    assert run.code == 0, run.err
    samples = {
        (group.prompt["task_name"], group.prompt["extra_env_info"]["agent_task"]["behave"]): [
            *zip(group.samples, group.scores, strict=True)
        ]
        for group in found
    }
    return Played(run, samples, load_tokenizer(str(folder / "model0")))


def test_the_policy_agrees_with_the_engine_on_every_token(played: Played) -> None:
    """All tokens are trained under the prompt that the engine saw, or the log-probs would differ."""
    [line] = played.run.metrics()
    assert line["sequence_mult_prob_error_max"] == pytest.approx(1.0, abs=1e-5)
    assert line["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-6)
    assert 3 <= line["turns_max"] <= 6 and line["grad_norm"] > 0


@pytest.mark.parametrize(
    ("dialect", "behave"),
    [("chat", ""), ("messages", ""), ("messages", "streams"), ("responses", ""), ("responses", "streams")],
)
def test_a_conversation_is_one_sequence(played: Played, dialect: str, behave: str) -> None:
    """Each prompt begins with all tokens before it, though this API shows no tokens, and the program sends texts."""
    for sample, score in played.samples[dialect, behave]:
        trajectory: Trajectory = sample.ref
        assert trajectory.branches == () and sample.turns == 3 and score.reward in (0.0, 1.0)
        assert score.rewards_by_name == {"odd": score.reward, "answers": 3.0}
        generated = [turn for turn in trajectory.turns if turn.loss_mask]
        texts = [played.tokenizer.decode(turn.token_ids, skip_special_tokens=True) for turn in generated]
        assert score.reward == float(sum(map(len, texts)) % 2), "the world has read what the policy wrote"
        said = played.tokenizer.decode(trajectory.token_ids())
        assert said.startswith("<bos><user>task ") and said.count("go on<assistant>") == 2
        assert trajectory.weight_versions == ((1, 0, trajectory.length),)


def test_a_history_that_the_agent_changes_is_a_branch(played: Played) -> None:
    for key in (("chat", "forgets"), ("messages", "forgets"), ("chat", "changes the answer")):
        for sample, score in played.samples[key]:
            branches = 3 if key[1] == "changes the answer" else 2
            assert len(sample.ref.branches) == branches and sample.turns == 3, (key, score.reason)
            assert sample.ref.loss_mask().sum() == sample.generated_length > 0


def test_a_request_that_is_repeated_is_trained_once(played: Played) -> None:
    """The program closes its connection and asks once more, mostly while the engine answers."""
    for sample, score in played.samples["chat", "retries"]:
        assert sample.turns == 3 and sample.ref.branches == (), score.reason
    reasons = [score.reason for _, score in played.samples["chat", "retries"]]
    assert any(reason.endswith(" answers that the agent did not use are left out") for reason in reasons), reasons


def test_an_agent_that_only_asks_again_behind_a_cut_answer_is_stopped_and_trained_as_cut(played: Played) -> None:
    stopped = 0
    for sample, score in played.samples["responses", "asks again"]:
        generated = [turn.token_ids for turn in sample.ref.turns if turn.loss_mask]
        cut = [ids[-1] != played.tokenizer.eos_token_id for ids in generated]
        twice = [index for index in range(1, len(cut)) if cut[index - 1] and cut[index]]
        assert twice == [len(cut) - 1] or (not twice and len(cut) == 6), "it ends there"
        assert sample.ref.branches == () and score.reward is not None and sample.truncated == cut[-1]
        assert score.reason == f"{'max_output_tokens' if twice else 'agent_completed'}, {len(cut)} turns"
        stopped += bool(twice)
    assert stopped


def test_another_model_and_other_sampling_are_the_policys(played: Played) -> None:
    for sample, score in played.samples["chat", "another model"]:
        assert sample.turns == 3 and score.reward is not None


def test_what_hangs_is_ended_by_the_deadline_of_its_stage(played: Played) -> None:
    [line] = played.run.metrics()
    for behave, (counted, reward) in HANGS.items():
        (sample, score), (_, other) = sorted(played.samples["hangs", behave], key=lambda pair: not pair[1].failures)
        assert other.failures == () and other.reward is not None, (behave, other)
        assert score.failures == (counted,), (behave, score)
        assert (score.reward is None) == (reward is None) and (sample.ref is None) == (reward is None)
        assert behave != "hang score" or score.reward == 0.0
        assert sample.truncated or behave not in ("hang play", "hang score")
        assert line[f"scoring/failed_attempts/{counted.partition(':')[0]}"] >= 1


def test_what_fails_costs_its_sample_alone_and_is_never_scored_0(played: Played) -> None:
    [line] = played.run.metrics()
    for behave, (counted, reason) in FAILS.items():
        (sample, score), (_, other) = sorted(played.samples["fails", behave], key=lambda pair: not pair[1].failures)
        assert score.reward is None and sample.ref is None and reason in score.reason, (behave, score)
        assert score.failures == (counted,) * (2 if "Sandbox" in counted else 1)
        assert other.reward is not None and other.failures == ()
    lost = len(FAILS) + 2
    assert (line["num_failed_samples"], line["num_samples"]) == (
        lost,
        2 * sum(map(len, (*PLAYED.values(), HANGS, FAILS))),
    )
    assert f"samples without a reward, left out: {lost}" in played.run.out


def test_no_program_of_a_harness_is_left(played: Played) -> None:
    words = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK))
    assert not [word for word in words if b"agent.py\0http://127.0.0.1" in word and b"hang play" in word]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"environment": "no_such_world"}, "taskset 'no_such_world' not found"),
        ({"environment": "counting_world", "harness": "no_such"}, "harness 'no_such' not found"),
        ({"environment": "counting_world", "taskset": {"size": 3}}, "taskset.size: Extra inputs"),
        ({"environment": "counting_world", "runtime": "docker", "harness": {"id": "bash", "x": 1}}, "harness.x: Extra"),
        ({"environment": "counting_world", "harness": "codex"}, "use verifiers.runtime.type docker"),
        ({"environment": "counting_world", "runtime": "moon"}, "runtime"),
        ({"environment": "textarena"}, "textarena requires nltk and textarena"),
        ({"environment": "counting_world", "options": {"id": "no-such-env"}}, "environment 'no-such-env' not found"),
        ({"environment": "counting_world", "timeouts": 3}, "verifiers.timeouts: Extra inputs"),
        ({}, "verifiers.environment: Field required"),
    ],
)
def test_what_is_not_there_is_said_before_the_start(
    section: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))
    cls, _ = create_env_class("verifiers")
    with pytest.raises(EnvironmentConfigError, match=message) as raised:
        cls.check({"verifiers": section})
    assert str(raised.value).startswith("env.verifiers") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_world", {}, "the taskset no_such_world of env.NAME.verifiers: .*not found"),
        ("counting_world", {"taskset": {"size": 3}}, "verifiers: size: Extra inputs are not permitted$"),
        ("counting_world", {"selects": 3}, "dataset_kwargs.selects: unknown; known are environment, taskset, select"),
        ("counting_world", {"select": {"skip": 1}}, "the taskset counting_world has no tasks"),
        ("", {}, "name the taskset in env.NAME.verifiers.environment"),
    ],
)
def test_tasks_that_are_not_there(
    name: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))
    with pytest.raises(DataError, match=message):
        _tasks(name, options)


class ShellEngines(Engines):
    """Engines with real prompts, whose policy looks around with Codex's shell twice, and then ends, or is `cut`."""

    def __init__(self, folder: Path, *, cut: bool) -> None:
        super().__init__()
        make_tokenizer(folder, string.printable)
        tokenizer = load_tokenizer(str(folder))
        call = '<tool_call>{"name": "exec_command", "arguments": {"cmd": "echo so"}}</tool_call>'
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in (call, call, "done", "done")]
        self.asked = list[list[int]]()

        def generate(requests: list[GenerationRequest], sampling: Sampling) -> Iterator[Trajectory]:
            (turn,), ids = requests[0].prompt, torch.tensor(answers[len(self.asked)])
            is_cut = cut and len(self.asked) >= 2
            ids = ids[:-1] if is_cut else ids
            self.asked.append([*turn.token_ids.tolist(), *ids.tolist()])
            said = Turn("assistant", ids, torch.full((len(ids),), -0.5), True)
            spans, stop = ((4, 0, len(turn) + len(ids)),), None if is_cut else tokenizer.eos_token_id
            yield Trajectory("chat", 0, (turn, said), spans, "length" if is_cut else "stop", is_cut, stop)

        config = ChatConfig("policy", (Sampling(200),), tool_parser="hermes")
        self.chat = EngineChat(config, tokenizer, generate, max_model_len=10**6, vocab_size=len(tokenizer))
        for worker in self.workers:
            worker.stream = self.stream  # type: ignore[method-assign]

    def stream(self, method: str, kind: str, body: Any, seed: int, **_: Any) -> Iterator[Reply]:
        yield self.chat.answer(kind, body, seed)


@pytest.mark.skipif(
    not shutil.which("uv") or not [*Path("/var/tmp").glob("vf-codex-*/.ready")],
    reason="needs uv, and Codex as verifiers installs it",
)
@pytest.mark.parametrize("cut", [False, True])
def test_codex_is_trained_on_the_tokens_that_the_engine_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """Codex takes an answer that was cut for a connection that broke, and asks again."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    engines = ShellEngines(tmp_path, cut=cut)
    endpoint = Endpoint(engines, model="policy", token="secret", host="127.0.0.1", reads_calls=True)
    codex = VerifiersEnvironment({"verifiers": {"environment": "counting_world", "harness": "codex_here"}})
    [task] = _tasks("counting_world", {})
    request = AgentRequest("p", 0, task.data.model_dump(mode="json"), 0, 1)
    [outcome] = codex.play([request], Sampling(200), endpoint.address)
    codex.shutdown()
    endpoint.close()
    assert outcome.trajectory is not None and outcome.trajectory.branches == (), outcome.score.reason
    assert len(engines.asked) == 3 + cut and outcome.trajectory.token_ids().tolist() == engines.asked[-1]
    assert outcome.trajectory.truncated == cut and outcome.score.reward is not None
    assert outcome.trajectory.weight_versions == ((4, 0, len(engines.asked[-1])),)


def test_the_example_with_an_agent_that_compacts_its_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step from the untrained model, which calls the tool now and then: its note for a new context is trained."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    make_task(tmp_path)
    words = [f"policy.model_name={tmp_path / 'untrained'}", "grpo.max_num_steps=1", "grpo.max_val_samples=4"]
    words += ["policy.generation.vllm_cfg.kv_cache_memory_gb=0.1", "grpo.num_prompts_per_step=4"]
    words += ["policy.train_global_batch_size=32"]
    run = run_here("train", tmp_path / "grpo", {"defaults": str(EXAMPLE / "compaction.yaml")}, *words)
    assert run.code == 0, run.err
    [line] = run.metrics()
    assert (line["num_samples"], line["num_failed_samples"]) == (32, 0) and line["turns_max"] == 3
    assert line["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5) and line["reward/calls"] > 0


@pytest.mark.every_state
def test_a_killed_environment_is_restarted_and_no_process_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that runs the agents is killed while others play: they are asked again, in the same run."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS), prepend=":")
    monkeypatch.setenv(MARK, "verifiers")
    make_puzzle_model(tmp_path / "model0")
    worlds = {"chat": world(["slow", "kill score", "", "hang play"], turns=2, notes=tmp_path, rollout_timeout_s=20.0)}
    whole = recipe(tmp_path / "model0", worlds) | {"cluster": {"backend": "ray", "platform": "cpu"}}
    run = run_command("train", tmp_path / "run", whole)
    assert run.code == 0, run.err
    [line] = run.metrics()
    assert (tmp_path / "killed").exists() and "environment-chat" in run.out + run.err
    assert (line["num_failed_samples"], line["num_samples"]) == (0, 8)
    assert marked(f"{MARK}=verifiers") == []


@pytest.mark.every_state
def test_code_that_holds_the_loop_is_ended_with_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward function that never returns costs its own samples; the others come from the restarted environment."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS), prepend=":")
    make_puzzle_model(tmp_path / "model0")
    worlds = {
        "chat": world(["", "block score", "block set-up"], notes=tmp_path, score_timeout_s=10.0, start_timeout_s=10.0)
    }
    whole = recipe(tmp_path / "model0", worlds) | {"cluster": {"backend": "ray", "platform": "cpu"}}
    run = run_command("train", tmp_path / "run", whole)
    assert run.code == 0, run.err
    [line] = run.metrics()
    assert (line["num_failed_samples"], line["num_samples"]) == (2, 6)
    assert line["scoring/failed_attempts/score"] == 1 and line["scoring/failed_attempts/set-up"] == 1
    assert "its code has held the event loop for " in run.out


@pytest.mark.every_state
def test_a_killed_run_leaves_no_program_of_a_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the local backend the driver runs the agents itself, and their programs have sessions of their own."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS), prepend=":")
    monkeypatch.setenv(MARK, str(tmp_path))
    make_puzzle_model(tmp_path / "model0")
    process = start_command("train", tmp_path / "run", recipe(tmp_path / "model0", {"chat": world(["hang play"])}))

    def programs() -> list[int]:
        return [pid for pid in marked(f"{MARK}={tmp_path}") if b"agent.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    try:
        wait_until(lambda: len(programs()) == 2, "two programs of the harness", 120.0)
        process.kill()
        wait_until(lambda: not marked(f"{MARK}={tmp_path}"), "the end of all processes")
    finally:
        process.kill()
        process.communicate()
