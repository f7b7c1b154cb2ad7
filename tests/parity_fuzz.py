"""Random layouts, features and small shapes of a model, each against transformers on one process in float64.

A draw says all that is computed, so that it can be repeated, written as JSON, and made smaller while it still fails.
Most faults of parallel layouts are silent: a gradient that one rank does not add, a norm that counts a weight twice. So
log-probs, every parameter's gradient and the norm that clipping uses are compared.

    python -m tests.parity_fuzz FOLDER|tiny:FAMILY --seed 0 --draws 200 --ranks 2    # or --case JSON, as it has printed
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.families import read_hf_config
from grpo_mcore.tools.demo.tiny_models import FAMILIES, SIZES, UnknownFamily, make_tiny_model
from grpo_mcore.tools.parity import rank_pool
from grpo_mcore.tools.parity.parity import RANK_TIMEOUT_S, Reference, compare, fitting, reference_of
from grpo_mcore.tools.parity.rank import LayoutCase, ParityWorkload
from grpo_mcore.tools.parity.rank_pool import RankFailed, RankPool

LOGPROB_LIMIT, GRADIENT_LIMIT, NORM_LIMIT = 1e-4, 1e-3, 1e-4
"""Largest difference of a log-prob, of a parameter's gradient and of the whole gradient's norm, the last two relative.
"""
SMALL_GRADIENT = 1e-3
"""A parameter's gradient counts as at least this part of the whole one: a smaller one is mostly rounding."""
SHRINK_RUNS = 80


@dataclass(frozen=True)
class Draw:
    """One case. `sizes` are values of the Hugging Face config, `chunk` is policy.logprob_chunk_size, and `weights` the
    seed of the weights."""

    layout: LayoutCase
    work: ParityWorkload
    sizes: dict[str, Any] = field(default_factory=dict)
    chunk: int = 1024
    weights: int = 0

    def describe(self) -> str:
        """Describe what is not at its default, in one line."""
        parts = [f"{name}={getattr(self.layout, name)}" for name in _changed(self.layout, LayoutCase(""), ("name",))]
        parts += [f"{key}={size}" for key, size in self.sizes.items()]
        parts += [
            f"{name}={getattr(self.work, name)}" for name in _changed(self.work, ParityWorkload(()), ("prompts",))
        ]
        return ", ".join([*parts, f"logprob_chunk_size={self.chunk}"])

    def to_json(self) -> str:
        """Return the draw as text that `from_json` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Draw:
        """Raises ValueError if the text is no draw."""
        try:
            plain = json.loads(text)
            work = {key: _as_tuple(value) for key, value in plain.pop("work").items()}
            layout = {key: _as_tuple(value) for key, value in plain.pop("layout").items()}
            return cls(LayoutCase(**layout), ParityWorkload(**work), **plain)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"--case: not a case that this program has printed ({error})") from error


@dataclass(frozen=True)
class Failure:
    """A draw that differs, and how."""

    draw: Draw
    difference: str


NOT_OF_A_MODEL = ("architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config", "auto_map")
"""Keys of a Hugging Face config that a small model of the same form does without."""


def tiny_like(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the tiny model (of FAMILIES) that is most like a Hugging Face config, and the config's values that give it
    the same form: switches, names and rotary settings. Sizes stay tiny. Raises UnknownFamily."""
    (architecture,) = config.get("architectures") or [""]
    name = architecture.replace("ForCausalLM", "").replace("ForConditionalGeneration", "")
    text = config.get("text_config", config)
    alike = [family for family, tiny in FAMILIES.items() if tiny["class"] == name and "vision" not in tiny]
    if not alike:
        raise UnknownFamily(f"no tiny model of {architecture!r}; there are {', '.join(FAMILIES)}")
    family = max(alike, key=lambda name: sum(text.get(key) is not None for key in FAMILIES[name].get("config", {})))
    tiny = SIZES | FAMILIES[family].get("config", {})
    values = {}
    for key, value in text.items():
        size = isinstance(tiny.get(key), int | list) and not isinstance(tiny[key], bool) and value is not None
        if not (size or key in NOT_OF_A_MODEL or key.endswith("_token_id") or key in ("model_type", "layer_types")):
            values[key] = value
    if tiny.get("num_hidden_layers") is None:  # the layers of a hybrid model are a list
        values = {key: value for key, value in values.items() if "pattern" not in key and key != "num_hidden_layers"}
    if "mrope_section" in (values.get("rope_parameters") or {}):
        del values["rope_parameters"]  # its sections are sizes
    return family, values


