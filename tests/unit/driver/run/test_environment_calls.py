"""`env.NAME.concurrency` and `env.NAME.batch`: read beside the environment's own keys, and checked before the start."""

from typing import Any

import pytest

from grpo_mcore.driver.rollouts.scoring import BatchLimits
from grpo_mcore.driver.run.checks import SetupError
from grpo_mcore.driver.run.environment_checks import calls_of, environment_of
from grpo_mcore.environments.rules.rule_environment import RuleEnvironment
from grpo_mcore.recipe import MasterConfig
from tests.recipes import small_recipe


def recipe(section: dict[str, Any]) -> MasterConfig:
    return small_recipe(1, env={"math": section})


def test_how_an_environment_is_called_is_not_a_key_of_its_class() -> None:
    config = recipe({"num_workers": 1, "concurrency": 3, "batch": {"max_size": 5, "max_wait_s": 0.5}})
    cls, section, _ = environment_of("math", "math", config)
    assert section == {"num_workers": 1}
    assert calls_of("math", cls, section, config) == (3, BatchLimits(5, 0.5))
    assert calls_of("math", cls, {}, recipe({})) == (cls.concurrent_calls, BatchLimits(32, 0.0))


def test_judges_are_asked_in_small_calls_or_in_one_that_blocks() -> None:
    """With the local backend a call blocks the loop, so that all samples wait for one call together."""
    judge = {"type": "function", "path": "tests.unit.environments.rules.judges:counted", "concurrency": 16}
    section, config = {"components": {"judge": judge}}, recipe({})
    assert calls_of("rules", RuleEnvironment, section, config) == (48, BatchLimits(4))
    config.cluster.backend = "local"
    assert calls_of("rules", RuleEnvironment, section, config) == (48, BatchLimits(10**6, 3600.0))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"concurrency": 0}, "env.math.concurrency must be a number of calls above 0, got 0"),
        ({"concurrency": True}, "env.math.concurrency must be"),
        ({"batch": 7}, "env.math.batch holds max_size and max_wait_s: got 7"),
        ({"batch": {"size": 7}}, "env.math.batch holds max_size and max_wait_s: unknown key 'size'"),
        ({"batch": {"max_size": 0}}, "env.math.batch.max_size must be a number of samples above 0, got 0"),
        ({"batch": {"max_size": 1.5}}, "env.math.batch.max_size must be"),
        ({"batch": {"max_wait_s": -1}}, "env.math.batch.max_wait_s must be a number of seconds from 0 on, got -1"),
        ({"batch": {"max_wait_s": float("inf")}}, "env.math.batch.max_wait_s must be"),
    ],
)
def test_wrong_values_are_named(section: dict[str, Any], said: str) -> None:
    config = recipe(section)
    cls, keys, _ = environment_of("math", "math", config)
    with pytest.raises(SetupError, match=said):
        calls_of("math", cls, keys, config)
