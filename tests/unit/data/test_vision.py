"""Rows with images: prompts and their spans, published layouts, what is refused, and recipes that name them."""

import base64
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets as hf
import pytest
from PIL import Image

from grpo_mcore.data import AllTaskProcessedDataset, DataError, TurnTemplate, build_task_data, load_response_dataset
from grpo_mcore.data.datasets.files import gym_task, openai_row, question_and_answer
from grpo_mcore.data.interfaces import TaskDataSpec
from grpo_mcore.data.processors import PROCESSORS
from grpo_mcore.data.tokenizer import load_tokenizer
from grpo_mcore.recipe import RecipeError, load_recipe, uses_images
from grpo_mcore.rollout.images import ImageReader
from grpo_mcore.tools.demo.colours import make_colour_task
from tests.pictures import noise, png, reader_of

PICTURE, OTHER = noise(64, 96, 1), noise(64, 64, 2)
START, END, MARK = 4, 5, 6


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    make_colour_task(folder / "task", folder / "model", rows=8)
    return folder


@pytest.fixture(scope="module")
def reader(demo: Path) -> ImageReader:
    return reader_of(demo / "model")


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Any:
    return load_tokenizer(str(demo / "model"))


def one(
    tokenizer: Any, reader: ImageReader | None, content: Any, processor: str = "vlm_hf_data_processor", **columns: Any
) -> Any:
    """Return the datum of a row, or raise what its row is refused for."""
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]}
    row |= {"task_name": "t", "uid": "t:0", **columns}
    return PROCESSORS[processor](row, TaskDataSpec("t", images=reader), tokenizer, 200, 0)


def test_a_prompt_has_the_runs_of_its_images(tokenizer: Any, reader: ImageReader) -> None:
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "blue"}, {"type": "image", "image": OTHER}]
    datum = one(tokenizer, reader, parts)
    (message,) = datum["message_log"]
    ids = message["token_ids"].tolist()
    first, second = message["images"]
    blue = tokenizer.convert_tokens_to_ids("blue")
    run = [START, *[MARK] * 6, END, blue, START, *[MARK] * 4, END]
    assert ids[first.offset - 1 : second.offset + second.length + 1] == run and datum["length"] == len(ids)
    assert (first.length, second.length, first.grid) == (6, 4, (1, 6, 4))
    assert datum["images"] == {first.digest: PICTURE, second.digest: OTHER}
    assert "image" not in datum["extra_env_info"]["messages"][0]["content"][0], "no bytes for the environment"
    trained = one(tokenizer, reader, parts, "sft_processor")
    assert trained["message_log"][0]["images"] == message["images"]
    assert trained["message_log"][0]["token_ids"].tolist() == ids, "SFT's prompt is that of a rollout"
    assert trained["images"] == datum["images"]


def test_an_agents_task_is_measured_with_its_images_which_stay_in_it(tokenizer: Any, reader: ImageReader) -> None:
    url = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "red"}]
    task = {"responses_create_params": {"input": [{"role": "user", "content": parts}]}}
    row = gym_task(task) | {"task_name": "t", "uid": "t:0"}
    process = PROCESSORS["nemo_gym_data_processor"]
    datum: Any = process(row, TaskDataSpec("t", images=reader), tokenizer, 200, 0)
    assert datum["message_log"][0]["token_ids"].tolist().count(MARK) == 6 and "images" not in datum
    assert datum["extra_env_info"]["agent_task"] == task
    with pytest.raises(DataError, match="its question has an image; set policy.is_vlm"):
        process(row, TaskDataSpec("t"), tokenizer, 200, 0)
    parts[0]["image_url"] = "https://example.org/a.png"
    with pytest.raises(DataError, match="an image must be a data URL"):
        gym_task(task)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image", "image": b""}], "an image has no bytes"),
        ([{"type": "image", "image": b"GIF89a..."}], "is no PNG, JPEG, WEBP"),
        ([{"type": "image", "image": png(Image.new("I;16", (40, 40)))}], "pixels of kind I;16"),
        ([{"type": "image", "image": png(Image.new("1", (9000, 9000)))}], "more than"),
        ([{"type": "image", "image": "http://example.org/a.png"}], "images are not fetched"),
        ([{"type": "image"}, {"type": "text", "text": "?"}], "a place for an image has none"),
        ([{"type": "video", "video": "a.mp4"}], "audio and video are not supported"),
        ("<|image_pad|> which?", "marks of an image for 0 images|which the chat template writes"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_by_name(tokenizer: Any, reader: Any, content: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"t:0: .*({message})"):
        one(tokenizer, reader, content)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "red", "image": "picture-1"}, "column 'image' is not read as an image"),
        ({"input": "red <image>"}, "its text has <image>, and no column"),
        ({"input": "red <image>", "image": None}, "its text has <image>, and no column"),
        ({"input": "red <image>", "images": []}, "its text has <image>, and no column"),
        ({"input": "red", "image": PICTURE, "images": [OTHER]}, "'image' and 'images' both have images"),
        ({"input": [{"role": "user", "content": [{"type": "image", "image": PICTURE}]}], "images": [PICTURE]},
         "'images' has images, and a message has one of its own"),
        ({"input": "red", "image_path": "a.png"}, "column 'image_path' is not read"),
        ({"input": "red", "image_url": "https://example.org/a.png"}, "column 'image_url' is not read"),
        ({"input": "red", "img": PICTURE}, "column 'img' is not read"),
    ],
)  # fmt: skip
def test_no_image_of_a_row_is_lost_or_doubled(tokenizer: Any, reader: Any, row: dict[str, Any], message: str) -> None:
    def datum(row: dict[str, Any]) -> Any:
        read = question_and_answer({**row, "output": "red"}, question="input", answer="output")
        columns = {name: value for name, value in read.items() if name != "messages"}
        return one(tokenizer, reader, read["messages"][0]["content"], **columns)

    with pytest.raises(DataError, match=message):
        datum(row)
    assert len(datum({"input": "red", "image": base64.b64encode(PICTURE).decode()})["images"]) == 1
    assert "images" not in datum({"input": "red", "image": None, "images": []}), "a question of text"


