"""Engines that read images: their tokens are ours, their log-probs are those of transformers, and no cache mistakes one
image for another."""

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.families import engine_options, params_of, read_hf_config, shape_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.plan import plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import refit
from grpo_mcore.rollout.images import ImageReader
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn
from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model
from tests.functional.engine_cases import Source, config
from tests.pictures import load_vision_reference, noise, reader_of, worst_vision_difference
from tests.unit.refit.shards import Handle

SAMPLING = Sampling(max_new_tokens=12)
ALIKE = [pytest.param(each, marks=pytest.mark.every_state) for each in ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")]


@dataclass
class Case:
    folder: Path
    engine: EngineWorker
    reader: ImageReader
    reference: Any

    def request(self, number: int, *images: bytes, words: int = 3, **options: Any) -> GenerationRequest:
        """Return a prompt of words with an image behind each `words` of them."""
        generator, vision = torch.Generator().manual_seed(number), self.reader.vision
        ids = torch.randint(11, 131, (words,), generator=generator).tolist()
        for _ in images:
            ids += [vision.start_token, vision.image_token, vision.end_token]
            ids += torch.randint(11, 131, (words,), generator=generator).tolist()
        [(tokens, spans)] = self.reader.expand([ids], images)
        turn = Turn("user", torch.tensor(tokens), images=spans)
        files = self.reader.by_digest(images)
        return GenerationRequest(f"prompt-{number}", 0, (turn,), 1000 + number, images=files, **options)

    def ask(self, *requests: GenerationRequest) -> dict[str, Trajectory]:
        """Generate, and check that vLLM has read the very tokens that it was given."""
        with closing(self.engine._finished(list(requests), SAMPLING)) as steps:
            for finished in steps:
                for _, asked, output in finished:
                    assert output.prompt_token_ids == asked.token_ids().tolist()
        return {sample.uid: sample for sample in self.engine.generate(list(requests), SAMPLING)}

    def difference(self, asked: GenerationRequest, sample: Trajectory) -> float:
        return worst_vision_difference(self.reference, sample, asked.images, self.reader)


@pytest.fixture(scope="module", params=["qwen3_vl", *ALIKE])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family = request.param
    folder = make_tiny_model(family, tmp_path_factory.mktemp(family), words=True, **ENGINE_SIZES.get(family, {}))
    engine = EngineWorker(config(folder, **engine_options(shape_of(read_hf_config(folder)), images=8)), None)
    yield Case(folder, engine, reader_of(folder), load_vision_reference(folder))
    engine.shutdown()


def test_prompts_with_none_to_three_images(case: Case) -> None:
    pictures = [noise(64, 96, 1), noise(90, 50, 2), noise(40, 40, 3)]
    asked = [case.request(number, *pictures[:number]) for number in range(4)]
    samples = case.ask(*asked)
    assert len(asked[3].image_spans()) == 3 and len({span.length for span in asked[3].image_spans()}) > 1
    for request in asked:
        assert case.difference(request, samples[request.uid]) < 1e-4


def test_three_turns_with_an_image_each(case: Case) -> None:
    asked = case.request(1, noise(64, 64, 1))
    for number in (2, 3):
        sample = case.ask(asked)[asked.uid]
        answer = case.request(number, noise(64, 32 * number, number))
        images = {**asked.images, **answer.images}
        asked = replace(asked, prompt=answer.prompt, continues=sample, images=images, seed=number)
    sample = case.ask(asked)[asked.uid]
    assert [bool(turn.images) for turn in sample.turns] == [True, False] * 3
    assert case.difference(asked, sample) < 1e-4


def test_the_token_of_an_image_as_a_word_changes_nothing(case: Case) -> None:
    """A policy may sample it, and two images may stand side by side."""
    mark, asked = case.reader.vision.image_token, case.request(5, noise(64, 64, 5))
    (turn,) = asked.prompt
    (span,) = turn.images
    second = replace(span, offset=1 + span.offset + span.length)  # no word between them
    picture = turn.token_ids[span.offset : span.offset + span.length]
    tokens = torch.cat([torch.tensor([mark, 20]), turn.token_ids[: span.offset + span.length], picture[:1], picture])
    spans = tuple(replace(each, offset=each.offset + 2) for each in (span, second))
    asked = replace(asked, prompt=(Turn("user", torch.cat([tokens, torch.tensor([21, mark, 22])]), images=spans),))
    assert case.difference(asked, case.ask(asked)[asked.uid]) < 1e-4


def test_what_goes_wrong_is_noticed(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    first, other = noise(64, 64, 7), noise(64, 64, 8)
    asked = case.request(7, first)
    right = case.ask(asked)[asked.uid]
    assert case.difference(asked, right) < 1e-4
    # Another image under the digest of the first is the first: digests are all that caches know.
    (turn,) = asked.prompt
    (span,) = turn.images
    stale = case.ask(replace(asked, images={span.digest: other}))[asked.uid]
    wrong = {span.digest: other}
    assert worst_vision_difference(case.reference, stale, wrong, case.reader) > 1e-3
    assert case.reader.span(other).digest != span.digest
    # vLLM's own expansion of tokens that are expanded already is another prompt, without an error.
    from vllm.inputs import TokensPrompt

    from grpo_mcore.families.images import read_image

    ids, image = turn.token_ids.tolist(), {"image": [read_image(first)]}
    prompt = TokensPrompt(prompt_token_ids=ids, multi_modal_data=image)
    [twice] = case.engine._llm_engine.renderer.render_cmpl([prompt])
    assert len(twice["prompt_token_ids"]) > len(ids)
    with pytest.raises(ValueError, match="marks of an image for 1 images"):
        case.reader.expand([ids], [first])
    with pytest.raises(ValueError, match="did not come with it"):
        case.ask(replace(case.request(9, noise(64, 64, 9)), images={}))
    grid = replace(case.request(10, noise(64, 64, 10)).prompt[0].images[0], grid=(1, 3, 3))
    with pytest.raises(ValueError, match="vLLM cuts an image into"):
        case.ask(replace(asked, prompt=(replace(turn, images=(replace(grid, offset=span.offset),)),),
                         images={grid.digest: noise(64, 64, 10)}))  # fmt: skip
    damaged = noise(64, 64, 11)[:-40]
    asked = case.request(11, damaged)
    with caplog.at_level(logging.WARNING):
        sample = case.ask(asked, case.request(12))
    assert sample["prompt-11"].finish_reason == "abort" and sample["prompt-12"].finish_reason != "abort"
    assert "cannot be decoded" in caplog.text and "given up" in caplog.text


def test_an_engine_of_text_refuses_an_image(case: Case) -> None:
    engine, case.engine._images = case.engine, None
    try:
        with pytest.raises(ValueError, match="reads no images, and a prompt has some"):
            case.ask(case.request(1, noise(64, 64)))
    finally:
        case.engine = engine
        from grpo_mcore.generation.engine_images import EngineImages

        engine._images = EngineImages(engine._llm_engine.renderer, case.reader)


def tower_sums(worker: Any) -> dict[str, float]:
    return {n: float(p.double().sum()) for n, p in worker.model_runner.model.named_parameters() if "visual." in n}


def test_a_refit_leaves_the_tower(case: Case, tmp_path: Path) -> None:
    family = read_hf_config(case.folder)["model_type"]
    other = make_tiny_model(family, tmp_path / "b", seed=1, words=True, **ENGINE_SIZES.get(family, {}))
    shape = shape_of(read_hf_config(case.folder))
    plan = plan_refit(params_of(shape), shape, PolicyLayout(), EngineLayout(), dtype="float32", buffer_bytes=144_000)
    sender = Handle("policy-0", RefitSender(Source(other), 0, run_id=f"images-{family}".replace("_", "-")))
    before = case.engine._llm_engine.collective_rpc(tower_sums)
    asked = case.request(3, noise(64, 96, 1))
    try:
        refit([sender], [Handle(case.engine.name, case.engine)], plan, 1, verify="full")
    finally:
        sender.target.close_refit()
    assert before == case.engine._llm_engine.collective_rpc(tower_sums) and before[0]
    mixed, old = load_vision_reference(other), case.reference
    mixed.model.visual.load_state_dict(old.model.visual.state_dict())
    sample = case.ask(asked)[asked.uid]
    assert worst_vision_difference(mixed, sample, asked.images, case.reader) < 1e-4
    assert worst_vision_difference(old, sample, asked.images, case.reader) > 0.01
