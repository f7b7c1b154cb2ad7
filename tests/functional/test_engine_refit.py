"""A real vLLM engine on a tiny random model in float32, against transformers: generation, and refits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.families import params_of
from grpo_mcore.generation import Engine, EngineError
from grpo_mcore.generation.worker_calls import divide_logits
from grpo_mcore.parallel.probes import fixed_direction
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import refit
from grpo_mcore.refit.transport.board import Mapped, Seat
from grpo_mcore.refit.transport.buffer import block_view
from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.tools.demo.tiny_models import EOS
from grpo_mcore.tools.verdict.collect import traced_layers
from grpo_mcore.tools.verdict.judge import Judge, JudgedSample
from grpo_mcore.tools.verdict.verdict import first_layer
from tests.functional.engine_callers import CALLERS
from tests.functional.engine_cases import (
    CONTEXT,
    Policy,
    check_pause,
    check_refit_in_flight,
    config,
    generate,
    load_reference,
    make_model,
    request,
    worst_difference,
)
from tests.unit.data.byte_level import TEXT, make_byte_level
from tests.unit.refit.shards import Handle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(config(folder))
    yield engine
    engine.shutdown()
    engine.shutdown()


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return load_reference(folder)


# Generation with the weights from the folder.


def test_logprobs_are_those_of_transformers(engine: Engine, reference: torch.nn.Module) -> None:
    requests = [request(number) for number in range(24)]
    found = generate(engine, requests)
    assert len(found) == 24
    assert worst_difference(reference, found) < 1e-5
    for asked in requests:
        trajectory = found[asked.uid]
        assert trajectory.turns[:-1] == asked.prompt and trajectory.turns[-1].loss_mask
        assert trajectory.weight_versions == ((0, 0, trajectory.length),)


def test_a_teachers_engine_scores_samples_at_the_policys_temperature(
    engine: Engine, reference: torch.nn.Module
) -> None:
    """Also a single token, and one that fills the context but for the token that vLLM says after it."""
    sequences = [request(number, length=length).token_ids() for number, length in enumerate((1, 2, 40, CONTEXT - 1))]
    rpc: Any = engine._llm_engine.collective_rpc
    for temperature in (1.0, 0.7):
        assert all(rpc(divide_logits, args=(temperature,)))
        scores = engine.score_tokens(sequences)
        rpc(divide_logits, args=(1 / temperature,))
        for tokens, mine in zip(sequences, scores, strict=True):
            with torch.no_grad():
                wanted = (reference(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
            assert mine[0] == 0 and len(mine) == len(tokens)
            assert torch.allclose(mine[1:], wanted.gather(1, tokens[1:, None])[:, 0], atol=1e-5)
    with pytest.raises(ValueError, match="160 prompt tokens in a context of 160"):
        engine.score_tokens([request(0, length=CONTEXT).token_ids()])


@pytest.mark.parametrize("how", [{"temperature": 0.6}, {"temperature": 0.8, "top_p": 0.7}], ids=str)
def test_logprobs_are_of_the_distribution_sampled_from(
    engine: Engine, reference: torch.nn.Module, how: dict[str, float]
) -> None:
    found = generate(engine, [request(number) for number in range(12)], **how)
    assert worst_difference(reference, found, **how) < 1e-5


def test_what_comes_out_of_layers_is_that_of_transformers(folder: Path, engine: Engine) -> None:
    judge = Judge(folder, Sampling(1))
    engine.record_layers(fixed_direction(judge.shape.hidden_size))
    found = generate(engine, [request(number) for number in range(100, 106)])
    traces = engine.layer_traces()
    samples = [
        JudgedSample(
            uid,
            sample.token_ids(),
            sample.loss_mask(),
            None,
            sample.logprobs(),
            engine_layers=traced_layers(traces[uid, 0], sample.length),
        )
        for uid, sample in found.items()
    ]
    assert all(len(sample.engine_layers) == judge.shape.num_layers for sample in samples)
    agree = first_layer(judge, samples, torch.float32, "engine")
    assert agree is not None and agree.what.endswith("agree: it is what comes after them")
    assert engine.layer_traces() == {}


def test_vllms_tokenizer_shows_text_as_it_was_written(tmp_path: Path) -> None:
    """Also its copies for threads. DeepSeek's folders name LlamaTokenizerFast, which had dropped spaces."""
    from vllm.tokenizers import get_tokenizer, maybe_make_thread_pool

    from grpo_mcore.generation.engine_tokenizer import register_tokenizer

    ids = make_byte_level(tmp_path, "LlamaTokenizerFast")(TEXT, add_special_tokens=False)["input_ids"]
    register_tokenizer()
    register_tokenizer()
    tokenizer = maybe_make_thread_pool(get_tokenizer(str(tmp_path)), 2)
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == TEXT == tokenizer._tokenizer.decode(ids)


