"""The documented entry to asynchronous training: the one loop, with the age of its argument."""

from typing import Any

import pytest

from grpo_mcore.algorithms import grpo
from grpo_mcore.cluster import LocalCluster
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.driver.record.run_record import schedule_config
from grpo_mcore.recipe import RecipeError
from tests.unit.step.step_cases import config

CORRECTED = {"use_importance_sampling_correction": True}


def call(recipe: Any, monkeypatch: pytest.MonkeyPatch, sleeps: bool = False, **age: int) -> Any:
    """The configuration that the loop gets."""
    seen: list[Any] = []
    monkeypatch.setattr(grpo, "grpo_train", lambda *args: seen.append(args[-1]))
    engines = EngineGroup(LocalCluster(), [], sleeps)
    grpo.async_grpo_train(None, engines, *[None] * 9, recipe, **age)  # type: ignore[arg-type]
    return seen[0]


def test_the_loop_gets_the_age(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = config(CORRECTED, async_grpo={"in_flight_weight_updates": True})
    for age in ({}, {"max_trajectory_age_steps": 3}):
        got = call(recipe, monkeypatch, **age)
        limits = schedule_config(got, validates=False)
        assert limits.max_trajectory_age == age.get("max_trajectory_age_steps", 1) and limits.refit_in_flight
        assert got.loss_fn == recipe.loss_fn and got.policy == recipe.policy and got.data == recipe.data
    assert schedule_config(recipe, validates=False).max_trajectory_age == 0
    assert (
        schedule_config(call(recipe, monkeypatch, max_trajectory_age_steps=0), validates=False).max_trajectory_age == 0
    )


def test_what_it_cannot_do_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="needs loss_fn.use_importance_sampling_correction: true"):
        call(config(), monkeypatch)
    with pytest.raises(ValueError, match="set grpo.async_grpo.enabled before setup"):
        call(config(CORRECTED), monkeypatch, sleeps=True)
