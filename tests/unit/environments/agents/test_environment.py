"""The base of environments that run agents: attempts, failures, and a sample whose code holds the event loop."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from grpo_mcore.environments.agents import environment
from grpo_mcore.environments.agents.environment import AgentEnvironment, PolicyEndpoint
from grpo_mcore.environments.agents.samples import AgentFailure, AgentOutcome, AgentSample, ModelCall
from grpo_mcore.environments.agents.stages import AgentConfig
from grpo_mcore.generation.endpoint import EndpointAddress
from grpo_mcore.rollout.trajectory import AgentRequest, Sampling, Score

ENDPOINT = EndpointAddress("http://127.0.0.1:9", "token", "policy")


class Config(AgentConfig):
    section: ClassVar[str] = "env.test"


class Gone(RuntimeError):
    """An error after which no other sample can succeed."""


class Agents(AgentEnvironment):
    """Behaves as each task says. `tried`: attempts by task; `release`: ends those that hold the loop."""

    config_class = Config
    ends_run = Gone

    def __init__(self, **config: Any) -> None:
        self.tried: dict[str, int] = {}
        self.release = threading.Event()
        super().__init__(config)

    async def attempt(
        self, request: AgentRequest, sampling: Sampling, endpoint: PolicyEndpoint, start: float
    ) -> tuple[AgentSample, Sequence[Any], Callable[[], Any]]:
        name = request.uid
        self.tried[name] = self.tried.get(name, 0) + 1
        if name == "blocks":
            self.release.wait(30)
        if name == "gone":
            raise Gone("no agent")
        if name == "again" and self.tried[name] < 3:
            raise AgentFailure("the sandbox is gone", again=True, kind="set-up: SandboxError")
        if name == "final":
            raise AgentFailure("the task is wrong", kind="score: TaskError")
        if name == "odd form":
            raise KeyError("response")
        call = ModelCall([1, 2], [3], [-0.5], "three")
        return (
            AgentSample(((call,),), False, Score(1.0, "three", "1 turn", 0.0), "one two"),
            [((4, 0, 3),)],
            lambda: "result",
        )


def play(agents: Agents, *names: str) -> dict[str, AgentOutcome]:
    requests = [AgentRequest(name, 0, {}, number, number) for number, name in enumerate(names)]
    return {outcome.uid: outcome for outcome in agents.play(requests, Sampling(8), ENDPOINT, keep_results=True)}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "BEAT_S", 0.05)
    monkeypatch.setattr(environment, "BACKOFF_S", 0.0)


def test_what_fails_costs_its_sample_alone() -> None:
    agents = Agents(solved_at=0.5)
    found = play(agents, "whole", "again", "final", "odd form")
    agents.shutdown()
    assert agents.tried == {"whole": 1, "again": 3, "final": 1, "odd form": 1}
    for name in ("whole", "again"):
        outcome = found[name]
        assert outcome.trajectory is not None and outcome.trajectory.token_ids().tolist() == [1, 2, 3]
        assert outcome.trajectory.weight_versions == ((4, 0, 3),) and outcome.result == "result"
        assert (outcome.score.reward, outcome.score.solved_at) == (1.0, 0.5)
    assert found["again"].score.failures == ("set-up: SandboxError",) * 2
    for name, reason in (("final", "the task is wrong"), ("odd form", "the agent's result cannot be read: KeyError")):
        score = found[name].score
        assert found[name].trajectory is None and score.reward is None and reason in score.reason
    assert found["final"].score.failures == ("score: TaskError",)


def test_what_no_other_sample_would_do_better_with_is_raised() -> None:
    agents = Agents()
    with pytest.raises(Gone, match="no agent"):
        play(agents, "gone")
    agents.shutdown()


def test_a_sample_that_holds_the_event_loop_is_named_and_the_environment_ends() -> None:
    """The code cannot be interrupted: its sample has no reward, and the call ends, so that the worker is restarted."""
    agents = Agents(rollout_timeout_s=0.3)
    requests = [AgentRequest(name, 0, {}, number, number) for number, name in enumerate(("whole", "blocks", "later"))]
    found = list[AgentOutcome]()
    with pytest.raises(AgentFailure, match="blocks: its code holds the event loop; the others are asked again"):
        for outcome in agents.play(requests, Sampling(8), ENDPOINT):
            found.append(outcome)
    last = found[-1]
    assert (last.uid, last.score.reward, last.score.failures) == ("blocks", None, ("play: timeout",))
    assert last.score.reason.startswith("play: its code has held the event loop for ")
    other = Agents()
    assert play(other, "whole")["whole"].score.reward == 1.0, "it has a loop of its own"
    other.shutdown()
    agents.shutdown()  # does not wait for the loop
    agents.release.set()


def test_all_agents_of_a_process_share_a_loop() -> None:
    """Libraries keep locks that are bound to the loop in which they were first waited for."""
    first, second = Agents(), Agents()
    assert first._agents is second._agents
    first.shutdown()
    assert play(second, "whole")["whole"].score.reward == 1.0
    second.shutdown()
