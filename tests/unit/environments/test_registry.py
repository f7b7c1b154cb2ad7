"""Environments by name and by import path."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import ray
import torch

from grpo_mcore.environments import create_env, create_env_class, register_env, registry
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from grpo_mcore.environments.math.math_environment import MathEnvConfig, MathEnvironment
from grpo_mcore.recipe.derived import RULES
from grpo_mcore.rollout.trajectory import Trajectory


class EchoEnvironment(EnvironmentInterface):
    needs = {"cpus": 2.0, "gpus": 1.0}

    def step(self, message_log_batch, metadata):
        n = len(metadata)
        return EnvironmentReturn([{}] * n, list(metadata), [None] * n, [0.5] * n, [True] * n, ["x"] * n, ["y"] * n)


def test_by_name():
    assert create_env_class("math") == (MathEnvironment, {"cpus": 1.0, "gpus": 0.0})
    of_rules = [name for name, path in registry._ENVIRONMENTS.items() if path.endswith(":RuleEnvironment")]
    assert sorted(of_rules) == sorted(RULES), "a recipe knows which names of rewards its environments give"


@ray.remote(max_restarts=-1)
class RayEnvironment(EchoEnvironment):
    """As NeMo RL has them. It does not use what it may leave out there."""

    def step(self, message_log_batch, metadata):
        n = len(metadata)
        return EnvironmentReturn([{}] * n, None, None, torch.full((n,), 0.5), torch.ones(n), None)


def test_a_class_that_is_a_ray_actor_is_taken_for_its_class():
    cls, needs = create_env_class(f"{__name__}:RayEnvironment")
    assert needs == EchoEnvironment.needs and issubclass(cls, EchoEnvironment)
    [outcome] = pickle.loads(ray.cloudpickle.dumps(cls))({}).advance(
        [{"a": 1}], Trajectory("a", 0, (), (), "stop", False)
    )
    assert (outcome.reward, outcome.answer, outcome.metadata, outcome.stop_strings) == (0.5, None, None, None)


class AsyncEnvironment(EchoEnvironment):
    async def step(self, message_log_batch, metadata):
        return super().step(message_log_batch, metadata)


def test_a_class_whose_step_is_async_is_taken():
    cls, _ = create_env_class(f"{__name__}:AsyncEnvironment")
    [outcome] = cls({}).advance([{}], Trajectory("a", 0, (), (), "stop", False))
    assert outcome.reward == 0.5


class Other:
    """It has a step, and no more."""

    def step(self, message_log_batch, metadata): ...


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("test_by_name", "is function, which does not derive from EnvironmentInterface .* a component of env.rules"),
        ("Other", "is the class Other, which does not derive from EnvironmentInterface"),
    ],
)
def test_what_is_no_environment_is_refused(name, why):
    with pytest.raises(EnvironmentConfigError, match=why):
        create_env_class(f"{__name__}:{name}")


class GivenEnvironment(EnvironmentInterface):
    """Gives each conversation the reward and the parts in its metadata."""

    def step(self, message_log_batch, metadata):
        n = len(metadata)
        rewards, parts = [row["reward"] for row in metadata], [row.get("parts", {}) for row in metadata]
        return EnvironmentReturn(
            [{}] * n, list(metadata), [None] * n, rewards, [True] * n, [None] * n, ["right"] * n, rewards_by_name=parts
        )


def test_a_reward_that_is_no_finite_number_costs_its_own_sample():
    rows = [{"reward": reward} for reward in ("1.0", float("nan"), float("inf"), 10**400, [1.0], None)]
    rows += [{"reward": 1.0, "parts": {"a": part}} for part in (float("nan"), "1.0", None)]
    rows.append({"reward": True, "parts": {"a": 1}})
    outcomes = GivenEnvironment().advance(rows, *[Trajectory("a", 0, (), (), "stop", False)] * len(rows))
    assert [outcome.reward for outcome in outcomes] == [None] * 9 + [1.0]
    assert outcomes[0].reason == "GivenEnvironment returned rewards with '1.0', which is not a finite number"
    assert outcomes[5].reason == "right" and outcomes[6].rewards_by_name == {}
    assert outcomes[9].rewards_by_name == {"a": 1.0}


class ReadingEnvironment(EnvironmentInterface):
    """Reads the truth, which is text, in the metadata themselves."""

    def step(self, message_log_batch, metadata):
        for row in metadata:
            row["truth"] = json.loads(row["truth"])
        n = len(metadata)
        rewards = [float(row["truth"]["is"] == 5) for row in metadata]
        return EnvironmentReturn([{}] * n, list(metadata), [None] * n, rewards, [True] * n, [None] * n, [""] * n)


def test_samples_of_a_prompt_have_metadata_of_their_own():
    shared = {"truth": '{"is": 5}'}
    outcomes = ReadingEnvironment().advance([shared] * 2, *[Trajectory("a", 0, (), (), "stop", False)] * 2)
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0] and shared == {"truth": '{"is": 5}'}


@pytest.mark.parametrize(
    ("section", "reward", "solved"),
    [({}, 0.5, None), ({}, 1.0, True), ({"solved_at": 0.4}, 0.5, True), ({"solved_at": 0.6}, 0.5, False)],
)
def test_the_section_says_from_which_reward_on_a_sample_is_solved(section, reward, solved):
    (outcome,) = GivenEnvironment(section).advance([{"reward": reward}], Trajectory("a", 0, (), (), "stop", False))
    assert outcome.solved is solved
    assert MathEnvConfig.read(section).solved_at == section.get("solved_at", 1.0)


@pytest.mark.parametrize("path", [f"{__name__}:EchoEnvironment", f"{__name__}.EchoEnvironment"])
def test_by_import_path(path):
    cls, needs = create_env_class(path)
    assert cls.__name__ == "EchoEnvironment" and needs == {"cpus": 2.0, "gpus": 1.0}
    env = create_env(env_name=path, env_config={"a": 1})
    assert env.config == {"a": 1}
    assert env.advance([]) == []


def test_a_registered_name_is_found_and_not_taken_twice():
    register_env("echo", f"{__name__}:EchoEnvironment")
    register_env("echo", f"{__name__}:EchoEnvironment")
    assert create_env_class("echo")[0].__name__ == "EchoEnvironment"
    with pytest.raises(EnvironmentConfigError, match="'echo' is taken by"):
        register_env("echo", "other:Environment")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", r"unknown environment 'maths': did you mean 'math'\? known are"),
        ("no_such.module:Env", "cannot import the environment 'no_such.module:Env': No module named 'no_such'"),
        ("json:Env", "cannot import the environment 'json:Env'"),
    ],
)
def test_a_wrong_name_says_what_is_known(name, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        create_env_class(name)


def test_what_worker_processes_import_is_light():
    heavy = "{'torch', 'ray', 'vllm', 'transformers', 'megatron'} & {name.split('.')[0] for name in sys.modules}"
    modules = "verifier_pool, grpo_mcore.environments.math.verifiers, grpo_mcore.environments.rules.rules"
    program = f"import sys, grpo_mcore.environments.{modules}; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", program], check=True)
