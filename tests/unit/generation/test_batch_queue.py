"""Weights, samples and the prefix cache under the queue of two batches that vLLM has on GPU and not on CPU."""

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.generation import Engine, EngineError
from grpo_mcore.generation.worker_calls import has_only_registered_tensors
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.refit import Refit
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from tests.functional.engine_callers import CALLERS
from tests.functional.engine_cases import CONTEXT
from tests.functional.preload import preload
from tests.unit.refit.shards import Handle
from tests.waiting import wait_until

pytestmark = pytest.mark.slow  # exhaustive, on vLLM

STEPS = 4
"""Moments of a sample at which something happens: before the first batch, while the queue fills, when it is full, at
the last batch."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Over vLLM's second model runner, which it takes on GPU unless the model needs the first."""
    preload()
    from vllm import envs

    from tests.unit.generation import queue_executor

    envs.disable_envs_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        folder = make_tiny_model("qwen3", tmp_path_factory.mktemp("tiny"), words=True, num_hidden_layers=1)
        started = queue_executor.engine(folder, max_model_len=CONTEXT)
        assert started._llm_engine.vllm_config.use_v2_model_runner
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


def executor_of(engine: Engine) -> Any:
    return engine._llm_engine.model_executor


def request(number: int, length: int = 9) -> GenerationRequest:
    return GenerationRequest(f"prompt-{number}", 0, (Turn("user", 2 + torch.arange(length) % 99),), seed=number)


def begin(engine: Engine, in_place: bool = False) -> Refit:
    """Let the engine hold the next version's weights beside those in use, or in place of them."""
    executor = executor_of(engine)
    policy, version = executor.policy, engine.weight_version
    policy.train((policy.version if version is None else version) + 1)
    executor.rank.weight_transfer_engine.room = not in_place
    begun = Refit([policy], [Handle(engine.name, engine)], policy.plan, policy.version, verify="full")
    begun.stage()
    return begun


def refit(engine: Engine, recompute: bool = False, in_place: bool = False) -> None:
    begin(engine, in_place).commit(recompute_kv=recompute)


def take_back(engine: Engine, recompute: bool = False) -> None:
    """As where another engine fails in its commit."""
    begin(engine)
    engine.commit_refit(executor_of(engine).policy.version, recompute)
    engine.abort_refit()


def abort(engine: Engine, in_place: bool = False) -> None:
    """The policy fails when the engine has taken some of the new weights."""
    sender = executor_of(engine).policy.sender
    sender.fails_in = len(executor_of(engine).policy.plan.buckets) - 1
    with pytest.raises(RefitError, match="out of luck"):
        begin(engine, in_place)
    sender.fails_in = None


def replace_twice(engine: Engine) -> None:
    """As `abort`, in place: the old weights are gone. Open requests wait for the next refit."""
    version = engine.weight_version
    abort(engine, in_place=True)
    assert engine.weight_version is None and engine._lock._held
    executor_of(engine).policy.version = version
    refit(engine, in_place=True)
    assert not engine._lock._held


def sleep(engine: Engine, refits: int = 1, keep_weights: bool = True) -> None:
    engine.release(pause=True, keep_weights=keep_weights)
    for _ in range(refits):
        refit(engine)
    assert engine.weight_version is not None
    engine.prepare(engine.weight_version)


ACTIONS: dict[str, Callable[[Engine], None]] = {
    "commit": refit,
    "commit in place": lambda engine: refit(engine, in_place=True),
    "abort in place and commit": replace_twice,
    "commit and recompute": lambda engine: refit(engine, recompute=True),
    "commit and abort": take_back,
    "abort": abort,
    "sleep": lambda engine: sleep(engine, refits=0),
    "sleep and commit": sleep,
    "sleep without weights and commit": lambda engine: sleep(engine, keep_weights=False),
    "drop": lambda engine: engine.give_up(["prompt-1"]),
}


def check_versions(engine: Engine, sample: Trajectory) -> None:
    """Each generated token is of the version whose weights computed it."""
    from tests.unit.generation.queue_executor import FIRST_TOKEN

    computed = (sample.token_ids()[sample.prompt_length :] - FIRST_TOKEN).tolist()
    values = executor_of(engine).policy.values
    stamped = [values[version] for version, start, end in sample.weight_versions for _ in range(start, end)]
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
    """For every pair of actions, before every pair of steps, and both before the one at which the queue is full."""
    for early, late in [*itertools.combinations(range(STEPS), 2), (2, 2)]:

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
            check_versions(engine, sample)
            assert len(sample.turns[-1]) == STEPS, where
        assert engine.health()["requests"] == 0


@pytest.mark.parametrize("last", ["commit", "abort"])
def test_samples_go_on_between_a_refits_beginning_and_its_end(
    engine: Engine, between: Callable[..., None], last: str
) -> None:
    """So the queue is full again when the staged weights are put to use, or dropped."""
    for early, late in itertools.combinations(range(STEPS + 1), 2):
        begun: list[Refit] = []

        def act(step: int, early: int = early, late: int = late, begun: list[Refit] = begun) -> None:
            if step == early:
                begun.append(begin(engine))
            if step == late:
                begun[0].commit() if last == "commit" else engine.abort_refit()

        between(act)
        for sample in engine.generate([request(number) for number in range(3)], Sampling(max_new_tokens=STEPS)):
            check_versions(engine, sample)
        assert engine.health()["state"] == "ready"


@pytest.mark.parametrize("promise", CALLERS, ids=lambda promise: promise.__name__)
def test_callers_notice_no_queue(engine: Engine, promise: Callable[[Engine], None]) -> None:
    """What holds with a model, whose engine has no queue here."""
    promise(engine)


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
        check_versions(engine, sample)
        assert len(later) == 1 and later[0].weight_versions[-1][0] == version
        logprobs = later[0].turns[-1].logprobs
        value = executor_of(engine).policy.values[version]
        assert logprobs is not None and (-logprobs == value).all(), f"keys and values of {-logprobs}, not {value}"


