"""Promises to the callers of one engine, checked with and without a queue of batches."""

import threading
import time
from typing import Any

import pytest
import torch

from grpo_mcore.generation import Engine
from grpo_mcore.rollout.trajectory import Sampling, Trajectory
from tests.functional.engine_cases import CONTEXT, generate, request
from tests.waiting import wait_until


def samples_come_as_they_finish(engine: Engine) -> None:
    short, long = request(1, length=CONTEXT - 1), request(3)
    samples = engine.generate([long, short], Sampling(max_new_tokens=100))
    assert next(samples).uid == short.uid
    assert engine.health()["requests"] == 1
    samples.close()  # the caller wants no more
    assert engine.health()["requests"] == 0
    assert len(generate(engine, [short, long])) == 2


def samples_that_nobody_wants_any_more_are_given_up(engine: Engine) -> None:
    asked = [request(number, 0 if number % 2 else CONTEXT - 4) for number in range(6)]
    samples = engine.generate(asked, Sampling(max_new_tokens=100))
    first = next(samples).uid
    unwanted = {one.uid for one in asked[1::2]} - {first}
    engine.give_up(unwanted)
    assert {first, *(sample.uid for sample in samples)} == {one.uid for one in asked} - unwanted
    assert engine.health()["requests"] == 0
    engine.give_up(unwanted)  # nothing of them is left
    assert len(generate(engine, asked)) == 6


def requests_join_an_open_stream(engine: Engine) -> None:
    """They generate what they generate alone; a stream that has ended takes none."""
    long, short, wrong = request(3), request(1, length=CONTEXT - 1), request(2, seed=-1)
    sampling = Sampling(max_new_tokens=100)
    alone = generate(engine, [long, request(4)], max_new_tokens=100)
    assert not engine.join("open", [long], sampling), "there is no such stream"
    stream = engine.generate_together([short, long], sampling, "open")
    assert [sample.uid for sample in next(stream)] == [short.uid]
    with pytest.raises(ValueError, match="seed -1"):
        engine.join("open", [request(5), wrong], sampling)
    assert engine.health()["requests"] == 1
    assert engine.join("open", [request(4)], sampling) and engine.health()["requests"] == 2
    samples = {sample.uid: sample for few in stream for sample in few}
    assert samples.keys() == alone.keys()
    assert all(torch.equal(samples[uid].token_ids(), alone[uid].token_ids()) for uid in alone)
    assert not engine.join("open", [long], sampling) and engine.health()["requests"] == 0


def a_stream_that_is_given_up_keeps_nothing_of_those_that_join_it(engine: Engine) -> None:
    """Neither where they come after its end, nor where it ends while they are added."""
    asked, sampling = [request(1, length=CONTEXT - 1), request(3)], Sampling(max_new_tokens=100)
    joined: list[bool] = []

    def join() -> threading.Thread:
        thread = threading.Thread(target=lambda: joined.append(engine.join("open", [request(4)], sampling)))
        thread.start()
        return thread

    stream = engine.generate_together(asked, sampling, "open")
    next(stream)
    caller = engine._streams["open"].caller
    with engine._lock.call():
        late = join()
        wait_until(lambda: caller.joining, "the join")
        stream.close()
    late.join(100)
    assert joined == [False] and engine.health()["requests"] == 0

    stream = engine.generate_together(asked, sampling, "open")
    next(stream)
    vllm, adding = engine._llm_engine, threading.Event()
    add = vllm.add_request

    def add_while_the_stream_ends(*args: Any, **kwargs: Any) -> Any:
        adding.set()
        wait_until(lambda: engine._lock._asking > 1, "the end of the stream")
        return add(*args, **kwargs)

    vllm.add_request = add_while_the_stream_ends
    try:
        thread = join()
        assert adding.wait(100)
        stream.close()
        thread.join(100)
    finally:
        del vllm.add_request
    assert engine.health()["requests"] == 0


def requests_of_a_call_are_added_between_two_steps(engine: Engine) -> None:
    vllm = engine._llm_engine
    events, add, step = list[str](), vllm.add_request, vllm.step

    def note_add(*args: Any, **kwargs: Any) -> Any:
        events.append("add")
        time.sleep(0.01)
        return add(*args, **kwargs)

    def note_step() -> Any:
        events.append("step")
        return step()

    vllm.add_request, vllm.step = note_add, note_step
    try:
        thread = threading.Thread(target=generate, args=(engine, [request(3)]), kwargs={"max_new_tokens": 100})
        thread.start()
        wait_until(lambda: "step" in events, "a step")
        generate(engine, [request(10 + number) for number in range(6)])
        thread.join(100)
    finally:
        del vllm.add_request, vllm.step
    later = [place for place, event in enumerate(events) if event == "add"][1:]
    assert later == list(range(later[0], later[0] + 6))


def several_callers_share_the_steps(engine: Engine) -> None:
    groups = [[request(10 * caller + number) for number in range(6)] for caller in range(4)]
    alone = generate(engine, [asked for group in groups for asked in group])
    long = request(3)
    first = engine.generate([request(1, length=CONTEXT - 1), long], Sampling(max_new_tokens=100))
    next(first)
    assert engine.health()["requests"] == 1
    found: list[dict[str, Trajectory]] = [{} for _ in groups]
    threads = [
        threading.Thread(target=lambda own=own, group=group: own.update(generate(engine, group)))
        for own, group in zip(found, groups, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for own, group in zip(found, groups, strict=True):
        assert own.keys() == {asked.uid for asked in group}, "each its own, though the requests came together"
        for uid, sample in own.items():
            assert torch.equal(sample.token_ids(), alone[uid].token_ids())
            assert torch.allclose(sample.logprobs(), alone[uid].logprobs(), atol=1e-6)
    again = engine.generate([long], Sampling(max_new_tokens=100))
    same = next(again), next(first)  # the other's steps have finished it
    assert torch.equal(same[0].token_ids(), same[1].token_ids())
    first = engine.generate([request(1, length=CONTEXT - 1), long], Sampling(max_new_tokens=100))
    second = engine.generate([request(2, length=CONTEXT - 1), long], Sampling(max_new_tokens=100))
    next(first), next(second)
    first.close()
    assert engine.health()["requests"] == 1, "a caller ends its own requests only"
    assert next(second).uid == long.uid


CALLERS = (
    samples_come_as_they_finish,
    samples_that_nobody_wants_any_more_are_given_up,
    requests_join_an_open_stream,
    a_stream_that_is_given_up_keeps_nothing_of_those_that_join_it,
    requests_of_a_call_are_added_between_two_steps,
    several_callers_share_the_steps,
)