def test_greedy(engine: Engine, reference: torch.nn.Module) -> None:
    (found,) = generate(engine, [request(1)], temperature=0.0).values()
    tokens = found.token_ids()
    with torch.no_grad():
        best = reference(tokens[None]).logits[0].argmax(-1)
    assert torch.equal(best[found.prompt_length - 1 : -1], tokens[found.prompt_length :])


def test_the_end_of_sequence_token_is_part_of_the_sample(engine: Engine) -> None:
    found = generate(engine, [request(number) for number in range(100)], max_new_tokens=40)
    ended = [trajectory for trajectory in found.values() if trajectory.finish_reason == "stop"]
    assert 5 < len(ended) < 95
    for trajectory in found.values():
        turn = trajectory.turns[-1]
        assert turn.logprobs is not None and len(turn.logprobs) == len(turn.token_ids)
        assert (turn.token_ids == EOS).sum() == (trajectory.finish_reason == "stop")
        assert trajectory.truncated == (trajectory.finish_reason == "length")
        assert "<eos>" not in turn.text
        words = [f"w{token}" if token > EOS else "" for token in turn.token_ids.tolist()]
        assert turn.text.split() == [word for word in words if word]
        if trajectory.finish_reason == "stop":
            assert turn.token_ids[-1] == EOS
        else:
            assert len(turn) == 40


def test_stop_tokens_and_stop_strings_are_kept(engine: Engine, reference: torch.nn.Module) -> None:
    found = generate(engine, [request(number) for number in range(20)], stop_token_ids=tuple(range(40)))
    stopped = [t.turns[-1] for t in found.values() if t.finish_reason == "stop"]
    assert stopped and all(turn.token_ids[-1] < 40 for turn in stopped)
    assert all((turn.token_ids[:-1] >= 40).all() for turn in stopped)

    found = generate(engine, [request(number, stop_strings=("<pad>",)) for number in range(60)])  # a special token
    turns = [t.turns[-1].token_ids for t in found.values()]
    assert any(ids[-1] == 0 for ids in turns) and all((ids[:-1] != 0).all() for ids in turns)

    requests = [request(number, stop_strings=("w9",)) for number in range(40)]
    found = generate(engine, requests, stop_strings=("w11", "w12"))
    stopped = [t.turns[-1] for t in found.values() if t.finish_reason == "stop"]
    stopped = [turn for turn in stopped if turn.token_ids[-1] != EOS]
    assert {turn.text[-3:] for turn in stopped} >= {"w11", "w12"}
    assert any(turn.text.endswith("w9") for turn in stopped)
    for turn in stopped:  # the token is whole, the text ends with the stop string: "w119" stops at "w11"
        assert f"w{turn.token_ids[-1]}".startswith(turn.text.split()[-1])
    assert worst_difference(reference, found) < 1e-5


def test_the_context_limits_new_tokens(engine: Engine) -> None:
    (found,) = generate(engine, [request(1, length=CONTEXT - 5)], max_new_tokens=50).values()
    assert found.length <= CONTEXT
    if found.finish_reason != "stop":
        assert found.generated_length == 5 and found.truncated
    with pytest.raises(ValueError, match=f"'prompt-1', generation 0: {CONTEXT} prompt tokens in"):
        generate(engine, [request(0), request(1, length=CONTEXT)])
    with pytest.raises(ValueError, match="seed -1"):
        generate(engine, [request(0, seed=-1)])
    assert engine.health()["requests"] == 0


@pytest.mark.parametrize("promise", CALLERS, ids=lambda promise: promise.__name__)
def test_callers(engine: Engine, promise: Callable[[Engine], None]) -> None:
    promise(engine)


def test_seeds_decide_the_samples_and_nothing_else_does(engine: Engine) -> None:
    requests = [request(number) for number in range(32)]
    first = generate(engine, requests)
    again = generate(engine, requests)
    apart = generate(engine, requests[:5]) | generate(engine, requests[::-1][:27])
    for uid, trajectory in first.items():
        assert again[uid] == trajectory, "bit for bit"
        assert torch.equal(apart[uid].token_ids(), trajectory.token_ids())
        assert torch.allclose(apart[uid].logprobs(), trajectory.logprobs(), atol=1e-6)
    other = generate(engine, [request(number, seed=7 + number) for number in range(32)])
    assert sum(torch.equal(other[uid].token_ids(), first[uid].token_ids()) for uid in first) < 3


# Refits of the same engine.


@pytest.fixture(scope="module")
def policy(folder: Path, engine: Engine) -> Iterator[Policy]:
    policy = Policy(folder)
    yield policy
    policy.close()


