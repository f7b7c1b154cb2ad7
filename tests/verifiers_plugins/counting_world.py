"""A taskset and a harness of verifiers for tests: a program in the runtime converses with the policy in one of three
dialects, and `behave` says what goes wrong. The reward is 1 for an odd number of characters in all answers."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.errors import SandboxError

__all__ = ["CountingHarness", "CountingTaskset"]

PROGRAM = """
import http.client, json, sys, time, urllib.parse, urllib.request

endpoint, secret, dialect, behave, turns, prompt = sys.argv[1:]
model = "gpt-5" if behave == "another model" else "policy"
said = [{"role": "user", "content": prompt}]


def ask(messages):
    if dialect == "messages":
        path, body = "/messages", {"model": model, "max_tokens": 999, "messages": messages}
    elif dialect == "responses":
        path, body = "/responses", {"model": model, "input": messages}
    else:
        path, body = "/chat/completions", {"model": model, "messages": messages, "temperature": 0.0}
    headers = {"Authorization": "Bearer " + secret, "x-api-key": secret, "Content-Type": "application/json"}
    if behave == "streams":
        body["stream"] = True
    if behave == "retries":  # its client gives up, and asks once more without saying so
        url = urllib.parse.urlsplit(endpoint + path)
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request("POST", url.path, json.dumps(body), headers)
        time.sleep(0.05)
        connection.close()
    request = urllib.request.Request(endpoint + path, json.dumps(body).encode(), headers)
    text = urllib.request.urlopen(request, timeout=600).read().decode()
    if behave == "streams":
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        if dialect == "responses":
            return events[-1]["response"]["output"]
        if dialect == "messages":
            return "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    answer = json.loads(text)
    if dialect == "messages":
        return "".join(block["text"] for block in answer["content"])
    return answer["output"] if dialect == "responses" else answer["choices"][0]["message"]["content"]


for turn in range(6 if behave == "asks again" else int(turns)):
    if turn == 1 and behave == "hang play":
        time.sleep(3600)
    if behave == "slow":
        time.sleep(2)
    if turn == 1 and behave == "exits":
        sys.exit("the program is broken")
    answer = ask(said)
    if behave == "forgets" and turn == 1:
        said = said[:1]
    elif behave == "changes the answer":
        said.append({"role": "assistant", "content": "not what it said"})
    else:
        said += answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    if behave == "asks again":  # as Codex does behind an answer that was cut
        continue
    said.append({"role": "user", "content": "turn %d: go on" % turn})
"""


class CountingData(vf.TaskData):
    turns: int = 2
    behave: str = ""
    notes: str = ""
    """Folder where it is written down which sample of a task misbehaves, the first one, and that a process was killed.
    "": all samples of the task misbehave."""


def behaviour(data: CountingData, trace: Any) -> str:
    """Return how a sample behaves. It is known by its seed, which is the same in all its attempts."""
    if data.notes:
        seed, note = str(trace.agent.config.sampling.seed), Path(data.notes) / f"{data.idx} {data.behave}"
        with suppress(FileExistsError):
            note.open("x").write(seed)
        return data.behave if note.read_text() == seed else ""
    return data.behave


class CountingTask(vf.Task[CountingData, vf.State, vf.TaskConfig]):
    async def _misbehave(self, stage: str, trace: Any) -> None:
        match behaviour(self.data, trace).partition(" "):
            case ("hang", _, at) if at == stage:
                await asyncio.sleep(3600)
            case ("block", _, at) if at == stage:
                time.sleep(3600)
            case ("fail", _, at) if at == stage:
                raise ValueError(f"{stage} fails")
            case ("sandbox", _, at) if at == stage:
                raise SandboxError("the sandbox is gone")
            case ("kill", _, at) if at == stage and not (killed := Path(self.data.notes) / "killed").exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    async def setup(self, trace: Any, runtime: Any) -> None:
        await self._misbehave("set-up", trace)

    async def finalize(self, trace: Any, runtime: Any) -> None:
        await self._misbehave("finalize", trace)

    @vf.reward
    async def odd(self, trace: Any) -> float:
        await self._misbehave("score", trace)
        behave = behaviour(self.data, trace)
        if behave.startswith("turn rewards"):
            trace.info["turn_rewards"] = [0.5] * int(behave.split()[-1])
        if behave == "nan reward":
            return float("nan")
        return float(sum(len(message.content or "") for message in trace.assistant_messages) % 2)

    @vf.metric
    async def answers(self, trace: Any) -> float:
        return float(trace.num_turns)


class CountingTasksetConfig(vf.TasksetConfig):
    behave: list[str] = [""]
    turns: int = 2
    notes: str = ""


class CountingTaskset(vf.Taskset[CountingTask, CountingTasksetConfig]):
    def load(self) -> Iterator[CountingTask]:
        for number, behave in enumerate(self.config.behave):
            data = CountingData(
                prompt=f"task {number}", behave=behave, turns=self.config.turns, notes=self.config.notes
            )
            yield CountingTask(data, self.config.task)


class CountingHarnessConfig(vf.HarnessConfig):
    dialect: str = "chat"


class CountingHarness(vf.Harness[CountingHarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        behave = behaviour(data, trace)
        if behave == "no program":
            raise OSError("its program is not there")
        await runtime.write("agent.py", PROGRAM.encode())
        arguments = [endpoint, secret, self.config.dialect, behave, str(data.turns), data.prompt]
        return await runtime.run_program([sys.executable, "-I", "agent.py", *arguments], {})
