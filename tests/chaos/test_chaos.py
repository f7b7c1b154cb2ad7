"""Runs whose processes are killed, one after the other, reach their planned end by themselves.

`make test` kills a driver. `pytest --chaos tests/chaos` kills one process of each kind, and then at every state of the
step and of the refit; that takes minutes.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.observe import audit, read_ledger, read_metrics
from tests.chaos.kills import DRIVER, GCS, RAYLET, Kill
from tests.chaos.runs import LOG, recipe_of, write_plan
from tests.functional.runs import TIME_DEPENDENT, Run, Task, finished, write_recipe

DEADLINE_S = 2400.0
"""Seconds for a whole campaign, on a busy machine. A hang is a failure."""

ENGINE, ENVIRONMENT, POLICY = "engine-0", "environment-math", "policy-0"

# The calls of a refit in order: open the plan, send and stage, commit, release the old weights, prepare the engines.
REFIT = ("start_refit", "send_refit", "stage_refit", "commit_refit", "finish_refit", "prepare")

CAMPAIGNS = {
    "one-of-each": [Kill(ENGINE, "generate_refs"), Kill(ENVIRONMENT, "advance"), Kill(POLICY, "train", steps=2)],
    "engine-in-a-refit": [Kill(ENGINE, at) for at in REFIT],
    "engine-in-a-step": [
        *(Kill(ENGINE, at) for at in ("generate_refs", "advance", "receive")),
        *(Kill(ENGINE, at, steps=2) for at in ("train", "start_save")),  # noticed in the next refit
    ],
    "engine-hangs": [Kill(ENGINE, at, hangs=True) for at in ("generate_refs", "commit_refit")],
    "engine-without-names": [Kill(ENGINE, "generate_refs", nameless=True), Kill(ENGINE, "commit_refit")],
    "environment": [Kill(ENVIRONMENT, at) for at in ("generate_refs", "advance", "train", "commit_refit")],
    "policy-in-a-refit": [Kill(POLICY, at, steps=2) for at in ("open_refit", "send_refit", "generate_refs")],
    "policy-in-a-step": [Kill(POLICY, at, steps=2) for at in ("receive", "train", "start_save", "is_saved")],
    "head": [Kill(GCS, "generate_refs", steps=2), Kill(RAYLET, "train", steps=2), Kill(GCS, "stage_refit", steps=2)],
}
PHASES = ("generate_refs", "advance", "receive", "train", "start_save", "stage_refit", "commit_refit")
RAYLETS = [Kill(RAYLET, at, steps=2, hangs=hangs) for hangs in (False, True) for at in PHASES]
DRIVER_STATES = [("stage_refit", "commit_refit", "generate_refs", "advance"), ("train", "start_save", "is_saved")]
CASES = sum(map(len, [*CAMPAIGNS.values(), *DRIVER_STATES])) + 1
PATIENCE_S = 40.0
"""Deadline in seconds of a call to an engine that hangs."""


def survive(folder: Path, recipe: dict[str, Any], kills: list[Kill]) -> Run:
    """Run with these kills. Assert that it ends as planned, no prompt was lost, and every kill has happened."""
    write_plan(folder, kills)
    path = write_recipe(folder, recipe)
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.runs", str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        # Without the second, Ray looks for a dead head for a minute.
        env={**os.environ, "PYTHONUNBUFFERED": "1", "RAY_gcs_rpc_server_reconnect_timeout_s": "5"},
    )
    run = Run(folder, done.returncode, done.stdout, done.stderr)
    print(run.out, run.err)
    assert run.code == 0, run.err
    assert (folder / LOG).read_text().splitlines() == [kill.name for kill in kills]
    found = audit(read_ledger(run.checkpoints / "ledger.jsonl"))
    steps = recipe["grpo"]["max_num_steps"]
    assert not found.flaws and found.steps == steps and found.fates["trained on"] == 4 * steps
    lost = sum(kill.victim in (POLICY, DRIVER, GCS, RAYLET) for kill in kills)
    noticed = run.err.count("; it goes on ")
    hangs = sum(kill.hangs for kill in kills if kill.victim in (GCS, RAYLET))  # workers that have begun need neither
    assert lost - hangs <= noticed <= lost
    with_the_node = sum(kill.victim == RAYLET for kill in kills)  # an environment's death may be noticed first
    assert len(kills) - lost <= found.restarts <= len(kills) - lost + with_the_node
    return run


def steps_of(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of every step, as the last process that did it has written them."""
    rows = read_metrics(run.logs / "metrics.jsonl", "train")
    return [{name: value for name, value in row.items() if not name.startswith(TIME_DEPENDENT)} for row in rows]


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.every_state
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_processes_are_killed_and_the_run_goes_on(tmp_path: Path, task: Task, model: Path, campaign: str) -> None:
    kills = CAMPAIGNS[campaign]
    patience = {"step_timeout_s": PATIENCE_S} if any(kill.hangs for kill in kills) else {}
    survive(tmp_path, recipe_of(task, model, steps=sum(kill.steps for kill in kills) + 2, **patience), kills)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.every_state
@pytest.mark.parametrize("kill", RAYLETS, ids=lambda kill: kill.name)
def test_the_only_raylet_is_lost_and_one_restart_is_enough(tmp_path: Path, task: Task, model: Path, kill: Kill) -> None:
    """Whichever worker's death is noticed first: each restart makes progress, so one in a row is allowed."""
    recipe = recipe_of(task, model, steps=4, max_restarts=1)
    survive(tmp_path, recipe, [kill])


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("states", "critic"),
    [
        ((), False),
        *(pytest.param(states, False, marks=pytest.mark.every_state) for states in DRIVER_STATES),
        pytest.param(("train", "train_critic"), True, marks=pytest.mark.every_state),  # between critic and actor: train
    ],
    ids=lambda value: ("critic" if value else "") if isinstance(value, bool) else f"{' '.join(value)} rename".strip(),
)
def test_a_driver_is_killed_and_every_step_comes_out_the_same(
    tmp_path: Path, task: Task, model: Path, states: tuple[str, ...], critic: bool
) -> None:
    """The run, all in one process, is bit-identical to an uninterrupted one of another process. Checkpoints are written
    during the next steps; the last kill comes just before one gets its name, so the checkpoint of the step before is
    used. The user sees no library's warnings."""
    recipe = recipe_of(task, model, 2 * len(states) + 4, backend="local")
    recipe |= {"ppo": {"critic_epochs": 2}, "value": {"megatron_cfg": {"optimizer": {"lr": 2.0e-3}}}} if critic else {}
    kills = [*(Kill(DRIVER, at, steps=2) for at in states), Kill(DRIVER, "rename", nth=2, steps=2)]
    run = survive(tmp_path / "killed", recipe, kills)
    assert "Warning: Transformer" not in run.err and "deprecated" not in run.err
    calm = finished("train", tmp_path / "calm", recipe, "cluster.max_restarts=0")
    assert steps_of(run) == steps_of(calm)


def test_the_campaigns_are_many() -> None:
    assert CASES >= 24