def test_after_a_refit_the_engine_has_the_policys_weights(engine: Engine, policy: Policy) -> None:
    # Two prompts fill a whole block of the prefix cache (128 tokens on CPU).
    requests = [request(number, length=140 if number < 2 else 0) for number in range(16)]
    plan = policy.plan(engine)
    assert len(plan.buckets) > 10 and not plan.fallbacks
    checked = []
    for version in (1, 2, 3):
        before = generate(engine, requests)
        policy.change(seed=version)
        assert worst_difference(policy.reference, before) > 0.1
        report = policy.refit(engine, version)
        assert (report.version, report.bytes, report.in_place) == (version, plan.block_bytes, ())
        checked.append(report.checked)
        engine.prepare(version)
        after = generate(engine, requests)
        assert worst_difference(policy.reference, after) < 1e-4
        for trajectory in after.values():
            assert trajectory.weight_versions == ((version, 0, trajectory.length),)
    assert checked[0] == sum(len(block.reads) for block in plan.blocks()), "the first refit is checked throughout"
    assert 0 < checked[1] < checked[0] / 4
    with pytest.raises(EngineError, match="holds weight version 3, not 2"):
        engine.prepare(2)


@pytest.mark.parametrize("buffer_bytes", [2 * 34_304, 1 << 22])
def test_without_room_for_a_second_copy_layers_are_replaced_one_by_one(
    engine: Engine, policy: Policy, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    from grpo_mcore.refit.engine_side.vllm_backend import RefitWeightEngine

    monkeypatch.setattr(RefitWeightEngine, "_has_room", lambda *_: False)
    policy.change(seed=buffer_bytes)
    report = policy.refit(engine, 5, policy.plan(engine, buffer_bytes=buffer_bytes), verify="full")
    assert report.in_place == (engine.name,) and report.pause_seconds == report.seconds
    assert worst_difference(policy.reference, generate(engine, [request(1)])) < 1e-4


def test_the_thread_of_a_rank_on_a_gpu_works_on_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins with the first GPU, of whatever rank it is."""
    from grpo_mcore.refit.engine_side.vllm_backend import RefitWeightEngine

    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    for device in (torch.device("cpu"), torch.device("cuda", 3)):
        rank = RefitWeightEngine.__new__(RefitWeightEngine)
        rank.device, rank._take = device, done.append
        rank._mapped = SimpleNamespace(board="board")
        rank._take_quietly()
    assert done == ["board", torch.device("cuda", 3), "board"]


def test_a_refit_in_bfloat16_rounds_and_nothing_more(engine: Engine, policy: Policy) -> None:
    plan = policy.plan(engine, dtype="bfloat16", buffer_bytes=1 << 20)
    policy.change(seed=10)
    policy.refit(engine, 10, plan, verify="full")
    with torch.no_grad():
        for parameter in policy.reference.parameters():
            parameter.copy_(parameter.bfloat16().float())
    assert worst_difference(policy.reference, generate(engine, [request(1), request(2)])) < 1e-4


def test_weights_are_exchanged_while_requests_are_under_way(engine: Engine, policy: Policy) -> None:
    check_refit_in_flight(engine, policy, 12)


def test_without_room_for_a_second_copy_requests_wait_for_the_refit(
    engine: Engine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs of which vLLM has taken most: its gpu_memory_utilization leaves less than the weights need again."""
    from grpo_mcore.refit.engine_side.vllm_backend import RefitWeightEngine

    monkeypatch.setattr(RefitWeightEngine, "_has_room", lambda *_: False)
    check_refit_in_flight(engine, policy, 16, in_place=True)


def test_samples_stand_still_while_others_need_the_device(engine: Engine, policy: Policy) -> None:
    check_pause(engine, policy, 14)


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.qkv_proj.weight", "model.norm.weight"])
def test_a_plan_that_leaves_a_parameter_unfilled_is_refused(engine: Engine, policy: Policy, missing: str) -> None:
    policy.refit(engine, 20)
    before = generate(engine, [request(1)])
    plan = policy.plan(engine, params=[param for param in params_of(policy.shape) if param.engine != missing])
    with pytest.raises(RefitError, match=rf"start_refit .* leaves parameters of the engine unfilled: {missing}"):
        policy.refit(engine, 21, plan)
    assert engine.weight_version == 20 and generate(engine, [request(1)]) == before


def test_a_tensor_the_model_does_not_have_is_named(engine: Engine, policy: Policy) -> None:
    *params, norm = [param for param in params_of(policy.shape) if not param.copy]
    plan = policy.plan(engine, params=[*params, replace(norm, engine="model.layers.7.mlp.up_proj.weight")])
    with pytest.raises(RefitError, match="has no parameters model.layers.7.mlp.up_proj.weight"):
        policy.refit(engine, 30, plan)
    policy.refit(engine, 31)
    assert worst_difference(policy.reference, generate(engine, [request(1)])) < 1e-4


def test_parameters_that_slices_cannot_express_go_through_vllms_own_loading(engine: Engine, policy: Policy) -> None:
    params = [
        replace(param, engine=None) if "qkv" in param.megatron or "final" in param.megatron else param
        for param in params_of(policy.shape)
    ]
    plan = policy.plan(engine, params=params)
    for version in (35, 36):
        policy.change(seed=version)
        report = policy.refit(engine, version, plan)
        assert report.fallbacks == plan.fallbacks and len(plan.fallbacks) == 2 * 3 + 1
        assert worst_difference(policy.reference, generate(engine, [request(1)])) < 1e-4
    policy.change(seed=37)
    policy.refit(engine, 37)
    assert worst_difference(policy.reference, generate(engine, [request(1)])) < 1e-4


class Forger(RefitSender):
    """Puts one wrong value into the buffer."""

    def fill_bucket(self, index: int, *checked: Any) -> dict[str, Any]:
        answer = super().fill_bucket(index, *checked)
        for fill in self._part.fills[index]:
            if fill.param == "decoder.layers.1.mlp.linear_fc2.weight" and fill.box[0][0] == 0:
                block_view(self._mapped.buffer, self._part, index, fill)[3, 5] += 1
        return answer


class Sick(RefitSender):
    def fill_bucket(self, index: int, *checked: Any) -> dict[str, Any]:
        if index == 3:
            raise RuntimeError("out of luck")
        return super().fill_bucket(index, *checked)


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (Forger, r"model.layers.1.mlp.down_proj.weight \[0:64, 0:48\] on engine-0 rank 0 is not what policy rank 0"),
        (Sick, "send_refit of .* failed on policy-0: out of luck"),
    ],
)
def test_a_refit_that_fails_leaves_the_old_weights(
    engine: Engine, policy: Policy, sender: type[RefitSender], message: str
) -> None:
    policy.refit(engine, 40)
    before = generate(engine, [request(1), request(2)])
    policy.change(seed=41)
    first = sender(policy.source(0), 0)
    with pytest.raises(RefitError, match=message):
        refit(
            [Handle("policy-0", first), policy.handles[1]], [Handle("engine-0", engine)], policy.plan(engine), 41,
            verify="full",
        )  # fmt: skip
    first.close_refit()
    engine.prepare(40)
    assert generate(engine, [request(1), request(2)]) == before


