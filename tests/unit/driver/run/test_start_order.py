"""On GPUs that policy and engines share, the engines take their memory first and give it away; elsewhere both start at
once. A replaced engine waits until the policy has given its memory away."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.cluster import WorkerDied
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.policy import refit_step
from grpo_mcore.driver.run.checks import Model
from grpo_mcore.driver.run.setup import start_policy_and_engines, wait_until_ready
from grpo_mcore.families import shape_of
from grpo_mcore.families.known import known_configs
from grpo_mcore.generation import EngineConfig
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.recipe import MasterConfig, policy_layout
from tests.clocks import StandingClock
from tests.recipes import small_recipe


class Answer:
    def __init__(self, events: list[str], event: str, whom: str) -> None:
        self._events, self._event, self.whom, self.purpose = events, event, whom, event

    def result(self) -> None:
        self._events.append(self._event)


class Node:
    """A cluster that writes down who is spawned, who is called and whose start is waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.store, self.call_timeout_s, self.address = None, 60.0, "here"
        self.clock = StandingClock()
        self.variables: dict[str, Any] = {}
        self.engines: list[EngineConfig] = []

    def worker(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            spawn_seconds=0.0,
            ready=lambda: Answer(self.events, f"{name} is ready", name),
            call=lambda method, *_, **__: Answer(self.events, f"{name} {method}", name),
        )

    def spawn(self, name: str, *arguments: Any, env: Any = None, **_: Any) -> Any:
        self.variables[name] = env
        self.engines += [one for one in arguments if isinstance(one, EngineConfig)]
        self.events.append(f"spawn {name}")
        return self.worker(name)

    def spawn_group(self, name: str, cls: Any, arguments: list[Any], env: Any, **_: Any) -> list[Any]:
        self.variables[name] = env
        self.events.append(f"spawn {name}" + (", built later" if arguments[0][6] is True else ""))
        return [self.worker(f"{name}-{rank}") for rank in range(len(arguments))]

    def ready(self, things: Any, timeout_s: float, purpose: str, watch: Any = None, *, patient: bool = False) -> Any:
        return things[:1]

    def stop(self, workers: list[Any]) -> None:
        self.events += [f"stop {worker.name}" for worker in workers]


def config() -> MasterConfig:
    return small_recipe(cluster={"gpus_per_node": 1})


def started(recipe: MasterConfig, *, gpu: bool = False) -> Node:
    node, shape = Node(), shape_of(next(iter(known_configs().values())))
    model = Model("m", shape, policy_layout(recipe.policy.megatron_cfg, 1), Platform("gpu" if gpu else "cpu"))
    start_policy_and_engines(recipe, node, model)  # type: ignore[arg-type]
    return node


def test_engines_come_first_on_shared_gpus_and_sleep_before_the_policy_is_built() -> None:
    assert started(config(), gpu=True).events == [
        "spawn policy, built later", "spawn engine-0", "engine-0 is ready", "engine-0 release", "policy-0 build",
        "policy-0 is ready", "engine-0 is ready",
    ]  # fmt: skip


def test_on_cpu_both_start_at_once() -> None:
    assert started(config()).events == [
        "spawn policy", "spawn engine-0", "policy-0 is ready", "engine-0 is ready",
    ]  # fmt: skip


def test_the_start_tells_who_is_ready_and_what_the_late_ones_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    node.last_log_line = lambda worker: f"{worker} loads shard 3 of 8"  # type: ignore[attr-defined]

    def ready(things: list[Any], timeout_s: float, purpose: str, watch: Any = None, *, patient: bool = False) -> Any:
        for _ in range(25):
            node.clock.at += 1
            watch()
        return things[:1]

    monkeypatch.setattr(node, "ready", ready)
    workers = [node.worker(name) for name in ("policy-0", "policy-1", "engine-0")]
    with caplog.at_level("INFO", "grpo_mcore"):
        wait_until_ready(config(), node, workers)  # type: ignore[arg-type]
    assert [line.strip() for line in caplog.messages] == [
        "still starting after 9 s: policy-0 and 2 more: policy-0 loads shard 3 of 8",
        "still starting after 18 s: policy-0 and 2 more: policy-0 loads shard 3 of 8",
        "still starting after 27 s: policy-1 and 1 more: policy-1 loads shard 3 of 8",
        "still starting after 36 s: policy-1 and 1 more: policy-1 loads shard 3 of 8",
        "still starting after 45 s: policy-1 and 1 more: policy-1 loads shard 3 of 8",
        "policy: ready after 50 s",
        "still starting after 54 s: engine-0: engine-0 loads shard 3 of 8",
        "still starting after 63 s: engine-0: engine-0 loads shard 3 of 8",
        "still starting after 72 s: engine-0: engine-0 loads shard 3 of 8",
        "engine: ready after 75 s",
    ]


def test_policy_and_engines_have_the_environment_variables_of_the_recipe() -> None:
    recipe = config()
    recipe.policy.megatron_cfg.env_vars = {"OMP_WAIT_POLICY": "ACTIVE", "A": "1"}
    recipe.policy.generation.vllm_cfg.env_vars = {"B": "2"}
    of = started(recipe).variables
    assert of["policy"].items() >= {"OMP_WAIT_POLICY": "ACTIVE", "A": "1"}.items()
    assert of["engine-0"]["B"] == "2" and "A" not in of["engine-0"]


@pytest.mark.parametrize(("peft", "loaded"), [({}, "dummy"), ({"enabled": True, "refit": "adapters"}, "auto")])
def test_engines_load_no_weights_that_the_first_refit_brings(peft: dict[str, Any], loaded: str) -> None:
    """60 GB from a shared disk, overwritten before the first request. Adapters alone come without the model's."""
    recipe = config()
    recipe.policy.megatron_cfg.peft = recipe.policy.megatron_cfg.peft.model_copy(update=peft)
    assert [engine.load_format for engine in started(recipe).engines] == [loaded]


@pytest.mark.parametrize("shared", [True, False])
def test_a_successor_waits_for_the_policys_memory(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    engines = EngineGroup(
        node, [EngineSlot(node.worker("engine-0"))], sleeps=shared,
        start=lambda number: [node.spawn(f"engine-{number}")], restarts=Retries(1, 0.0),
    )  # type: ignore[arg-type]  # fmt: skip
    engines.replace([0], WorkerDied("engine-0", "generate_refs", "its process ended"))
    assert node.events == ["stop engine-0"] + ([] if shared else ["spawn engine-0"])

    cluster = SimpleNamespace(uninterrupted=lambda grace_s: nullcontext())
    policy = SimpleNamespace(offload=lambda: node.events.append("offload"), cluster=cluster)
    monkeypatch.setattr(refit_step, "refit_once", lambda policy, group, **_: node.events.append("refit"))
    refit_step.refit_engines(policy, engines, config())  # type: ignore[arg-type]
    assert node.events[1:] == [*(["offload"] if shared else []), "spawn engine-0", "engine-0 is ready", "refit"]
    assert not engines.lost
