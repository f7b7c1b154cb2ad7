"""A NeMo Gym for tests: head, agent, resources and model server on ports of their own, exactly as in its contract.

A row's `behave` makes its servers misbehave, in the rollout with index `rollout` or in all: fail in every way that the
contract has, or break the history of a conversation. The agent plays `turns` turns: after each answer the environment
says something (`said`), as a user or as a tool.
"""

import asyncio
import json
import threading
import uuid
from collections import Counter
from typing import Any

import aiohttp
import yaml
from aiohttp import web

AGENT = "talk_simple_agent"
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class GymServer:
    """Run from construction to `close`. `policy_url`, `policy_key`, `policy_model` describe the policy's endpoint."""

    def __init__(self, policy_url: str, policy_key: str, policy_model: str, head_port: int = 0) -> None:
        self.policy_url, self.policy_key, self.policy_model = policy_url, policy_key, policy_model
        self.requests: list[dict[str, Any]] = []
        """Bodies of requests to the policy."""
        self.runs: Counter[tuple[int, int]] = Counter()
        """(task, rollout) -> number of times that the agent was asked to run it."""
        self.sessions: dict[str, str] = {}
        """session -> the task and rollout that seeded it."""
        self.faults: list[str] = []
        """Violations of the contract that were seen."""
        self._gate = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runners: list[web.AppRunner] = []
        self.ports: dict[str, int] = {}
        asyncio.run_coroutine_threadsafe(self._start(head_port), self._loop).result(30)

    @property
    def head_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['head']}"

    def open_gate(self) -> None:
        """Let rollouts continue that wait after their first turn (`behave: waits`)."""
        self._loop.call_soon_threadsafe(self._gate.set)

    async def _start(self, head_port: int) -> None:
        self._client = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        servers = {
            "resources": [
                web.post("/seed_session", self._seed_session),
                web.post("/verify", self._verify),
                web.post("/{tool}", self._tool),
            ],
            "model": [web.post("/v1/responses", self._model_responses)],
            "agent": [web.post("/run", self._run), web.post("/v1/responses", self._agent_responses)],
            "head": [web.get("/global_config_dict_yaml", self._config)],
        }
        for name, routes in servers.items():
            app = web.Application(client_max_size=2**28)
            app.add_routes(routes)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", head_port if name == "head" else 0).start()
            self._runners.append(runner)
            self.ports[name] = runner.addresses[0][1]

    def close(self) -> None:
        async def end() -> None:
            await self._client.close()
            for runner in self._runners:
                await runner.cleanup()
            hanging = asyncio.all_tasks() - {asyncio.current_task()}
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _config(self, request: web.Request) -> web.Response:
        agent = {"host": "127.0.0.1", "port": self.ports["agent"], "entrypoint": "app.py"}
        config = {
            "head_server": {"host": "127.0.0.1", "port": self.ports["head"]},
            "policy_model": {
                "responses_api_models": {"vllm_model": {"host": "127.0.0.1", "port": self.ports["model"]}}
            },
            AGENT: {"responses_api_agents": {"simple_agent": agent}},
        }
        return web.json_response(yaml.safe_dump(config))  # as in NeMo Gym: YAML in a JSON string

    async def _post(self, server: str, path: str, body: Any, cookies: Any) -> tuple[Any, dict[str, str]]:
        async with self._client.post(
            f"http://127.0.0.1:{self.ports[server]}{path}", json=body, cookies=cookies
        ) as reply:
            reply.raise_for_status()
            return await reply.json(), {name: morsel.value for name, morsel in reply.cookies.items()}

    # Agent

    async def _run(self, request: web.Request) -> web.Response:
        row = await request.json()
        if request.cookies:
            self.faults.append(f"/run came with cookies {dict(request.cookies)}")
        key = (row["_ng_task_index"], row["_ng_rollout_index"])
        self.runs[key] += 1
        behave, first = row.get("behave") if key[1] == row.get("rollout", key[1]) else None, self.runs[key] == 1
        if behave == "5xx" or (behave == "5xx once" and first):
            return web.Response(status=500, text="the sandbox is gone")
        if behave == "4xx":
            return web.Response(status=422, text="no such tool set")
        if behave == "hang" or (behave == "hang once" and first):
            await asyncio.sleep(3600)
        if behave == "no json":
            return web.Response(text="<html>")
        if behave == "killed once" and first:
            return web.json_response({"_ng_no_persist": True, "_ng_failure_class": "kill_shaped", "reward": 0.0})
        if behave == "failure":
            return web.json_response({**row, "_ng_failure_class": "judge_failed", "reward": 0.0})
        if behave == "final failure":
            final = {"_ng_failure_class": "timeout_exceeded", "_ng_failure_terminal": True}
            return web.json_response({**row, **final, "reward": 0.0})
        _, cookies = await self._post("resources", "/seed_session", row, {})
        params = row["responses_create_params"]
        body = {
            "params": params,
            "turns": row.get("turns", 1),
            "behave": behave,
            "said_by": row.get("said_by"),
            "said": row.get("said"),
        }
        response, cookies = await self._post("agent", "/v1/responses", body, cookies)
        result, _ = await self._post("resources", "/verify", {**row, "response": response}, cookies)
        return web.json_response(result)

    async def _agent_responses(self, request: web.Request) -> web.Response:
        body = await request.json()
        params, behave = body["params"], body["behave"]
        history, outputs = params["input"], []
        history = [{"role": "user", "content": history}] if isinstance(history, str) else list(history)
        cookies, model_cookies, response = dict(request.cookies), {}, {}
        for turn in range(body["turns"]):
            if behave == "waits" and turn == 1:
                await self._gate.wait()
            if behave == "forgets" and turn == 2:  # continues from its first question, without what followed it
                history = history[:1]
            elif behave == "rewrites" and turn == 1:  # repeats its own words as text, without token ids
                history = [{k: v for k, v in item.items() if k not in TOKEN_FIELDS} for item in history]
                history[-2]["content"] = [{"type": "output_text", "text": "something else"}]
            response, model_cookies = await self._post(
                "model", "/v1/responses", {**params, "input": history}, model_cookies
            )
            outputs += response["output"]
            history += response["output"]
            if not response["output"] or turn + 1 == body["turns"]:
                break
            if body["said_by"] == "tool":
                call_id = f"call_{turn}"
                said, found = await self._post("resources", "/look", {"turn": turn}, cookies)
                cookies |= found
                injected = {"type": "function_call_output", "call_id": call_id, "output": json.dumps(said)}
            else:
                injected = {"type": "message", "role": "user", "content": body["said"] or f"turn {turn}: go on"}
            outputs.append(injected)
            history.append(injected)
        reply = web.json_response({**response, "output": outputs})
        for name, value in (cookies | model_cookies).items():
            reply.set_cookie(name, value)
        return reply

    # Resources

    async def _seed_session(self, request: web.Request) -> web.Response:
        row = await request.json()
        session = uuid.uuid4().hex
        self.sessions[session] = f"{row['_ng_task_index']}/{row['_ng_rollout_index']}"
        reply = web.json_response({})
        reply.set_cookie("session", session)
        return reply

    async def _tool(self, request: web.Request) -> web.Response:
        if request.cookies.get("session") not in self.sessions:
            self.faults.append("a tool was called without a session")
        return web.json_response({"seen": (await request.json())["turn"]})

    async def _verify(self, request: web.Request) -> web.Response:
        row = await request.json()
        seeded = self.sessions.get(request.cookies.get("session", ""))
        if seeded != f"{row['_ng_task_index']}/{row['_ng_rollout_index']}":
            self.faults.append(f"/verify of {row['_ng_task_index']} came with the session of {seeded}")
        items = row["response"]["output"]
        said = "".join(part["text"] for item in items if item.get("role") == "assistant" for part in item["content"])
        result = {**row, "reward": float(len(said) % 2), "reward_components": {"odd": float(len(said) % 2)}}
        misbehaves = row["_ng_rollout_index"] == row.get("rollout", row["_ng_rollout_index"])
        match row.get("behave") if misbehaves else None:
            case "mask":
                result["mask_sample"] = True
            case "nan reward":
                result["reward"] = float("nan")
            case "no tokens":
                for item in items:
                    for name in TOKEN_FIELDS:
                        item.pop(name, None)
            case "other tokens":
                items[0]["generation_token_ids"][0] ^= 1
            case "nan log-prob":
                items[0]["generation_log_probs"][0] = float("nan")
        return web.json_response(result)

    # Model, like NeMo Gym's vllm_model with return_token_id_information

    async def _model_responses(self, request: web.Request) -> web.Response:
        params = await request.json()
        extra = json.loads((params.get("metadata") or {}).get("extra_body") or "{}")
        body = extra | {
            "model": self.policy_model,
            "messages": [_chat_message(item) for item in params["input"]],
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "max_tokens": params["max_output_tokens"],
            "logprobs": True,
            "top_logprobs": 0,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        self.requests.append(body)
        headers = {"Authorization": f"Bearer {self.policy_key}"}
        async with self._client.post(f"{self.policy_url}/v1/chat/completions", json=body, headers=headers) as reply:
            text = await reply.text()
            if reply.status == 400 and ("context length" in text or "max_tokens" in text):
                return web.json_response(_response([], "max_output_tokens"))
            reply.raise_for_status()
        completion = json.loads(text)
        choice = completion["choices"][0]
        message = choice["message"]
        ids = [int(token["token"].removeprefix("token_id:")) for token in choice["logprobs"]["content"]]
        sources = [(message["prompt_token_ids"], message["generation_token_ids"])]
        sources += [(completion["prompt_token_ids"], choice["token_ids"])]
        if any(source != (completion["prompt_token_ids"], ids) for source in sources):
            self.faults.append("the sources of token ids disagree")
        if message["generation_log_probs"] != [token["logprob"] for token in choice["logprobs"]["content"]]:
            self.faults.append("the sources of log-probs disagree")
        item = {
            "type": "message",
            "role": "assistant",
            "id": f"msg_{uuid.uuid4().hex}",
            "status": "completed",
            "content": [{"type": "output_text", "text": message["content"] or "", "annotations": []}],
            **{name: message[name] for name in TOKEN_FIELDS},
        }
        cut = choice["finish_reason"] == "length"
        reply = web.json_response(_response([item], "max_output_tokens" if cut else None))
        reply.set_cookie("model_session", "1")
        return reply


def _response(output: list[Any], incomplete: str | None) -> dict[str, Any]:
    details = {"reason": incomplete} if incomplete else None
    return {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "output": output, "incomplete_details": details}


def _chat_message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    content = item["content"]
    if isinstance(content, list):
        content = [
            {"type": "text", "text": part["text"]} if "text" in part
            else {"type": "image_url", "image_url": {"url": part["image_url"]}}
            for part in content
        ]  # fmt: skip
    tokens = {name: item[name] for name in TOKEN_FIELDS if name in item}
    return {"role": item["role"], "content": content, **tokens}
