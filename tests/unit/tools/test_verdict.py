"""The verdict names planted faults: numbers of a float32 model that is really wrong, beside numbers that are right."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from grpo_mcore.refit.engine_side.fp8 import Format, dequantized, quantized
from grpo_mcore.rollout.trajectory import Sampling
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.verdict.collect import overridden
from grpo_mcore.tools.verdict.judge import Judge, JudgedSample, drawn
from grpo_mcore.tools.verdict.verdict import Side, Verdict, first_layer, judge_samples

SAMPLING = Sampling(max_new_tokens=1)
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 61}
Says = Callable[[nn.Module, nn.Module, JudgedSample], Tensor]


class Model:
    """A judge, and the same model in float32 with the weights now (`new`) and before (`old`)."""

    def __init__(self, family: str, folder: Path, **sizes: Any) -> None:
        folders = [make_tiny_model(family, folder / str(seed), seed=seed, **SMALL | sizes) for seed in (0, 1)]
        self.new, self.old = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in folders)
        self.judge = Judge(folders[0], SAMPLING, folders[1])
        generator = torch.Generator().manual_seed(3)
        self.samples = []
        for name, length in (("a#0", 22), ("a#1", 30)):
            tokens, generated = torch.randint(2, 61, (length,), generator=generator), torch.arange(length) >= 8
            blank = JudgedSample(name, tokens, generated, None, None)
            right = says(self.new, blank) * generated
            self.samples.append(replace(blank, policy=right, engine=right))

    def verdict(self, side: str, wrong: Says) -> Verdict:
        samples = []
        for sample in self.samples:
            with torch.no_grad():
                values = wrong(copy.deepcopy(self.new), self.old, sample)
            samples.append(replace(sample, **{side: values * sample.generated}))
        return judge_samples(self.judge, samples, torch.float32)


@torch.no_grad()
def says(network: nn.Module, sample: JudgedSample, sampling: Sampling = SAMPLING, **how: Any) -> Tensor:
    logits = network(sample.tokens[None], **how).logits[0, :-1]
    return drawn(logits.double(), sample.tokens, sampling).float()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen2", tmp_path_factory.mktemp("dense"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen3_moe", tmp_path_factory.mktemp("experts"), mlp_only_layers=[])


@pytest.mark.parametrize(
    ("side", "name", "layer"),
    [("policy", "layers.0.self_attn.o_proj.weight", 1), ("engine", "layers.1.mlp.down_proj.weight", 2)],
)
def test_the_first_layer_that_parts_is_named(dense: Model, side: Side, name: str, layer: int) -> None:
    wrong = copy.deepcopy(dense.new)
    weight = dict(wrong.named_parameters())[f"model.{name}"]
    weight.data.copy_(dict(dense.old.named_parameters())[f"model.{name}"])
    other = copy.copy(dense.judge)
    other.network = wrong.double()
    samples = []
    for sample in dense.samples:
        said, layers = other.logprobs(sample).float() * sample.generated, other.layers(sample)
        if side == "engine":  # it does not compute the last token
            layers = {number: trace[:, :-1] for number, trace in layers.items()}
        where = "layers" if side == "policy" else "engine_layers"
        samples.append(replace(sample, **{side: said, where: layers}))  # type: ignore[arg-type]
    verdict = judge_samples(dense.judge, samples, torch.float32)
    layers_said = [one for one in verdict.evidence if one.cause == "layer"]
    assert [one.side for one in layers_said] == [side]
    assert layers_said[0].what.startswith(f"layer {layer} is the first to part, most at token ")
    assert verdict.causes[side].cause == "weights"


def test_layers_that_agree_leave_what_comes_after_them(dense: Model) -> None:
    samples = [replace(sample, layers=dense.judge.layers(sample)) for sample in dense.samples]
    agree = first_layer(dense.judge, samples, torch.float32)
    assert agree is not None and agree.what == "all 2 agree: it is what comes after them"
    assert first_layer(dense.judge, dense.samples, torch.float32) is None


def at(**changed: Any) -> Says:
    return lambda new, old, sample: says(new, sample, replace(SAMPLING, **changed))


def changed(name: str, change: Callable[[Tensor, Tensor], Any]) -> Says:
    """The model with parameters whose names end like this changed: `change` gets the new and the old values."""

    def wrong(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
        before = dict(old.named_parameters())
        for each, tensor in new.named_parameters():
            if each.endswith(name):
                change(tensor, before[each])
        return says(new, sample)

    return wrong


def stale(tensor: Tensor, old: Tensor) -> None:
    tensor.copy_(old)


def stale_head(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
    new.lm_head.weight = nn.Parameter(old.lm_head.weight.clone())
    return says(new, sample)


def other_theta(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
    config = copy.deepcopy(new.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    new.model.rotary_emb = type(new.model.rotary_emb)(config)
    return says(new, sample)


def one_position_late(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
    positions = torch.arange(len(sample.tokens)) + (torch.arange(len(sample.tokens)) >= 8)
    mask = torch.ones_like(sample.tokens)[None]
    return says(new, sample, position_ids=positions[None], attention_mask=mask)


def cache_of_old_weights(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
    start = old(sample.tokens[None, :8], use_cache=True)
    rest = new(sample.tokens[None, 8:], past_key_values=start.past_key_values)
    logits = torch.cat([start.logits[0], rest.logits[0]])[:-1]
    return drawn(logits.double(), sample.tokens, SAMPLING).float()


def sees_its_neighbour(samples: list[JudgedSample]) -> Says:
    def wrong(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
        index = [one.name for one in samples].index(sample.name)
        other = samples[index - 1].tokens
        row = torch.cat([other, sample.tokens])[None]
        places = torch.cat([torch.arange(len(other)), torch.arange(len(sample.tokens))])[None]
        logits = new(row, position_ids=places, attention_mask=torch.ones_like(row)).logits[0, len(other) : -1]
        return drawn(logits.double(), sample.tokens, SAMPLING).float()

    return wrong


def norm_cast(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
    def forward(self: Any, states: Tensor) -> Tensor:
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (states * scale).bfloat16().float()

    for module in new.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)
    return says(new, sample)


def routes_of_the_token_before(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
    for layer in new.model.layers:
        gate = layer.mlp.gate.forward
        layer.mlp.gate.forward = lambda states, gate=gate: tuple(part.roll(1, 0) for part in gate(states))
    return says(new, sample)


def stale_expert(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
    experts, before = new.model.layers[0].mlp.experts, old.model.layers[0].mlp.experts
    experts.gate_up_proj[1], experts.down_proj[1] = before.gate_up_proj[1], before.down_proj[1]
    return says(new, sample)


def heads_swapped(tensor: Tensor, old: Tensor) -> None:
    size = len(tensor) // 4
    tensor.copy_(torch.cat([tensor[size : 2 * size], tensor[:size], tensor[2 * size :]]))


def halves(tensor: Tensor, old: Tensor) -> None:
    tensor.copy_(tensor.roll(len(tensor) // 2, 0))


def in_fp8(kind: Format) -> Says:
    """The model with the values that FP8 weights stand for. What an engine fuses is quantised together."""

    def wrong(new: nn.Module, old: nn.Module, sample: JudgedSample) -> Tensor:
        tensors = dict(new.named_parameters())
        for first, *others in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",)):
            for name, tensor in tensors.items():
                if name.endswith(f"{first}.weight"):
                    parts = [tensor, *(tensors[name.replace(first, other)] for other in others)]
                    values = dequantized(kind, *quantized(kind, torch.cat(parts).bfloat16()))
                    for part, value in zip(parts, values.split([len(part) for part in parts]), strict=True):
                        part.copy_(value)
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensor.copy_(dequantized(kind, *quantized(kind, tensor.bfloat16())))
        return says(new, sample)

    return wrong


DENSE: dict[str, tuple[str, Says, str, str]] = {
    "one version too old": ("engine", lambda new, old, sample: says(old, sample), "version", "all weights"),
    "stale tied head": ("engine", stale_head, "weights", "lm_head.weight"),
    "stale norm": ("policy", changed("layers.1.input_layernorm.weight", stale), "weights", "layers.1.input_layernorm"),
    "stale projection": ("engine", changed("layers.0.mlp.up_proj.weight", stale), "weights", "layers.0.mlp.up_proj"),
    "cache of old weights": ("engine", cache_of_old_weights, "version", "keys and values"),
    "missing bias": ("engine", changed("1.self_attn.v_proj.bias", lambda t, _: t.zero_()), "weights", "v_proj.bias"),
    "top-p in one": ("engine", at(top_p=0.9), "sampling cut", "top-p 0.9"),
    "top-k in one": ("policy", at(top_k=20), "sampling cut", "top-k 20"),
    "temperature": ("policy", at(temperature=0.7), "temperature", "temperature 0.7 in place of 1"),
    "rotary base": ("engine", other_theta, "positions", "rotary base 1e+06"),
    "position off by one": ("engine", one_position_late, "positions", "shifted by 1"),
    "norm cast before the multiply": ("policy", norm_cast, "precision", "norms rounded"),
    "bfloat16": ("engine", lambda new, old, sample: says(new.bfloat16(), sample), "precision", "bfloat16"),
    "FP8 blocks": ("engine", in_fp8("fp8_per_block"), "quantisation", "quantised to fp8_per_block"),
    "FP8 channels": ("engine", in_fp8("fp8_per_channel"), "quantisation", "quantised to fp8_per_channel"),
    "MXFP8": ("engine", in_fp8("mxfp8"), "quantisation", "quantised to mxfp8"),
    "swapped heads": ("policy", changed("0.self_attn.q_proj.weight", heads_swapped), "layout", "two heads"),
    "swapped halves": ("policy", changed("1.mlp.up_proj.weight", halves), "layout", "halves"),
}  # fmt: skip
EXPERTS: dict[str, tuple[str, Says, str, str]] = {
    "stale expert":
        ("engine", changed("layers.1.mlp.experts.gate_up_proj", lambda t, old: t[2].copy_(old[2])), "weights",
         "expert 2 of model.layers.1.mlp.experts.gate_up_proj of the older version"),
    "wrong expert group": (
        "policy",
        lambda new, old, sample: changed("0.mlp.experts.down_proj", lambda t, _: t.copy_(t.roll(2, 0)))(
            _rolled(new, "0.mlp.experts.gate_up_proj", 2), old, sample
        ),
        "layout",
        "moved by 2",
    ),
    "stale expert, whole": ("engine", stale_expert, "weights", "expert 1 of model.layers.0.mlp of the older version"),
    "FP8 blocks": ("engine", in_fp8("fp8_per_block"), "quantisation", "quantised to fp8_per_block"),
    "shifted routes": ("policy", routes_of_the_token_before, "routing", "token before"),
    "stale router": ("engine", changed("layers.0.mlp.gate.weight", stale), "weights", "mlp.gate"),
}  # fmt: skip


def _rolled(network: nn.Module, name: str, by: int) -> nn.Module:
    for each, tensor in network.named_parameters():
        if each.endswith(name):
            tensor.copy_(tensor.roll(by, 0))
    return network


@pytest.mark.parametrize("fault", DENSE)
def test_a_fault_of_a_dense_model_is_named(dense: Model, fault: str) -> None:
    named(dense, *DENSE[fault])


@pytest.mark.parametrize("fault", EXPERTS)
def test_a_fault_of_a_model_with_experts_is_named(experts: Model, fault: str) -> None:
    named(experts, *EXPERTS[fault])


def named(model: Model, side: str, wrong: Says, cause: str, what: str) -> None:
    verdict = model.verdict(side, wrong)
    assert {each: one.cause for each, one in verdict.causes.items()} == {side: cause}, "\n".join(verdict.table())
    assert what in verdict.line


def test_a_row_that_sees_its_neighbour(dense: Model) -> None:
    named(dense, "policy", sees_its_neighbour(dense.samples), "packing", "the sample before it")


def test_a_wrong_mask(dense: Model) -> None:
    last, first = dense.samples[0].policy.clone(), dense.samples[0].policy.clone()
    last[-1], first[3] = 0.0, -1.0
    for values, what in (
        (last, "policy: mask (token 21 of sample a#0, the last, was generated and has no log-prob)"),
        (first, "policy: mask (token 3 of sample a#0, was not generated and has one)"),
    ):
        verdict = judge_samples(dense.judge, [replace(dense.samples[0], policy=values)], torch.float32)
        assert verdict.line == what


def test_what_nothing_explains_is_unknown(dense: Model) -> None:
    drift = lambda new, old, sample: says(new, sample) + torch.arange(len(sample.tokens)) * 0.3  # noqa: E731
    verdict = dense.verdict("engine", drift)
    assert verdict.line.startswith("engine: unknown (largest gap ")
    assert "policy" not in verdict.causes


def test_none_where_all_agree(dense: Model, experts: Model) -> None:
    for model in (dense, experts):
        verdict = judge_samples(model.judge, model.samples, torch.float32)
        assert not verdict.causes and verdict.line.startswith("none: within 2.0e-04 of transformers in float64")
        assert len(verdict.table()) == 3


def test_a_run_is_judged_by_the_config_that_it_used(tmp_path: Path) -> None:
    model = make_tiny_model("qwen2", tmp_path / "hub", **SMALL)
    folder = overridden(model, {"rope_theta": 5e4}, tmp_path)
    assert Judge(folder, SAMPLING).network.config.rope_parameters["rope_theta"] == 5e4
    assert overridden(model, {}, tmp_path) == model
