"""A model's folder as a whole: which files are read, and what is refused before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mcore.families import params_of, read_hf_config, shape_of
from grpo_mcore.parallel.weights.hf_folder import (
    INDEX,
    SINGLE,
    Formats,
    HfFolderWriter,
    SafetensorsFolder,
    WeightsError,
    check_weights,
    stored_tensors,
    weight_files,
)
from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from grpo_mcore.tools.demo.tiny_models import make_tiny_model

EMBEDDING, NORM, LAYER = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
STALE = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("qwen3", "qwen3_moe", "deepseek_v3", "nemotron_h_moe", "gpt_oss", "gemma3_text", "qwen3_5_moe_text")
    return {family: Path(make_tiny_model(family, tmp_path_factory.mktemp(family))) for family in families}


@pytest.fixture
def single(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models["qwen3"], tmp_path / "single"))


@pytest.fixture
def sharded(single: Path, tmp_path: Path) -> Path:
    """The same model in two files with an index."""
    folder = tmp_path / "sharded"
    shutil.copytree(single, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(single / SINGLE)
    names = sorted(tensors)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def change(folder: Path, **changed: torch.Tensor | None) -> None:
    """Replace tensors of a folder with one file; None removes one."""
    tensors = load_file(folder / SINGLE) | changed
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / SINGLE)


def shape(folder: Path, **overrides: Any) -> Any:
    return shape_of(read_hf_config(folder, overrides))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "nemotron_h_moe", "gpt_oss", "gemma3_text",
                                    "qwen3_5_moe_text"])  # fmt: skip
def test_a_saved_model_passes(models: dict[str, Path], family: str, package_log: pytest.LogCaptureFixture) -> None:
    check_weights(models[family], shape(models[family]))
    assert "nobody reads" not in package_log.text.replace("mtp.", "")


def test_a_stale_shard_beside_the_index_is_not_read(
    sharded: Path, single: Path, package_log: pytest.LogCaptureFixture
) -> None:
    """Its tensors had been trained on: in alphabetical order it came last."""
    truth = load_file(single / SINGLE)
    save_file({name: tensor + 1 for name, tensor in truth.items()}, sharded / STALE)
    check_weights(sharded, shape(sharded))
    reader = SafetensorsFolder(sharded)
    for name, tensor in truth.items():
        assert torch.equal(reader.read(name, tuple((0, size) for size in tensor.shape)), tensor)
    assert f"not read, since the index does not name them: {STALE}" in package_log.text


@pytest.mark.parametrize("other", ["consolidated.safetensors", "adapter_model.safetensors", "x.safetensors"])
def test_model_safetensors_is_the_model(single: Path, other: str, package_log: pytest.LogCaptureFixture) -> None:
    save_file({EMBEDDING: torch.zeros(3)}, single / other)
    assert weight_files(single) == [single / SINGLE]
    assert f"not read, since they are not the model's: {other}" in package_log.text


def test_shards_without_an_index_are_read_but_not_mistrals_own_form(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    save_file({"norm.weight": torch.zeros(3)}, sharded / "consolidated.safetensors")
    assert [path.name for path in weight_files(sharded)] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    check_weights(sharded, shape(sharded))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def index_of(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


REFUSED: dict[str, Callable[[Path], object]] = {
    r"names 2 files, and 1 of them are missing, such as model-00002-of": lambda folder: (
        folder / "model-00002-of-00002.safetensors"
    ).unlink(),
    r"holds model.safetensors and an index of 2 other files; transformers reads the former, vLLM the latter": (
        lambda folder: save_file({"a": torch.zeros(1)}, folder / SINGLE)
    ),
    r"lm_head.weight|is in model-00001-of-00002.safetensors and in model-00002": lambda folder: save_file(
        load_file(folder / "model-00001-of-00002.safetensors"), folder / "model-00002-of-00002.safetensors"
    ),
    r"00002.safetensors is no whole safetensors file: it has [\d,]+ bytes, its header says .*: it is cut off": (
        lambda folder: cut(folder / "model-00002-of-00002.safetensors")
    ),
    r"is no whole safetensors file: its header has .* bytes": lambda folder: (
        folder / "model-00001-of-00002.safetensors"
    ).write_bytes(b"version https://git-lfs.github.com/spec/v1"),
    r"no whole safetensors file: its header has 0 bytes, the file 0": lambda folder: (
        folder / "model-00001-of-00002.safetensors"
    ).write_bytes(b""),
    r"is no whole safetensors file: \[Errno 2\] No such file": lambda folder: (
        (folder / "model-00001-of-00002.safetensors").unlink(),
        (folder / "model-00001-of-00002.safetensors").symlink_to("gone"),
    ),
    "index.json is no index: KeyError": lambda folder: (folder / INDEX).write_text("{}"),
    "says that a.weight is in model-00001-of-00002.safetensors, but it is not there": lambda folder: index_of(
        folder, lambda names: names.update({"a.weight": "model-00001-of-00002.safetensors"})
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_folder_that_is_not_whole_is_refused(sharded: Path, message: str) -> None:
    REFUSED[message](sharded)
    with pytest.raises(WeightsError, match=message):
        stored_tensors(sharded)


def test_an_export_says_what_to_do_where_the_folder_that_the_run_started_from_is_gone(single: Path) -> None:
    shape = shape_of(read_hf_config(single))
    with pytest.raises(
        WeightsError, match="gone is gone, .*: put it back, or give a copy .* export CHECKPOINT --model"
    ):
        Formats.of(torch.float32, single / "gone", shape, lambda param: True)


def test_a_folder_without_safetensors_says_what_it_has(single: Path) -> None:
    (single / SINGLE).rename(single / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="no .safetensors file; it has pytorch_model.bin, which is not read"):
        weight_files(single)
    (single / "adapter_config.json").touch()  # beside the base model's config.json, as Unsloth saves adapters
    (single / "adapter_model.safetensors").touch()
    with pytest.raises(WeightsError, match="no .safetensors file of a model; it is an adapter: merge it into its base"):
        weight_files(single)


def test_a_tensor_larger_or_smaller_than_the_config_says_is_refused(single: Path) -> None:
    """Larger ones had been cut without a word."""
    whole = load_file(single / SINGLE)
    for name in (EMBEDDING, LAYER, NORM):
        tensor = whole[name]
        for dim in range(tensor.dim()):
            grown = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
            change(single, **{name: grown})
            message = rf"{name} has shape \[.*{grown.shape[dim]}.*\], config.json .* says \[.*{tensor.shape[dim]}.*\]"
            with pytest.raises(WeightsError, match=message):
                check_weights(single, shape(single))
            change(single, **{name: tensor})
    check_weights(single, shape(single))


@pytest.mark.parametrize(
    "overrides",
    [{"vocab_size": 64}, {"intermediate_size": 32}, {"num_key_value_heads": 1}],
    ids=lambda one: next(iter(one)),
)
def test_a_size_in_the_overrides_must_fit_the_weights_too(single: Path, overrides: dict[str, int]) -> None:
    with pytest.raises(WeightsError, match="has shape .* hf_config_overrides"):
        check_weights(single, shape(single, **overrides))


def stack_experts(folder: Path) -> None:
    """Store all experts of a layer in one tensor, as newer checkpoints do."""
    tensors, stacked = load_file(folder / SINGLE), {}
    experts = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for layer in experts:
        count = len([name for name in tensors if name.startswith(f"{layer}.experts.") and "gate_proj" in name])
        rows = [[tensors[f"{layer}.experts.{i}.{part}_proj.weight"] for part in ("gate", "up")] for i in range(count)]
        stacked[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat(both) for both in rows])
        down = [tensors[f"{layer}.experts.{i}.down_proj.weight"] for i in range(count)]
        stacked[f"{layer}.experts.down_proj"] = torch.stack(down)
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(others | stacked, folder / SINGLE)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_stacked_experts_are_compared_whole(models: dict[str, Path], family: str, part: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models[family], tmp_path / family))
    if family == "qwen3_moe":
        stack_experts(folder)
    check_weights(folder, shape(folder))
    name = next(name for name in load_file(folder / SINGLE) if name.endswith(f".mlp.experts.{part}"))
    stacked = load_file(folder / SINGLE)[name]
    for dim in range(3):
        change(folder, **{name: torch.cat([stacked, stacked.narrow(dim, 0, 1)], dim)})
        with pytest.raises(WeightsError, match=f"{name} has shape"):
            check_weights(folder, shape(folder))


def test_missing_unread_and_unreadable_tensors_are_named(single: Path, package_log: pytest.LogCaptureFixture) -> None:
    tensor = load_file(single / SINGLE)[NORM]
    change(single, **{"model.layers.9.extra.weight": torch.zeros(2), "model.rotary_emb.inv_freq": torch.zeros(2)})
    check_weights(single, shape(single))
    assert "nobody reads model.layers.9.extra.weight" in package_log.text and "inv_freq" not in package_log.text
    change(single, **{NORM: None})
    with pytest.raises(WeightsError, match=f"lacks 1 tensors, such as {NORM}; it has"):
        check_weights(single, shape(single))
    change(single, **{NORM: tensor.to(torch.float8_e4m3fn)})
    with pytest.raises(WeightsError, match=f"{NORM} is of type F8_E4M3; only BF16, F16, F32, F64"):
        check_weights(single, shape(single))


def test_tied_and_untied_heads(models: dict[str, Path], tmp_path: Path) -> None:
    for tied in (True, False):
        folder = Path(make_tiny_model("qwen3", tmp_path / str(tied), tie_word_embeddings=tied))
        check_weights(folder, shape(folder))
        if not tied:
            change(folder, **{"lm_head.weight": None})
            with pytest.raises(WeightsError, match="lacks 1 tensors, such as lm_head.weight"):
                check_weights(folder, shape(folder))
            check_weights(folder, shape(folder, tie_word_embeddings=True))


def test_a_tied_model_with_another_output_layer_is_refused(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    """As after training with PEFT's modules_to_save: transformers uses both, and the policy had used one."""
    folder = Path(make_tiny_model("qwen3", tmp_path / "tied", tie_word_embeddings=True))
    embedding = load_file(folder / SINGLE)[EMBEDDING]
    change(folder, **{"lm_head.weight": embedding.clone()})
    check_weights(folder, shape(folder))
    assert "nobody reads" not in package_log.text
    embedding[-1, -1] += 1
    change(folder, **{"lm_head.weight": embedding})
    with pytest.raises(WeightsError, match="tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.w"):
        check_weights(folder, shape(folder))
    check_weights(folder, shape(folder, tie_word_embeddings=False))


