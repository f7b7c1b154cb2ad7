"""The Gym environment with a Gym that fails or is not there. tests/functional/test_nemo_gym.py has whole rollouts."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_mcore.environments import create_env, create_env_class
from grpo_mcore.environments.gym.gym_client import GymError, agents_of
from grpo_mcore.environments.gym.nemo_gym import NemoGymConfig, NemoGymEnvironment
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.generation.endpoint import EndpointAddress
from grpo_mcore.rollout.trajectory import AgentRequest, Sampling
from tests.gym_server import AGENT, GymServer
from tests.unit.environments.gym.gym_results import TWO, result

SAMPLING = Sampling(50, 0.5, 0.9)
NOWHERE = EndpointAddress("http://127.0.0.1:9", "none", "policy")


@pytest.fixture(scope="module")
def gym() -> Iterator[GymServer]:
    gym = GymServer("http://127.0.0.1:9", "none", "policy")
    yield gym
    gym.close()


def environment(gym: GymServer, **config: Any) -> NemoGymEnvironment:
    return create_env("nemo_gym", {"head_server_url": gym.head_url, **config})  # type: ignore[return-value]


def sample(index: int = 0, **task: Any) -> AgentRequest:
    task = {"responses_create_params": {"input": "hi"}, "agent_ref": {"name": AGENT}} | task
    return AgentRequest(f"p{index}", index, task, index, seed=7)


def test_what_hangs_costs_itself_alone(gym: GymServer) -> None:
    env = environment(gym, rollout_timeout_s=1.5, max_row_attempts=1)
    asked = [
        sample(0, behave="hang"),
        sample(1, behave="4xx"),
        sample(2, behave="no json"),
        sample(3, behave="failure"),
    ]
    outcomes = {outcome.generation_index: outcome for outcome in env.play(asked, SAMPLING, NOWHERE)}
    env.shutdown()
    assert all(outcome.trajectory is None and outcome.score.reward is None for outcome in outcomes.values())
    reasons = [outcomes[index].score.reason for index in range(4)]
    assert reasons[0] == f"play: the agent {AGENT} takes longer than env.nemo_gym.rollout_timeout_s, 1.5 s"
    assert [reason.split()[-1] for reason in reasons[1:]] == ["set", "b'<html>'", "'judge_failed'"]


def test_a_call_that_is_given_up_ends_its_rollouts(gym: GymServer) -> None:
    env = environment(gym, max_row_attempts=1)
    playing = env.play([sample(0, behave="hang"), sample(1, behave="4xx")], SAMPLING, NOWHERE)
    assert next(playing).generation_index == 1
    playing.close()
    env.shutdown()


def test_an_agent_that_the_gym_does_not_have(gym: GymServer) -> None:
    env = environment(gym)
    with pytest.raises(GymError, match=f"has no agent 'other', it has .*{AGENT}"):
        list(env.play([sample(agent_ref={"name": "other"})], SAMPLING, NOWHERE))
    with pytest.raises(GymError, match="p0 has no agent_ref.name; set env.nemo_gym.agent_name"):
        list(env.play([sample(agent_ref=None)], SAMPLING, NOWHERE))
    env.shutdown()


def test_a_gym_that_is_not_there() -> None:
    env = NemoGymEnvironment({"head_server_url": "http://127.0.0.1:9", "start_timeout_s": 0})
    with pytest.raises(
        GymError, match="set-up: .* http://127.0.0.1:9/global_config_dict_yaml within .*_timeout_s, 0 s"
    ):
        list(env.play([sample()], SAMPLING, NOWHERE))
    env.shutdown()
    env = NemoGymEnvironment({"agents": {AGENT: "http://127.0.0.1:9"}, "max_row_attempts": 2})
    [outcome] = env.play([sample()], SAMPLING, NOWHERE)
    env.shutdown()
    assert outcome.score.reason.startswith(f"the agent {AGENT} at http://127.0.0.1:9: ClientConnectorError")


class QuickAgent(http.server.BaseHTTPRequestHandler):
    """Answers every rollout at once."""

    def do_POST(self) -> None:
        content = json.dumps(result(*TWO)).encode()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


@pytest.fixture(scope="module")
def silent_url() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_set_up_and_score_have_deadlines_of_their_own(silent_url: str) -> None:
    """The head server hangs; or the policy's endpoint does, when the agent has played."""
    env = NemoGymEnvironment({"head_server_url": silent_url, "start_timeout_s": 0.5})
    with pytest.raises(GymError, match="^set-up: .* within env.nemo_gym.start_timeout_s, 0.5 s: TimeoutError"):
        list(env.play([sample()], SAMPLING, NOWHERE))
    env.shutdown()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), QuickAgent) as agent:
        threading.Thread(target=agent.serve_forever, daemon=True).start()
        env = NemoGymEnvironment(
            {"agents": {AGENT: f"http://127.0.0.1:{agent.server_address[1]}"}, "score_timeout_s": 0.5}
        )
        [outcome] = env.play([sample()], SAMPLING, EndpointAddress(silent_url, "none", "policy"))
        env.shutdown()
        agent.shutdown()
    reason = f"score: reading the result of the agent {AGENT} takes longer than env.nemo_gym.score_timeout_s, 0.5 s"
    assert (outcome.trajectory, outcome.score.reward, outcome.score.reason) == (None, None, reason)