def draws(seed: int, family: str, values: Mapping[str, Any], ranks: int) -> Iterator[Draw]:
    """Yield random draws for ever, the same for a seed, of layouts on at most `ranks` ranks.

    `family` and `values` are the model, as `tiny_like` returns it. Not every draw fits the model: see `Fuzzer.fits`.
    """
    choose = random.Random(seed)
    tiny = SIZES | FAMILIES[family].get("config", {}) | dict(values)
    experts = any("expert" in key and isinstance(size, int) for key, size in tiny.items())
    while True:
        layout = _some_layout(choose, ranks, experts)
        sizes = _some_sizes(choose, tiny, "tie_word_embeddings" not in values)
        yield Draw(layout, _some_work(choose, layout.data), sizes, choose.choice((3, 16, 1024)), choose.randrange(1000))


class Fuzzer:
    """Computes draws of one model on the ranks of a pool. The references of the last few draws are kept."""

    def __init__(self, family: str, values: Mapping[str, Any], pool: RankPool, scratch: Path) -> None:
        self.family, self.values, self._pool, self._scratch = family, dict(values), pool, scratch
        self._references: dict[str, Reference] = {}

    def fits(self, draw: Draw) -> bool:
        """Return whether the product allows the draw's layout for its model."""
        try:
            allowed, _ = fitting(self._model(draw), [draw.layout])
        except (ValueError, TypeError, ZeroDivisionError, KeyError, RuntimeError):  # no such sizes
            return False
        return bool(allowed)

    def failure(self, draw: Draw, target: str = "grpo_mcore.tools.parity.rank:logprobs_and_gradients") -> str | None:
        """Return how the draw differs, in words, or None. `target` is the function that each rank runs."""
        reference = self._reference(draw)
        sampling = {name: getattr(draw.work, name) for name in ("temperature", "top_k", "top_p")}
        overrides = {"logprob_chunk_size": draw.chunk, "generation": sampling}
        size = draw.layout.world_size
        arguments = (str(reference.folder), draw.layout, True, draw.work, overrides)
        try:
            results = self._pool.run(size, target, *arguments, timeout_s=RANK_TIMEOUT_S)
            case = compare(reference, results, draw.layout.name, packed=True, smallest=SMALL_GRADIENT)
        except (RankFailed, ValueError) as error:
            return f"it fails: {str(error).strip().splitlines()[-1]}"
        worst = max(case.logprobs.items(), key=lambda pair: pair[1])
        if not worst[1] <= LOGPROB_LIMIT:
            return f"log-probs of sequence {worst[0]} differ by {worst[1]:.1e}"
        gap, name = max(case.by_layer().values())
        if not gap <= GRADIENT_LIMIT:
            return f"the gradient of {name} differs by {gap:.1e} of its norm"
        norm = torch.stack([gradient.norm() for gradient in reference.gradients.values()]).norm().item()
        apart = max(abs(result["grad_norm"] - norm) for result in results) / norm
        return None if apart <= NORM_LIMIT else f"the gradient's norm differs by {apart:.1e} of it"

    def confirmed(self, draw: Draw) -> str | None:
        """Return as `failure` does, for a draw that fails with other weights too: by chance two experts or the bound of
        a cut may be too near to each other for float32."""
        difference = self.failure(draw)
        return difference and self.failure(replace(draw, weights=draw.weights + 1000))

    def _model(self, draw: Draw) -> Path:
        key = json.dumps([draw.sizes, draw.weights], sort_keys=True)
        folder = self._scratch / f"{abs(hash(key)):x}"
        if not folder.is_dir():
            values = self.values | draw.sizes
            with tempfile.TemporaryDirectory(dir=self._scratch) as partial:
                make_tiny_model(self.family, Path(partial) / "model", seed=draw.weights, **values)
                (Path(partial) / "model").rename(folder)
        return folder

    def _reference(self, draw: Draw) -> Reference:
        key = json.dumps([draw.sizes, draw.weights, asdict(draw.work)], sort_keys=True)
        if key not in self._references:
            if len(self._references) > 100:
                self._references.clear()
            self._references[key] = reference_of(self._model(draw), torch.float64, draw.work)
        return self._references[key]


