"""The HTTP client of a NeMo Gym: finds its agents and requests rollouts from them."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import yaml
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from grpo_mcore.base.addresses import with_port
from grpo_mcore.environments.agents.environment import PolicyEndpoint
from grpo_mcore.environments.agents.samples import AgentFailure
from grpo_mcore.environments.http_retries import RetryPolicy, is_transient, retry_after_s

SHORT_TIMEOUT_S = 60.0
"""Time limit of requests other than rollouts."""
_ENDPOINT_RETRIES = RetryPolicy(retries=2, backoff_s=0.2)


class GymError(RuntimeError):
    """The Gym does not answer, or does not have an agent."""


class GymClient:
    """A connection to one Gym, used within one event loop.

    `agents`: name -> URL of agents that are known already. `head_server_url`: the server that knows the others; it may
    take `start_timeout_s` to come up.
    """

    def __init__(self, head_server_url: str | None, agents: Mapping[str, str], *, start_timeout_s: float) -> None:
        self._head, self._agents, self._start_timeout_s = head_server_url, dict(agents), start_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the HTTP session. It keeps no cookies: they name a Gym's sessions, of which each rollout has its own."""
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def agent_url(self, name: str) -> str:
        """Return an agent's URL. Raises GymError, which ends the run, for an agent that the Gym does not have."""
        if name not in self._agents:
            if self._head is None:
                raise GymError(f"env.nemo_gym: no URL for the agent {name!r}; set agents, or head_server_url")
            stop = stop_after_delay(self._start_timeout_s)
            until_it_is_up = AsyncRetrying(
                stop=stop, wait=wait_fixed(1.0), retry=retry_if_exception_type(GymError), reraise=True
            )
            self._agents |= agents_of(await until_it_is_up(self._global_config))
        if name not in self._agents:
            raise GymError(f"the Gym at {self._head} has no agent {name!r}, it has {sorted(self._agents) or 'none'}")
        return self._agents[name]

    async def _global_config(self) -> Any:
        assert self._session is not None
        url = f"{str(self._head).rstrip('/')}/global_config_dict_yaml"
        try:
            limit = aiohttp.ClientTimeout(total=min(SHORT_TIMEOUT_S, max(self._start_timeout_s, 1.0)))
            async with self._session.get(url, timeout=limit) as reply:
                reply.raise_for_status()
                text = await reply.text()
            config = yaml.safe_load(text)
            return yaml.safe_load(config) if isinstance(config, str) else config  # JSON of the YAML's text
        except (aiohttp.ClientError, TimeoutError, yaml.YAMLError) as error:
            raise GymError(
                f"set-up: the Gym's head server does not answer at {url} within env.nemo_gym.start_timeout_s, "
                f"{self._start_timeout_s:g} s: {_describe(error)}"
            ) from error

    async def run(self, agent: str, url: str, row: Mapping[str, Any]) -> Any:
        """Return the reply of the agent at `url` to a rollout, however long it takes. Raises AgentFailure: a broken
        connection, 5xx, 408, 425, 429 and a page that is no JSON may be tried again, other 4xx not."""
        assert self._session is not None
        limits = aiohttp.ClientTimeout(total=None, connect=SHORT_TIMEOUT_S)
        try:
            async with self._session.post(f"{url.rstrip('/')}/run", json=row, timeout=limits) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AgentFailure(f"the agent {agent} at {url}: {_describe(error)}", again=True) from error
        if reply.status >= 400:
            raise AgentFailure(
                f"the agent {agent} answers {reply.status}: {content[:300].decode(errors='replace')}",
                again=is_transient(reply.status),
                wait_s=retry_after_s(reply.headers),
            )
        try:
            return json.loads(content)
        except ValueError as error:
            raise AgentFailure(f"the agent {agent} answers with no JSON: {content[:80]!r}", again=True) from error

    async def weight_versions(self, endpoint: PolicyEndpoint, fingerprints: list[str]) -> list[Any]:
        """Return for each call which weights read and generated its tokens, as the endpoint has recorded them. Raises
        AgentFailure for tokens that the endpoint has not generated."""

        async def ask() -> list[Any]:
            assert self._session is not None
            async with self._session.post(
                f"{endpoint.url}/weight_versions",
                json={"fingerprints": fingerprints},
                headers={"Authorization": f"Bearer {endpoint.token}"},
                timeout=aiohttp.ClientTimeout(total=SHORT_TIMEOUT_S),
            ) as reply:
                reply.raise_for_status()
                return list((await reply.json())["weight_versions"])

        try:
            known = await _ENDPOINT_RETRIES.run(ask)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AgentFailure(f"the policy's endpoint at {endpoint.url}: {_describe(error)}") from error
        if None in known:
            raise AgentFailure(
                f"the policy's endpoint has not generated these tokens (turn {known.index(None) + 1}): the Gym's model "
                f"server must ask {endpoint.url}/v1"
            )
        return known


def agents_of(config: Any) -> dict[str, str]:
    """Return name -> URL of a Gym's agents. `config`: {name: {responses_api_agents: {kind: {host, port}}}}."""
    agents = {}
    for name, section in config.items() if isinstance(config, dict) else ():
        kinds = section.get("responses_api_agents") if isinstance(section, dict) else None
        for server in kinds.values() if isinstance(kinds, dict) else ():
            if isinstance(server, dict) and "host" in server and "port" in server:
                agents[name] = f"http://{with_port(str(server['host']), server['port'])}"
    return agents


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