def test_a_sample_may_take_what_its_stages_and_attempts_take() -> None:
    section = {"agents": {AGENT: "http://a"}, "start_timeout_s": 1, "rollout_timeout_s": 20, "score_timeout_s": 300}
    assert NemoGymEnvironment.sample_timeout_s(section | {"max_row_attempts": 1}) == 321
    assert NemoGymEnvironment.sample_timeout_s(section | {"max_row_attempts": 3}) == 321 + 2 * (320 + 60)


async def failing() -> None:
    raise TimeoutError("of its own")


def test_a_time_out_of_the_work_itself_is_not_the_stage_s() -> None:
    config = NemoGymConfig.read({"agents": {AGENT: "http://a"}})
    with pytest.raises(TimeoutError, match="^of its own$"):
        asyncio.run(config.within("play", failing(), "it"))


def test_a_gym_that_comes_up_later() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = NemoGymEnvironment({"head_server_url": f"http://127.0.0.1:{port}"})
    late: list[GymServer] = []
    timer = threading.Timer(1.0, lambda: late.append(GymServer("http://127.0.0.1:9", "none", "policy", head_port=port)))
    timer.start()
    [outcome] = env.play([sample(behave="4xx")], SAMPLING, NOWHERE)
    env.shutdown()
    late[0].close()
    assert "no such tool set" in outcome.score.reason


def test_the_row_that_an_agent_gets(gym: GymServer) -> None:
    env = environment(gym, agent_name="default", responses_create_params={"max_output_tokens": 9})
    metadata = {"extra_body": json.dumps({"min_p": 0}), "a": "b"}
    task = {"responses_create_params": {"input": "hi", "metadata": metadata, "temperature": 9}, "answer": 4}
    row = env.row(AgentRequest("p", 2, task, 5, seed=7), SAMPLING)
    assert row["agent_ref"]["name"] == "default" and row["answer"] == 4
    assert (row["_ng_task_index"], row["_ng_rollout_index"]) == (5, 2)
    params = row["responses_create_params"]
    assert (params["temperature"], params["top_p"], params["max_output_tokens"]) == (0.5, 0.9, 9)
    assert json.loads(params["metadata"]["extra_body"]) == {"min_p": 0, "seed": 7} and params["metadata"]["a"] == "b"
    bare = {"responses_create_params": {"input": "hi", "metadata": None}}
    env.config.responses_create_params.clear()
    assert (
        env.row(AgentRequest("p", 2, bare, 5, seed=7), SAMPLING)["responses_create_params"]["max_output_tokens"] == 50
    )
    assert task["responses_create_params"]["temperature"] == 9, "the task itself stays as it is"
    env.shutdown()


def test_agents_of_a_configuration() -> None:
    agent = {"responses_api_agents": {"simple_agent": {"host": "10.0.0.1", "port": 5001, "entrypoint": "app.py"}}}
    other = {"resources_servers": {"x": {"host": "h", "port": 1}}}
    assert agents_of({"talk": agent, "x": other, "policy_base_url": "http://"}) == {"talk": "http://10.0.0.1:5001"}
    assert agents_of([]) == {}
    agent["responses_api_agents"]["simple_agent"]["host"] = "fd00::1"
    assert agents_of({"talk": agent}) == {"talk": "http://[fd00::1]:5001"}


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({}, "env.nemo_gym: set head_server_url, or the URLs of agents"),
        ({"effort_levels": {"low_ub": 64000}}, "env.nemo_gym.effort_levels: .* grpo.reward_shaping.path"),
        ({"config_paths": ["a.yaml"]}, "env.nemo_gym.config_paths: a key of the Gym's own configuration"),
        ({"talk_agent": {"responses_api_agents": {}}}, "env.nemo_gym.talk_agent: a key of the Gym's own"),
        ({"head_server": {"host": "x"}}, "env.nemo_gym.head_server: a key of the Gym's own"),
        ({"head_server_uri": "http://x"}, "did you mean 'head_server_url'"),
        (
            {"head_server_url": "10.0.0.5:11000"},
            "env.nemo_gym.head_server_url: '10.0.0.5:11000' is no address of a server",
        ),
        ({"head_server_url": "http://fd00::1:11000"}, "an IPv6 address in brackets"),
        ({"agents": {"talk": "localhost:5001"}}, "env.nemo_gym.agents.talk: 'localhost:5001' is no address"),
        (
            {"head_server_url": "http://x", "responses_create_params": {"temperature": 1}},
            "set policy.generation.temperature",
        ),
    ],
)
def test_wrong_sections(section: dict[str, Any], why: str) -> None:
    cls, _ = create_env_class("nemo_gym")
    with pytest.raises(EnvironmentConfigError, match=why):
        cls.read_config(section)
