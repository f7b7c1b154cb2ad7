"""Environments of the package `verifiers`: its tasks, played by its harnesses in their runtimes, scored by its rewards.

    task --> harness in its runtime --> verifiers' interception --> the policy's endpoint   (session: the trace's id)
                     |                                                         |
                   trace: reward, metrics, stages              tokens of the session, as the engines had them
                     '------------------------> sample <-----------------------'

A failure of the provider, the sandbox, the task or the harness leaves the sample without a reward, never with 0.
"""

import asyncio
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from grpo_mcore.base.orphan_reaper import OrphanReaper
from grpo_mcore.environments.agents.environment import AgentEnvironment, PolicyEndpoint
from grpo_mcore.environments.agents.samples import AgentFailure, AgentSample, ModelCall, branches_of
from grpo_mcore.environments.interfaces import turn_rewards
from grpo_mcore.environments.verifiers.config import VerifiersConfig
from grpo_mcore.rollout.trajectory import AgentRequest, Sampling, Score, fingerprint

TOKEN_VARIABLE = "GRPO_MCORE_ENDPOINT_API_KEY"
"""Variable of this process with the endpoint's token: verifiers reads keys from variables alone, and hands none whose
name has API_KEY in it to a harness."""
MARKER = "GRPO_MCORE_AGENTS"
"""Variable of the programs in a runtime on this node, by which they are ended with this process, however that ends."""
CLEAN_UP_S = 60.0
"""Seconds in which a sample's runtime must be removed, and the endpoint answer."""
OVERDUE_S = 10.0
"""Seconds after a stage's deadline in which verifiers must have ended it itself; then the sample is ended from here."""
POLL_S = 0.5
_STAGES = {"setup": "set-up", "agent": "play", "finalize": "finalize", "scoring": "score"}
_REPEATED = ("ProviderError", "SandboxError", "InterceptionError", "TunnelError")