def test_no_request_reads_keys_of_a_refit_taken_back(engine: Engine) -> None:
    """The version of a refit that was taken back comes again, with other weights."""
    version, number = (engine.weight_version or 0) + 1, engine._cache_number
    take_back(engine)
    refit(engine)
    assert engine.weight_version == version and engine._cache_number > number + 2


def test_new_weights_take_the_memory_of_those_before_the_last(engine: Engine) -> None:
    places: list[set[int]] = []
    for _ in range(4):
        refit(engine)
        places.append({weight.data_ptr() for weight in executor_of(engine).rank.model.parameters()})
    assert places[0] == places[2] and places[1] == places[3] and places[0].isdisjoint(places[1])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_caller_that_stops_leaves_no_batch_to_a_refit(engine: Engine, in_place: bool) -> None:
    """vLLM has launched a batch for the requests that the caller no longer wants; it holds their blocks, and reads the
    weights that a refit in place writes over."""
    core = engine._llm_engine.engine_core.engine_core
    samples = engine.generate(
        [request(number, CONTEXT - 24 + 8 * number) for number in range(3)], Sampling(max_new_tokens=60)
    )
    check_versions(engine, next(samples))
    samples.close()
    assert core.batch_queue, "no batch was under way"
    refit(engine, in_place=in_place)
    assert not core.batch_queue and engine.health()["requests"] == 0
    assert engine._llm_engine.reset_prefix_cache(), "blocks of ended requests are still in use"
    check_versions(engine, *engine.generate([request(0)], Sampling(max_new_tokens=4)))


def test_a_refit_in_place_waits_for_the_batch_of_paused_requests(
    engine: Engine, between: Callable[[Callable[[int], None]], None]
) -> None:
    """Before every step: the engine pauses without sleeping, takes weights in place, and goes on."""
    for late in range(STEPS):

        def act(step: int, late: int = late) -> None:
            if step == late:
                engine._asleep = ["weights"]  # it keeps its memory
                engine.release(pause=True)
                engine._asleep = []
                refit(engine, in_place=True)
                assert engine.weight_version is not None
                engine.prepare(engine.weight_version)

        between(act)
        for sample in engine.generate([request(number) for number in range(2)], Sampling(max_new_tokens=STEPS)):
            check_versions(engine, sample)


def test_vllm_is_called_by_one_thread(engine: Engine) -> None:
    """CUDA's current stream and its libraries' work space belong to a thread."""
    executor = executor_of(engine)
    executor.threads.clear()

    def caller(number: int) -> None:
        list(engine.generate([request(number)], Sampling(max_new_tokens=2)))
        engine.health()

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(caller, range(4)))
    sleep(engine, keep_weights=False)
    take_back(engine, recompute=True)
    assert len(executor.threads) == 1 and threading.get_ident() not in executor.threads


def test_a_dropped_stream_is_ended_by_a_collection_inside_a_call_of_vllm(engine: Engine) -> None:
    """vLLM collects garbage when it shuts down, for one."""
    gc.disable()
    try:
        stream: Any = engine.generate([request(0, CONTEXT - 3), request(1)], Sampling(max_new_tokens=60))
        check_versions(engine, next(stream))
        circle = [stream]
        circle.append(circle)
        del stream, circle
        assert engine.health()["requests"] == 1
        with engine._lock.call():
            assert engine._device.submit(gc.collect).result(timeout=60)
    finally:
        gc.enable()
    wait_until(lambda: not engine.health()["requests"], "the stream's end")


def test_an_engine_that_sleeps_before_a_refit_drops_its_weights(engine: Engine) -> None:
    """Instead of copying them to the host and back, unless the model has tensors that nobody would restore."""
    executor, version, config = executor_of(engine), engine.weight_version, engine.config
    for only, keep, kept, level in ((True, False, (), 2), (True, True, (), 1), (False, False, (), 1),
                                    (True, False, ("visual.",), 1)):  # fmt: skip
        engine._sleep_level, engine.config = None, replace(config, kept=kept)
        if not only:
            executor.rank.model.unregistered = torch.ones(2)
        engine.release(keep_weights=keep)
        assert executor.levels[-1] == level
        if level == 2:
            with pytest.raises(EngineError, match="holds weight version None"):
                engine.prepare(version or 0)
        refit(engine)
        assert engine.weight_version is not None
        engine.prepare(engine.weight_version)
        check_versions(engine, *engine.generate([request(0)], Sampling(max_new_tokens=2)))
        vars(executor.rank.model).pop("unregistered", None)
    engine._sleep_level, engine.config = None, config


def test_tensors_that_a_sleep_without_weights_would_lose() -> None:
    def worker(**attributes: Any) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3))
        model.register_buffer("table", torch.ones(4))
        for name, value in attributes.items():
            setattr(model[0], name, value(model) if callable(value) else value)
        return SimpleNamespace(model_runner=SimpleNamespace(model=model))

    helper = type("Impl", (), {"__module__": "vllm.attention"})()
    helper.scales = [torch.ones(2)]
    assert has_only_registered_tensors(worker())
    assert has_only_registered_tensors(worker(view=lambda model: model[0].weight.T, half=lambda model: model.table[:2]))
    assert has_only_registered_tensors(worker(kv_cache=[torch.ones(2)], elsewhere=torch.ones(2, device="meta")))
    for lost in (torch.ones(2), {"a": (torch.ones(2),)}, helper):
        assert not has_only_registered_tensors(worker(lost=lost))
