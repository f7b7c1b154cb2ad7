"""Weights, samples and the prefix cache under the queue of two batches that vLLM has on GPU and not on CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_mcore.data.tiny_models import make_tiny_model
from grpo_mcore.generation import Engine
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn
from tests.functional.preload import preload

STEPS = 6


@pytest.fixture(scope="module", params=["SecondRunnerExecutor", "QueueExecutor"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """On GPU vLLM takes the second model runner, unless the model needs the first. They are scheduled differently."""
    preload()
    from vllm import envs

    from tests.unit.generation import queue_executor

    envs.disable_envs_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        folder = make_tiny_model("qwen3", tmp_path_factory.mktemp("tiny"), words=True, num_hidden_layers=1)
        started = queue_executor.engine(folder, getattr(queue_executor, request.param))
        assert started._llm_engine.vllm_config.use_v2_model_runner == (request.param == "SecondRunnerExecutor")
        yield started
        started.shutdown()
    envs.disable_envs_cache()


@pytest.fixture
def between(engine: Engine) -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Set a function that is called, with the number of steps so far, before each step of generation."""
    take, numbers = engine._steps._step, itertools.count()

    def use(action: Callable[[int], None]) -> None:
        nonlocal numbers
        numbers = itertools.count()

        def step(deliver: Any) -> None:
            action(next(numbers))
            take(deliver)

        engine._steps._step = step

    yield use
    engine._steps._step = take


def request(number: int, length: int = 9) -> GenerationRequest:
    return GenerationRequest(f"prompt-{number}", 0, (Turn("user", torch.arange(2, 2 + length)),), seed=number)


def refit(engine: Engine, recompute: bool = False, abort: bool = False) -> None:
    version = (engine.weight_version or 0) + 1
    engine.start_refit({"digest": "plan", "version": version})
    engine.stage_refit()
    engine.commit_refit(version, recompute_kv=recompute)
    engine.abort_refit() if abort else engine.finish_refit()


def sleep(engine: Engine, refits: int = 1) -> None:
    engine.release(pause=True)
    for _ in range(refits):
        refit(engine)
    assert engine.weight_version is not None
    engine.prepare(engine.weight_version)


ACTIONS: dict[str, Callable[[Engine], None]] = {
    "commit": refit,
    "commit and recompute": lambda engine: refit(engine, recompute=True),
    "commit and abort": lambda engine: refit(engine, abort=True),
    "sleep": lambda engine: sleep(engine, refits=0),
    "sleep and commit": sleep,
    "drop": lambda engine: engine.give_up(["prompt-1"]),
}


def check_versions(sample: Trajectory) -> None:
    """Each generated token is of the version that computed it."""
    from tests.unit.generation.queue_executor import FIRST_TOKEN

    computed = (sample.token_ids()[sample.prompt_length :] - FIRST_TOKEN).tolist()
    stamped = [version for version, start, end in sample.weight_versions for _ in range(start, end)]
    assert stamped[sample.prompt_length :] == computed, f"computed with {computed}, {sample.weight_versions}"
    assert len(stamped) == sample.length


def test_vllm_runs_two_batches(engine: Engine) -> None:
    core = engine._llm_engine.engine_core.engine_core
    assert core.batch_queue_size == 2 and type(core.scheduler).__name__ == "AsyncScheduler"


@pytest.mark.parametrize("first", ACTIONS)
@pytest.mark.parametrize("second", ACTIONS)
def test_tokens_are_of_the_weights_that_computed_them(
    engine: Engine, between: Callable[..., None], first: str, second: str
) -> None:
    """For every pair of actions, before every pair of steps."""
    for early in range(STEPS):
        for late in range(early, STEPS):

            def act(step: int, early: int = early, late: int = late) -> None:
                if step == early:
                    ACTIONS[first](engine)
                if step == late:
                    ACTIONS[second](engine)

            between(act)
            requests = [request(number, 9 + number) for number in range(3)]
            samples = {sample.uid: sample for sample in engine.generate(requests, Sampling(max_new_tokens=STEPS))}
            where = f"{first} before step {early}, {second} before step {late}"
            assert set(samples) >= {"prompt-0", "prompt-2"}, where
            for sample in samples.values():
                check_versions(sample)
                assert len(sample.turns[-1]) == STEPS, where
            assert engine.health()["requests"] == 0


def test_a_new_request_reads_no_keys_of_older_weights(engine: Engine, between: Callable[..., None]) -> None:
    """While another request holds blocks, so that vLLM refuses to clear the prefix cache."""
    for late in range(1, STEPS):
        version = (engine.weight_version or 0) + 1
        later: list[Trajectory] = []
        asked = engine.generate([request(1, 17)], Sampling(max_new_tokens=4))

        def act(step: int, late: int = late, asked: Any = asked, later: list[Trajectory] = later) -> None:
            if step == late:
                refit(engine)
                engine._steps._leading = False
                later.extend(asked)
                engine._steps._leading = True

        between(act)
        (sample,) = engine.generate([request(0, 17)], Sampling(max_new_tokens=2 * STEPS))
        check_versions(sample)
        assert len(later) == 1 and later[0].weight_versions[-1][0] == version
        logprobs = later[0].turns[-1].logprobs
        assert logprobs is not None and (-logprobs == version).all(), f"keys and values of {-logprobs}, not {version}"


def test_no_request_reads_keys_of_a_refit_taken_back(engine: Engine) -> None:
    """The version of a refit that was taken back comes again, with other weights."""
    version = (engine.weight_version or 0) + 1
    engine.start_refit({"digest": "plan", "version": version})
    engine.commit_refit(version)
    number = engine._cache_number
    engine.abort_refit()
    refit(engine)
    assert engine.weight_version == version and engine._cache_number > number + 1


def test_a_caller_that_stops_leaves_no_batch_to_a_refit(engine: Engine) -> None:
    """vLLM has launched a batch for the requests that the caller no longer wants; it holds their blocks."""
    core = engine._llm_engine.engine_core.engine_core
    samples = engine.generate([request(number, 40 + 8 * number) for number in range(3)], Sampling(max_new_tokens=60))
    check_versions(next(samples))
    samples.close()
    assert core.batch_queue, "no batch was under way"
    refit(engine)
    assert not core.batch_queue and engine.health()["requests"] == 0
    assert engine._llm_engine.reset_prefix_cache(), "blocks of ended requests are still in use"
    check_versions(*engine.generate([request(0)], Sampling(max_new_tokens=4)))