class VerifiersEnvironment(AgentEnvironment):
    """Lets verifiers' harnesses generate whole samples."""

    config_class = VerifiersConfig
    config: VerifiersConfig

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        VerifiersConfig.read(config).env_config()

    @classmethod
    def sample_timeout_s(cls, config: Mapping[str, Any]) -> float:
        """Return the maximum seconds for one sample, all attempts together."""
        read = VerifiersConfig.read(config)
        stages = sum(read.stage_limits().values()) + len(_STAGES) * OVERDUE_S
        return read.max_row_attempts * (stages + 2 * CLEAN_UP_S)

    def stage_of(self, request: AgentRequest) -> tuple[str, float]:
        traces = self._traces.get((request.uid, request.generation_index), {})
        stage = next((_stage_of(trace)[0] for trace in traces.values()), "set-up")
        return stage, self.config.stage_limits().get(stage, CLEAN_UP_S)

    async def open(self) -> None:
        from verifiers.v1.utils.loaders import load_environment

        self._env = load_environment(self.config.env_config())
        self._traces: dict[tuple[str, int], dict[int, Any]] = {}  # of the samples under way
        self._stack = AsyncExitStack()
        self._reaper = OrphanReaper(Path(tempfile.mkdtemp(prefix="grpo-mcore-agents-")), MARKER)
        self._stack.callback(self._reaper.close)
        await self._stack.enter_async_context(self._env.serving())
        timeout = aiohttp.ClientTimeout(total=CLEAN_UP_S)
        self._client = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))

    async def close(self) -> None:
        await self._stack.aclose()

    async def attempt(
        self, request: AgentRequest, sampling: Sampling, endpoint: PolicyEndpoint, start: float
    ) -> tuple[AgentSample, Sequence[Any], Callable[[], Any]]:
        key, traces = (request.uid, request.generation_index), dict[int, Any]()
        self._traces[key] = traces
        try:
            async with self.room:
                episode = await self._episode(request, sampling, endpoint, traces)
        finally:
            del self._traces[key]
            recorded = {trace.id: await self._recorded(trace.id, endpoint) for trace in traces.values()}
        trace = _trained(episode)
        reward, failures = _reward(episode, trace, self.config.verify_timeout_reward)
        kept, versions, note = _calls(trace, recorded[trace.id])
        branches = branches_of(kept)
        version_of = {id(call): spans for call, spans in zip(kept, versions, strict=True)}
        parts = {name: part.value for name, part in trace.rewards.items() if part is not None}
        parts |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        reason = f"{trace.stop_condition or 'agent ended'}, {len(kept)} turns{note}"
        try:
            by_turn = turn_rewards(trace.info.get("turn_rewards"), len(kept))
        except (TypeError, ValueError) as error:
            raise AgentFailure(f"score: the trace's info has {error}", kind="score: turn_rewards") from error
        score = Score(
            reward,
            kept[-1].text,
            reason,
            time.perf_counter() - start,
            parts,
            failures=failures,
            turn_rewards=by_turn,
            turn_states=("", *(fingerprint(call.prompt) for call in kept[1:])),
        )
        truncated = trace.is_truncated or trace.is_timeout
        sample = AgentSample(tuple(map(tuple, branches)), truncated, score, trace.task.data.prompt_text)
        spans = [version_of[id(call)] for branch in branches for call in branch]
        return sample, spans, episode.to_record

    async def _episode(
        self, request: AgentRequest, sampling: Sampling, endpoint: PolicyEndpoint, traces: dict[int, Any]
    ) -> Any:
        """Play one episode, whose `traces` are there as soon as they begin, by id(). Raises AgentFailure for one that
        exceeds a deadline which verifiers does not hold itself, such as that of a runtime's start."""
        from verifiers.v1 import AssistantMessage, EvalClientConfig, ModelContext, SamplingConfig, Trace

        def max_output_tokens(trace: Trace) -> bool:
            """Whether the last two answers were cut, with no word between them: the agent only asks again. Codex does
            so five times, as it takes a cut answer for a connection that broke, and fails. Stopped by this name, it is
            scored as it stands, and counts as truncated."""
            cut = [call.node for call in trace.calls[-2:] if call.finish_reason == "length" and call.node is not None]
            before = trace.nodes[cut[1]].parent if len(cut) == 2 else None
            return before is not None and isinstance(trace.nodes[before].message, AssistantMessage)

        os.environ[TOKEN_VARIABLE] = endpoint.token
        task_class = type(self._env.taskset).task_type()
        task = task_class(task_class.data_type().model_validate(request.task), self._env.config.taskset.task)
        mark, variables, hooks = self._reaper.variables[MARKER], task.runtime_env, task.hooks
        task.runtime_env = lambda: {**variables(), MARKER: mark}
        task.hooks = lambda kind: [*hooks(kind), *([max_output_tokens] if kind == "stop" else [])]
        client = EvalClientConfig(base_url=f"{endpoint.url}/v1", api_key_var=TOKEN_VARIABLE)
        drawn = SamplingConfig(temperature=sampling.temperature, top_p=sampling.top_p, seed=request.seed)
        context, limits = ModelContext(endpoint.model, client, drawn), self.config.stage_limits()
        episode = asyncio.ensure_future(
            self._env.run_episode(
                task,
                context,
                on_trace=lambda trace: traces.update({id(trace): trace}),
                on_discard=lambda trace: traces.pop(id(trace)),
            )
        )
        try:
            while not (await asyncio.wait({episode}, timeout=POLL_S))[0]:
                for trace in traces.values():
                    stage, start = _stage_of(trace)
                    if (seconds := time.time() - start) > limits.get(stage, CLEAN_UP_S) + OVERDUE_S:
                        raise AgentFailure(f"{stage}: not ended after {seconds:.0f} s", kind=f"{stage}: timeout")
        finally:
            if not episode.done():
                episode.cancel()
                await asyncio.wait({episode}, timeout=CLEAN_UP_S)
        return episode.result()

    async def _recorded(self, session: str, endpoint: PolicyEndpoint) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        try:
            url = f"{endpoint.url}/take_session"
            async with self._client.post(url, json={"session": session}, headers=headers) as reply:
                reply.raise_for_status()
                return list((await reply.json())["calls"])
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = f"score: the policy's endpoint at {endpoint.url}: {type(error).__name__}: {error}"
            raise AgentFailure(reason, again=True, kind="score: endpoint") from error