LEFT_BY: dict[str, Callable[[str], str]] = {
    "The names begin with _orig_mod., as a wrapper of the model has left": lambda name: f"_orig_mod.{name}",
    "The names begin with base_model.model., as a wrapper": lambda name: f"base_model.model.{name}",
    "Adapters are not merged into it": lambda name: name.replace("q_proj.weight", "q_proj.base_layer.weight"),
    "saved without its output layer": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("why", LEFT_BY)
def test_names_that_another_trainer_has_left_are_explained(single: Path, why: str) -> None:
    save_file({LEFT_BY[why](name): tensor for name, tensor in load_file(single / SINGLE).items()}, single / SINGLE)
    with pytest.raises(WeightsError, match=f"lacks .* tensors, such as .*{why}"):
        check_weights(single, shape(single))


def test_folders_that_another_trainer_has_left_are_explained(single: Path, tmp_path: Path) -> None:
    change(single, **{NORM: torch.empty(0)})
    with pytest.raises(WeightsError, match=f"{NORM} is empty, as DeepSpeed's ZeRO-3 saves .* zero_to_fp32.py"):
        check_weights(single, shape(single))
    (single / "hf_quant_config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"holds hf_quant_config.json, by which vLLM takes it for a quantized model"):
        check_weights(single, shape(single))
    (single / "hf_quant_config.json").unlink()
    (single / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, single / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match="holds a model and an adapter: transformers would add the adapter to it"):
        check_weights(single, shape(single))
    inner = tmp_path / "actor" / "huggingface"  # verl's: config and tokenizer
    shutil.copytree(single, inner, ignore=shutil.ignore_patterns("*.safetensors", "adapter_config.json"))
    (inner.parent / "model_world_size_1_rank_0.pt").touch()
    with pytest.raises(WeightsError, match=r"no .safetensors file; the weights are beside it, .*--local_dir .*/actor "):
        weight_files(inner)


def test_every_parameter_of_a_large_model_is_looked_at(models: dict[str, Path]) -> None:
    folder = models["deepseek_v3"]
    tensors = stored_tensors(folder)
    for param in params_of(shape(folder)):
        for tensor in param.hf:
            assert tensor.name in tensors or param.expert is not None


def test_an_export_has_the_tokenizer_and_the_template_that_trained(single: Path, tmp_path: Path) -> None:
    """Files of the model's tokenizer and of the one that trained had been mixed."""
    from transformers import AutoTokenizer

    make_tokenizer(single)
    other, out = tmp_path / "other", tmp_path / "out"
    make_tokenizer(other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<only-here>"])
    tokenizer.chat_template = "{{ 'of the other' }}"
    tokenizer.save_pretrained(other)
    (single / "added_tokens.json").write_text('{"<stale>": 5}')
    (single / "adapter_config.json").write_text("{}")  # transformers would look for an adapter
    settings = {"eos_token_id": [3, 4], "temperature": 0.6}
    (single / "generation_config.json").write_text(json.dumps(settings))
    writer = HfFolderWriter(out, shape(single), torch.float32)
    writer.create(single, str(other), {}, "{{ 'that trained' }}")
    exported = AutoTokenizer.from_pretrained(out)
    assert not (out / "adapter_config.json").exists()
    assert exported.get_vocab() == tokenizer.get_vocab() and "<stale>" not in exported.get_vocab()
    message = {"role": "user", "content": "1+1="}
    assert exported.apply_chat_template([message], tokenize=False) == "that trained"
    config, generation = (json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert generation["temperature"] == 0.6
    own = tmp_path / "own"
    HfFolderWriter(own, shape(single), torch.float32).create(single)
    ends = json.loads((own / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) >= {3, 4, tokenizer.eos_token_id} and ends[0] == tokenizer.eos_token_id
    assert json.loads((own / "config.json").read_text())["eos_token_id"] == ends


def test_a_tokenizer_or_a_template_that_is_not_there_is_named(single: Path, tmp_path: Path) -> None:
    """It was said that the export could not be written."""
    make_tokenizer(single)
    (tmp_path / "empty").mkdir()
    writer = HfFolderWriter(tmp_path / "out", shape(single), torch.float32)
    with pytest.raises(WeightsError, match=r"chat_template: mine.jinja: No such file.*; export in the folder in which"):
        writer.create(single, None, {}, "mine.jinja")
    with pytest.raises(WeightsError, match="policy.tokenizer.name: .*empty is no tokenizer here: "):
        writer.create(single, tmp_path / "empty")


def test_the_tokenizer_of_an_export_reads_text_as_the_policy_did(tmp_path: Path) -> None:
    """transformers 5, and so vLLM, drops all spaces where a tokenizer has the class of DeepSeek-R1-Distill-Llama."""
    from transformers import AutoTokenizer

    from tests.unit.data.byte_level import TEXT, make_byte_level

    source, out = make_tiny_model("llama", tmp_path / "model", vocab_size=280), tmp_path / "out"
    ids = make_byte_level(source, "LlamaTokenizerFast")(TEXT, add_special_tokens=False)["input_ids"]
    assert AutoTokenizer.from_pretrained(source)(TEXT, add_special_tokens=False)["input_ids"] != ids
    HfFolderWriter(out, shape(source), torch.float32).create(source)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == TEXT
    given, written = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (source, out))
    assert written == given | {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_values_of_the_template_in_training_are_the_exports_defaults(single: Path, tmp_path: Path) -> None:
    """Trained with `enable_thinking: false`, a Qwen 3 was served with prompts that ask for thoughts."""
    from transformers import AutoTokenizer

    make_tokenizer(single)
    template = (
        "{%- macro effort() %}"
        "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
        "{{ reasoning_effort }}{%- endmacro %}{{ effort() }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking is false %} brief{% endif %}"
    )
    values = {"enable_thinking": False, "reasoning_effort": 'h"igh', "unknown": 1, "date": None}
    HfFolderWriter(tmp_path / "out", shape(single), torch.float32).create(single, None, {}, template, values)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")

    def shown(**given: Any) -> str:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False, **given))

    assert shown() == 'h"igh1+1= brief'
    assert shown(enable_thinking=True, reasoning_effort="low") == "low1+1="
    assert "unknown" not in tokenizer.chat_template
    HfFolderWriter(tmp_path / "own", shape(single), torch.float32).create(single, None, {}, None, {"unknown": 1})
    assert (tmp_path / "own" / "chat_template.jinja").read_text() == (single / "chat_template.jinja").read_text()


def test_the_export_of_a_read_only_model_can_be_written(single: Path, tmp_path: Path) -> None:
    """Shared models have mode 0444; copies with that mode refused the changes of config.json and of the tokenizer."""
    make_tokenizer(single)
    (single / "additional_chat_templates").mkdir()
    (single / "additional_chat_templates" / "rag.jinja").write_text("")
    (single / "flax_model.msgpack").write_text("other weights")
    for path in (*single.rglob("*"), single):
        path.chmod(0o444 if path.is_file() else 0o555)
    HfFolderWriter(tmp_path / "out", shape(single), torch.float32).create(single)
    there = list((tmp_path / "out").rglob("*"))
    assert {"config.json", "tokenizer_config.json", "rag.jinja"} <= {path.name for path in there}
    assert all(path.stat().st_mode & 0o200 for path in there)
    assert not (tmp_path / "out" / "flax_model.msgpack").exists()


def test_transformers_loads_the_export_of_a_model_whose_padding_token_has_no_embedding(
    single: Path, tmp_path: Path
) -> None:
    """As finetunes of Llama 2 add one to the tokenizer alone; transformers refuses an id beyond the embeddings."""
    from transformers import AutoModelForCausalLM

    from tests.unit.rollout.published_templates import GLM, tokenizer_of

    tokenizer = tokenizer_of(GLM)
    tokenizer.add_tokens([f"<{i}>" for i in range(shape(single).vocab_size)])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(single)
    assert tokenizer.pad_token_id >= shape(single).vocab_size
    HfFolderWriter(tmp_path / "out", shape(single), torch.float32).create(single)
    assert "pad_token_id" not in json.loads((tmp_path / "out" / "generation_config.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(("pad", "written"), [("<eos>", None), ("?", 31)])
def test_a_classifier_has_no_padding_token_that_ends_a_conversation(
    single: Path, tmp_path: Path, pad: str, written: int | None
) -> None:
    """transformers would read the score before it."""
    from tests.unit.rollout.published_templates import tokenizer_of

    tokenizer = tokenizer_of("{% for message in messages %}{{ message['content'] }}<eos>{% endfor %}")
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(single)
    HfFolderWriter(tmp_path / "out", shape_of(read_hf_config(single), "value"), torch.float32).create(single)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == written


def test_layers_for_multi_token_prediction_are_copied_into_an_export(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    """config.json names them, so that vLLM looked for them in vain to speculate."""
    source = make_tiny_model("glm4_moe", tmp_path / "model", num_nextn_predict_layers=1)
    extra = {"model.layers.4.eh_proj.weight": torch.randn(4, 8)}  # of layers 0 to 4
    save_file(load_file(source / SINGLE) | extra, source / SINGLE, metadata={"format": "pt"})
    check_weights(source, shape(source))
    HfFolderWriter(tmp_path / "out", shape(source), torch.bfloat16).create(source)
    assert torch.equal(SafetensorsFolder(tmp_path / "out").read(*extra, ((0, 4), (0, 8))), *extra.values())
    assert "nobody reads" not in package_log.text
    (source / SINGLE).unlink()  # as `export --model` may be given, which needs the config alone
    HfFolderWriter(tmp_path / "light", shape(source), torch.bfloat16).create(source)
    assert "holds no weights: the export lacks those that the policy does not train" in package_log.text


@pytest.mark.parametrize("there", [True, False])
def test_an_export_names_no_program_that_it_lacks(single: Path, tmp_path: Path, there: bool) -> None:
    """With trust_remote_code, transformers and vLLM refused exports of models whose programs had not been fetched."""
    config = json.loads((single / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModel": "org/x--modeling_x.X"}}
    writer = HfFolderWriter(out := tmp_path / "out", shape(single), torch.bfloat16)
    (single / "config.json").write_text(json.dumps(config | {"text_config": {"dtype": "float16"}}))
    if there:
        (single / "configuration_x.py").write_text("class XConfig: ...")
    writer.create(single)
    exported = json.loads((out / "config.json").read_text())
    assert ("auto_map" in exported) == there == (out / "configuration_x.py").is_file()
    assert exported["dtype"] == exported["text_config"]["dtype"] == "bfloat16"


def test_a_tokenizer_is_exported_in_the_form_in_which_it_was_published(single: Path, tmp_path: Path) -> None:
    """Saved by transformers 5, it was refused by transformers 4: no class TokenizersBackend, a list of tokens."""
    make_tokenizer(single)
    file, template = single / "tokenizer_config.json", (single / "chat_template.jinja").read_text()
    settings = json.loads(file.read_text())
    of_4 = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "add_bos_token": False}
    of_4 |= {"additional_special_tokens": settings.pop("extra_special_tokens"), "extra_special_tokens": {}}
    file.write_text(json.dumps(settings | of_4))
    (single / "chat_template.jinja").unlink()
    HfFolderWriter(tmp_path / "own", shape(single), torch.float32).create(single)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "own" / name).read_text() == (single / name).read_text()
    HfFolderWriter(tmp_path / "new", shape(single), torch.float32).create(single, None, {}, "{{ 'that trained' }}")
    replaced = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert replaced == settings | of_4 | {"chat_template": "{{ 'that trained' }}"}
    assert (tmp_path / "new" / "chat_template.jinja").read_text() == "{{ 'that trained' }}"


def test_values_that_are_not_finite_are_not_exported(single: Path, tmp_path: Path) -> None:
    writer = HfFolderWriter(tmp_path / "out", shape(single), torch.float32)
    writer.create(single)
    values = torch.zeros(4)
    values[1] = torch.nan
    with pytest.raises(WeightsError, match=f"{NORM} holds NaN or infinite values: such a model is not exported"):
        writer.write(SINGLE, [(NORM, ((0, 4),), values)])


def test_transformers_stops_where_the_answers_that_trained_stop(single: Path, tmp_path: Path) -> None:
    """Where the chat template ends an answer with another token than the tokenizer's end of sequence."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.unit.rollout.published_templates import GEMMA, GLM, tokenizer_of

    for name, template, ends in (("gemma", GEMMA, ["<end_of_turn>"]), ("glm", GLM, ["<|user|>", "<|observation|>"])):
        tokenizer_of(template).save_pretrained(single)
        out = tmp_path / name
        writer = HfFolderWriter(out, shape(single), torch.float32)
        writer.create(single)
        reader = SafetensorsFolder(single)
        tensors = [tensor for params in writer.files.values() for param in params for tensor in param.hf]
        boxes = {tensor.name: tuple((0, size) for size in tensor.shape) for tensor in tensors}
        writer.write(SINGLE, [(tensor, box, reader.read(tensor, box)) for tensor, box in boxes.items()])
        exported, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        expected = tokenizer.convert_tokens_to_ids(["<eos>", *ends])
        assert exported.generation_config.eos_token_id == exported.config.eos_token_id == expected
        assert tokenizer.chat_template == template