def test_a_commit_is_taken_back_when_another_engine_fails(engine: Engine, policy: Policy) -> None:
    class Other:
        """An engine that dies in its commit."""

        def __getattr__(self, name: str) -> Any:
            return {"stage_refit": lambda *_: {"seconds": 0.0, "sums": {}}}.get(name, lambda *_: None)

        def start_refit(self, manifest: dict[str, Any]) -> dict[str, Any]:
            reader = Mapped.attach(manifest["transports"][0], torch.device("cpu"))
            reader.board.sit(Seat(*manifest["seats"][0]), "engine-1")
            reader.board.finished(1000)  # it takes nothing
            return {"digest": manifest["digest"], "in_place": False, "dtype": "float32", "verify": "full"}

        def commit_refit(self, *_: Any) -> None:
            raise RuntimeError("gone")

    policy.refit(engine, 45)
    before = generate(engine, [request(1), request(2)])
    policy.change(seed=46)
    plan = policy.plan(engine)
    with pytest.raises(RefitError, match="commit_refit of the refit to weight version 46 failed on engine-1: gone"):
        refit(policy.handles, [Handle("engine-0", engine), Handle("engine-1", Other())], plan, 46)
    engine.prepare(45)
    assert generate(engine, [request(1), request(2)]) == before
    policy.refit(engine, 46)
    assert worst_difference(policy.reference, generate(engine, [request(1)])) < 1e-4


def test_calls_out_of_order(engine: Engine, policy: Policy) -> None:
    with pytest.raises(EngineError, match="nothing to stage, no refit is open"):
        engine.stage_refit()
    with pytest.raises(EngineError, match="cannot be committed, no refit is open"):
        engine.commit_refit(50)
    manifest = policy.manifest(engine)
    with pytest.raises(EngineError, match="read plan wrong as"):
        engine.start_refit(manifest | {"digest": "wrong"})
    engine.start_refit(manifest)
    engine.start_refit(manifest)  # closes the half-open one
    with pytest.raises(EngineError, match="only 0 of"):
        engine.commit_refit(50)
    engine.abort_refit()
    engine.abort_refit()
    policy.refit(engine, 51)
    assert worst_difference(policy.reference, generate(engine, [request(1)])) < 1e-4