def shrunk(failure: Failure, fits: Callable[[Draw], bool], fails: Callable[[Draw], str | None]) -> Failure:
    """Return the smallest draw that still fails, found by simplifying one thing after the other. After SHRINK_RUNS
    calls of `fails` the smallest so far is returned."""
    runs = skipped = 0  # what did not fail for the draw before is tried again at the end only
    while True:
        for index, simpler in enumerate(simpler_draws(failure.draw)):
            if runs == SHRINK_RUNS:
                return failure
            if index < skipped or not fits(simpler):
                continue
            runs += 1
            if difference := fails(simpler):
                failure, skipped = Failure(simpler, difference), index
                break
        else:
            if not skipped:
                return failure
            skipped = 0


def simpler_draws(draw: Draw) -> Iterator[Draw]:
    """Yield draws that differ from this one in one thing, which is simpler: first layouts, then work, then sizes."""
    for layout in _with_one_default(draw.layout, LayoutCase(""), "name"):
        yield replace(draw, layout=_named(layout))
    work, count = draw.work, len(draw.work.lengths)
    for left in range(count if count > draw.layout.data else 0):
        yield replace(draw, work=_without(work, left))
    if len(work.bins) > draw.layout.data:
        joined = (*work.bins[:-2], (*work.bins[-2], *work.bins[-1]))
        yield replace(draw, work=replace(work, bins=joined))
    for simpler in _with_one_default(work, ParityWorkload((), entropy_coeff=0.0), "lengths", "bins", "prompts"):
        yield replace(draw, work=simpler)
    for key in draw.sizes:
        yield replace(draw, sizes={other: value for other, value in draw.sizes.items() if other != key})
    if draw.chunk != 1024:
        yield replace(draw, chunk=1024)