def test_a_column_that_no_dataset_has_read_is_refused(tokenizer: Any, reader: ImageReader) -> None:
    for processor in ("vlm_hf_data_processor", "sft_processor"):
        with pytest.raises(DataError, match="t:0: its column 'image' is not read as an image"):
            one(tokenizer, reader, "red", processor, image=PICTURE)


def test_what_belongs_to_a_question_goes_around_its_images() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": PICTURE}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts}]

    def shown(question: str, context_key: str | None = None, **fields: Any) -> Any:
        row = {question: chat, "output": "A", **fields}
        read = question_and_answer(row, question=question, answer="output", context=context_key)
        return read["messages"][0]["content"]

    def text(value: str) -> dict[str, str]:
        return {"type": "text", "text": value}

    assert shown("question") == parts
    assert shown("question", choices=["A", "c"]) == [*parts, text("\n\nA) A\nB) c")]
    assert shown("question", "context", context="d") == [text("d\n\n"), *parts]
    assert shown("instruction", input="e") == [*parts, text("\n\ne")]


def test_a_conversation_has_its_images_once() -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": PICTURE}]}], "image": PICTURE}
    with pytest.raises(DataError, match="'image' has images, and a message has one of its own"):
        openai_row(row, chat="messages")


def test_a_processor_of_transformers_brings_what_prompts_need(tokenizer: Any, reader: ImageReader) -> None:
    """As scripts of the peer's API have it, whose task specs know no images."""
    processor = SimpleNamespace(image_processor=None, tokenizer=tokenizer)
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "blue"}]
    assert one(processor, None, parts)["images"] == one(tokenizer, reader, parts)["images"]


def test_a_prompt_has_at_most_as_many_images_as_the_recipe_says(tokenizer: Any, reader: ImageReader) -> None:
    parts = [{"type": "image", "image": PICTURE}, {"type": "image", "image": OTHER}]
    assert len(one(tokenizer, replace(reader, limit=2), parts)["images"]) == 2
    with pytest.raises(DataError, match="t:0: it has 2 images, more than limit_mm_per_prompt.image, 1"):
        one(tokenizer, replace(reader, limit=1), parts)


def test_what_takes_no_images_says_so(tokenizer: Any, reader: ImageReader) -> None:
    picture = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "blue"}]
    for processor, given in (("math_hf_data_processor", reader), ("sft_processor", None)):
        with pytest.raises(DataError, match="has an image; set processor: vlm_hf_data_processor"):
            one(tokenizer, given, picture, processor)
    plain = load_tokenizer(
        tokenizer.name_or_path, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(DataError, match="writes 0 marks of an image for 1 images"):
        one(plain, reader, picture)


def test_an_image_too_large_for_the_context_costs_its_row(demo: Path, tokenizer: Any, reader: ImageReader) -> None:
    entry = {"data_path": str(demo / "task" / "train.jsonl"), "processor": "vlm_hf_data_processor"}
    data = build_task_data([entry], [], tokenizer, 100, images=reader)
    assert isinstance(data.train, AllTaskProcessedDataset)
    assert data.train.usable_at_most() == 8 and len(data.train[0]["images"]) == 1
    assert not data.train._kept, "files of images stay on disk"
    with pytest.raises(DataError, match="no usable prompt is left"):
        build_task_data([entry], [], tokenizer, 6, images=reader)


def test_an_environment_answers_with_an_image(tokenizer: Any, reader: ImageReader) -> None:
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "blue<|image_pad|>"}]
    turn = TurnTemplate(tokenizer, reader).turn(parts, "user", tokenizer.eos_token_id)
    (span,) = turn.images
    ids = turn.token_ids.tolist()
    assert ids[span.offset : span.offset + span.length] == [MARK] * 6 and ids.count(MARK) == 6, "text stays text"
    with pytest.raises(ValueError, match="has no bytes"):
        TurnTemplate(tokenizer, reader).turn([{"type": "image", "image": b""}])
    with pytest.raises(ValueError, match="the recipe has no prompts with images"):
        TurnTemplate(tokenizer).turn(parts)