def _trained(episode: Any) -> Any:
    """Return the trace of the only agent of an episode that is the policy. Raises AgentFailure."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1 and episode.errors:
        raise AgentFailure(f"play: {_of_error(episode.errors[-1])}", kind=f"play: {episode.errors[-1].type}")
    if len(traces) != 1:
        raise AgentFailure(
            f"play: {len(traces)} agents of one episode are trainable; a sample has one", kind="play: seats"
        )
    return traces[0]


def _stage_of(trace: Any) -> tuple[str, float]:
    """Return the last stage that a trace has begun, and when, in seconds of the epoch."""
    timing = trace.timing
    if timing.scoring.end:
        return "clean-up", timing.scoring.end
    begun = [(stage, getattr(timing, name).start) for name, stage in _STAGES.items() if getattr(timing, name).start]
    return begun[-1] if begun else ("set-up", timing.start)


def _reward(episode: Any, trace: Any, timeout_reward: float | None) -> tuple[float, tuple[str, ...]]:
    """Return the reward of a sample, and what is counted as failed. Raises AgentFailure for one without a reward: its
    run has failed, or a stage other than play was ended by its deadline."""
    stage, failed = _stage_of(trace)[0].replace("clean-up", "score"), None if trace.ok else trace.errors[-1]
    if failed is None and not episode.ok and episode.errors:
        stage, failed = "score", episode.errors[-1]
    if failed is not None:
        raise AgentFailure(
            f"{stage}: {_of_error(failed)}", again=failed.type in _REPEATED, kind=f"{stage}: {failed.type}"
        )
    late = _STAGES.get(str(trace.stop_condition).removesuffix("_timeout")) if trace.is_timeout else None
    if late == "score" and timeout_reward is not None:
        return timeout_reward, ("score: timeout",)
    if late is not None and late != "play":
        raise AgentFailure(f"{late}: its deadline has ended it", kind=f"{late}: timeout")
    if not trace.rewards or None in trace.rewards.values():
        raise AgentFailure("score: the task gave no reward", kind="score: no reward")
    if not math.isfinite(trace.reward):
        raise AgentFailure(f"score: the reward is {trace.reward}", kind="score: no number")
    return float(trace.reward), ("play: timeout",) if late else ()


def _of_error(error: Any) -> str:
    return f"{error.type}: {' '.join(error.message.split())[:500]}"


def _calls(trace: Any, recorded: Sequence[Mapping[str, Any]]) -> tuple[list[ModelCall], list[Any], str]:
    """Return the calls that are trained on, their weight versions, and a note on those that are not.

    Left out are calls whose answer the trace does not have, since the agent was ended before it came, and of several
    answers to one and the same prompt those that the agent did not go on from, such as the first of a request that its
    client has repeated. Raises AgentFailure if the trace has a turn that the endpoint has not generated.
    """
    calls = list[ModelCall]()
    for entry in recorded:
        before = [] if entry["continues"] is None else calls[entry["continues"]].tokens
        calls.append(ModelCall([*before, *entry["prompt"]], entry["generated"], entry["logprobs"], entry["text"]))
    usages = [call.usage for call in trace.calls if call.node is not None]  # None: a stream that was not to tell it
    turns = Counter(usage and (usage.input_tokens, usage.completion_tokens) for usage in usages)
    went_on = {entry["continues"] for entry in recorded}
    used: dict[
        tuple[int, ...], set[int]
    ] = {}  # by prompt: answers that the agent went on from, or the last it asked for
    for number in sorted(range(len(calls)), key=lambda number: recorded[number]["request"]):
        numbers = used.setdefault((*calls[number].prompt,), set())
        if not numbers & went_on:
            numbers.clear()
        if number in went_on or not numbers:
            numbers.add(number)
    kept = list[int]()
    for number, call in enumerate(calls):
        size = len(call.prompt), len(call.generated)
        if not (turns[size] or turns[None] or number in went_on):
            continue
        turns[size if turns[size] else None] -= 1
        if number in used[(*call.prompt,)]:
            kept.append(number)
    if missing := sum(count for count in turns.values() if count > 0):
        raise AgentFailure(
            f"score: the trace has {missing} turns that the policy's endpoint has not generated: its harness asks "
            "another model, or another address",
            kind="score: other tokens",
        )
    if not kept:
        raise AgentFailure("play: the agent has not asked the policy", kind="play: no turn")
    left_out = len(calls) - len(kept)
    note = f"; {left_out} answers that the agent did not use are left out" if left_out else ""
    trained = [replace(calls[number], number=index) for index, number in enumerate(kept)]
    return trained, [recorded[number]["weight_versions"] for number in kept], note