def _some_layout(choose: random.Random, ranks: int, experts: bool) -> LayoutCase:
    """Return a layout whose sizes multiply to at most `ranks`."""
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1}
    left = ranks
    while left > 1 and (left == ranks or choose.random() < 0.7):
        sizes[choose.choice(list(sizes))] *= 2
        left //= 2
    stage = sizes["tensor"] * sizes["context"] * sizes["data"]
    expert = choose.choice([n for n in (1, 2, 4) if stage % n == 0]) if experts else 1
    expert_tensor = choose.choice([n for n in (1, 2) if stage // expert % n == 0]) if experts else 1
    uneven = sizes["pipeline"] > 1 and choose.random() < 0.25
    kinds = ("core_attn", "mlp", *(("moe",) if experts else ()))
    recompute = choose.random() < 0.3
    return _named(
        LayoutCase(
            "",
            **sizes,
            sequence_parallel=sizes["tensor"] > 1 and (experts or choose.random() < 0.6),
            recompute=recompute,
            recompute_modules=choose.choice(((), kinds)) if recompute else (),
            virtual=2 if sizes["pipeline"] > 1 and not uneven and choose.random() < 0.4 else None,
            first_stage=1 if uneven else None,
            expert=expert,
            expert_tensor=expert_tensor,
            dispatcher="allgather" if experts and sizes["pipeline"] == 1 and choose.random() < 0.3 else "alltoall",
        )
    )


def _named(layout: LayoutCase) -> LayoutCase:
    sizes = (layout.tensor, layout.pipeline, layout.context, layout.data, layout.expert, layout.expert_tensor)
    names = [
        f"{name}{size}" for name, size in zip(("TP", "PP", "CP", "DP", "EP", "ETP"), sizes, strict=True) if size > 1
    ]
    return replace(layout, name="x".join(names) or "TP1")


def _some_sizes(choose: random.Random, tiny: Mapping[str, Any], may_tie: bool) -> dict[str, Any]:
    """Return sizes that differ from the tiny model's."""
    sizes: dict[str, Any] = {}
    if choose.random() < 0.5:
        sizes["vocab_size"] = choose.choice((96, 97, 150))
    if choose.random() < 0.5 and isinstance(tiny.get("num_hidden_layers"), int) and "layer_types" not in tiny:
        sizes["num_hidden_layers"] = choose.choice((2, 3))
    if choose.random() < 0.3 and tiny.get("num_key_value_heads") == 2:
        sizes["num_key_value_heads"] = choose.choice((1, 4))
    if choose.random() < 0.3 and "hidden_size" in tiny:
        sizes["hidden_size"] = choose.choice((32, 96))
    if may_tie and choose.random() < 0.5:
        sizes["tie_word_embeddings"] = choose.random() < 0.5
    return sizes


def _some_work(choose: random.Random, data: int) -> ParityWorkload:
    count = choose.randint(max(2, data), 7)
    lengths = tuple(choose.choice((2, 3, choose.randint(4, 12), choose.randint(12, 40))) for _ in range(count))
    order = choose.sample(range(count), count)
    cuts = sorted(choose.sample(range(1, count), choose.randint(data, count) - 1))
    bins = tuple(tuple(order[start:stop]) for start, stop in zip([0, *cuts], [*cuts, count], strict=True))
    prompts = tuple(choose.choice((1, 1, max(1, n // 2))) for n in lengths)
    return ParityWorkload(
        lengths,
        bins,
        prompts,
        left_out=(choose.randrange(count),) if choose.random() < 0.2 else (),
        common=choose.choice((0, 0, 4, 9)),
        entropy_coeff=choose.choice((0.0, 0.1)),
        temperature=choose.choice((1.0, 1.0, 0.7)),
        top_k=choose.choice((None, None, None, 20)),
        top_p=choose.choice((1.0, 1.0, 1.0, 0.9)),
    )


def _without(work: ParityWorkload, index: int) -> ParityWorkload:
    """Return the workload without one of its sequences, the others numbered anew."""

    def renumbered(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(i - (i > index) for i in indices if i != index)

    return replace(
        work,
        lengths=work.lengths[:index] + work.lengths[index + 1 :],
        prompts=work.prompts[:index] + work.prompts[index + 1 :],
        left_out=renumbered(work.left_out),
        bins=tuple(bin for bin in map(renumbered, work.bins) if bin),
    )


def _changed(value: Any, default: Any, ignored: Sequence[str]) -> list[str]:
    """Return the names of the fields that differ from those of `default`."""
    names = [part.name for part in fields(value) if part.name not in ignored]
    return [name for name in names if getattr(value, name) != getattr(default, name)]


def _with_one_default(value: Any, default: Any, *ignored: str) -> Iterator[Any]:
    """Yield the dataclass with one of the fields that differ from `default` set to its value there."""
    for name in _changed(value, default, ignored):
        yield replace(value, **{name: getattr(default, name)})


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def fuzz(fuzzer: Fuzzer, seed: int, count: int, ranks: int) -> tuple[int, Failure | None]:
    """Compute `count` draws that fit. Return (how many were computed, the smallest failing case or None)."""
    done = 0
    for draw in draws(seed, fuzzer.family, fuzzer.values, ranks):
        if done == count:
            break
        if not fuzzer.fits(draw):
            continue
        done += 1
        if difference := fuzzer.confirmed(draw):
            return done, shrunk(Failure(draw, difference), fuzzer.fits, fuzzer.confirmed)
    return done, None


def main(words: Sequence[str]) -> int:
    """Compute random cases, or one; return 1 if one differs."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(prog="python -m tests.parity_fuzz", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or tiny:FAMILY")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--draws", type=int, default=200, metavar="N", help="cases to compute (200)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="largest layout, in ranks (2)")
    parser.add_argument("--case", metavar="JSON", help="compute one case that this program has printed")
    args = parser.parse_args(words)
    logging.disable_progress_bar()  # it loads a model for each case
    family, values = args.model.removeprefix("tiny:"), dict[str, Any]()
    if family == args.model:
        family, values = tiny_like(read_hf_config(args.model))
    draw = Draw.from_json(args.case) if args.case else None
    pool = rank_pool.RankPool(draw.layout.world_size if draw else args.ranks)
    with closing(pool), tempfile.TemporaryDirectory(prefix="grpo-mcore-fuzz-") as scratch:
        fuzzer = Fuzzer(family, values, pool, Path(scratch))
        if draw is not None:
            done, difference = 1, fuzzer.failure(draw)
            failure = Failure(draw, difference) if difference else None
        else:
            done, failure = fuzz(fuzzer, args.seed, args.draws, args.ranks)
    if failure is None:
        print(f"{done} cases of {args.model}: none differs")
        return 0
    print(f"case {done} of {args.model} differs; the smallest that still does:")
    print(f"  {failure.draw.describe()}\n  {failure.difference}")
    print(f"again: python -m tests.parity_fuzz {args.model} --case {shlex.quote(failure.draw.to_json())}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