def test_published_layouts(tmp_path: Path, tokenizer: Any, reader: ImageReader) -> None:
    """Rows in the schemas of the hub, as Parquet files whose images are decoded by nobody."""

    def table(name: str, rows: list[dict[str, Any]], **images: Any) -> dict[str, Any]:
        made = hf.Dataset.from_list(rows)
        for column, kind in images.items():
            made = made.cast_column(column, kind)
        made.to_parquet(tmp_path / f"{name}.parquet")
        return {"dataset_name": name, "data_path": str(tmp_path / f"{name}.parquet"), "download_dir": str(tmp_path)}

    (tmp_path / "train2014").mkdir()
    (tmp_path / "train2014" / "1.png").write_bytes(PICTURE)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "2.png").write_bytes(OTHER)
    clevr = {"image": {"bytes": PICTURE, "path": None}, "problem": "red", "solution": "<answer> 5 </answer>"}
    geometry = {"images": [{"bytes": OTHER, "path": None}], "problem": "<image>green", "answer": "1/2"}
    refcoco = {
        "image_path": "coco/train2014/1.png",
        "captions": ["red", "red square"],
        "bbox": [16.0, 24.0, 32.0, 48.0],
    }
    mmpr = {"images": [{"path": "images/2.png"}], "extra_info": {"question": "<image>\nred"},
            "reward_model": {"ground_truth": "A"}}  # fmt: skip
    entries = {
        "clevr-cogent": (table("clevr-cogent", [clevr], image=hf.Image()), PICTURE, "5"),
        "geometry3k": (table("geometry3k", [geometry], images=hf.List(hf.Image())), OTHER, "1/2"),
        "refcoco": (table("refcoco", [refcoco]), PICTURE, "[250, 250, 500, 500]"),
        "mmpr-tiny": (table("mmpr-tiny", [mmpr]), OTHER, "A"),
    }
    for name, (entry, image, truth) in entries.items():
        data = load_response_dataset(entry)
        assert data.processor is PROCESSORS["vlm_hf_data_processor"]
        (row,) = data.dataset
        question, answer = row["messages"]
        assert [part["image"] for part in question["content"] if part["type"] == "image"] == [image], name
        assert answer["content"] == row["ground_truth"] == truth
    del entries["refcoco"][0]["download_dir"]
    with pytest.raises(DataError, match="dataset_name refcoco: download_dir is missing"):
        load_response_dataset(entries["refcoco"][0])


PEER = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 16, max_num_steps: 10}
policy:
  model_name: Qwen/Qwen2.5-VL-3B-Instruct
  train_global_batch_size: 128
  max_total_sequence_length: 2048
  tokenizer: {use_processor: true}
  megatron_cfg:
    enabled: true
    freeze_config: {freeze_vision_model: true, freeze_vision_projection: true, freeze_language_model: false}
  generation:
    vllm_cfg: {skip_tokenizer_init: false, limit_mm_per_prompt: {image: 2, video: 0}}
    vllm_kwargs: {mm_processor_cache_gb: 0, allowed_local_media_path: /data}
data: {dataset_name: clevr-cogent, split: trainA}
env:
  clevr-cogent:
    num_workers: 8
    reward_functions: [{name: format, weight: 0.2}, {name: exact_alnum, weight: 0.8}]
  refcoco:
    reward_functions: [{name: bbox_giou, weight: 1.0, kwargs: {giou_penalty_thres: 0.5}}]
"""


def test_recipes_of_the_peer_load(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(PEER)
    config = load_recipe(str(tmp_path / "r.yaml")).config
    assert uses_images(config) and config.data.train[0].env_name == "clevr-cogent"
    assert config.policy.generation.vllm_cfg.limit_mm_per_prompt.image == 2
    for override, message in (
        ("policy.megatron_cfg.freeze_config.freeze_vision_model=false", "always frozen"),
        ("policy.megatron_cfg.freeze_config.freeze_audio_tower=true", "freezing of other parameters"),
        ("policy.generation.vllm_cfg.limit_mm_per_prompt.video=1", "video"),
        ("policy.generation.vllm_cfg.load_format=dummy", "a refit brings no tower"),
        ("policy.generation.vllm_cfg.precision=fp8", "not quantised apart"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe(str(tmp_path / "r.yaml"), [override])
