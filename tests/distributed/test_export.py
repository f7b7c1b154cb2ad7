"""Exports of checkpoints: every family from several layouts, merged adapters, PEFT's format, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_mcore.tools.demo.tiny_models import FAMILIES as TINY
from grpo_mcore.tools.demo.tiny_models import SIZES, make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase, sequences
from grpo_mcore.tools.parity.rank_pool import RankFailed, RankPool
from tests.distributed.awkward import make_awkward
from tests.distributed.driver_files import TEMPLATE, driver_files
from tests.distributed.policy_cases import FEW

CASES = "tests.distributed.export_cases"
TP1 = LayoutCase("TP1")
TP2 = LayoutCase("TP2-SP", tensor=2, sequence_parallel=True)
TP2_PP2 = LayoutCase("TP2xPP2", tensor=2, pipeline=2)
EP2 = LayoutCase("EP2", data=2, expert=2)
EP2_TP2 = LayoutCase("EP2xTP2-SP", tensor=2, data=2, sequence_parallel=True, expert=2)
EP2_PP2 = LayoutCase("EP2xPP2", pipeline=2, data=2, expert=2)
LIMIT = 1e-5  # largest difference of a log-prob in float32 from one of transformers in float64
# These models make roundings larger, and how much depends on the processor: at one token of the last, transformers in
# float32 is 2.8e-5 and the policy 7.8e-5 away from float64, where another kind of processor has less than 4e-5.
LIMITS = {"qwen3_next": 4e-5, "qwen3_5_moe_text": 3e-4}

Checkpoint = tuple[Path, dict[int, Tensor]]


def checkpoint(
    ranks: RankPool,
    folder: Path,
    model: Path,
    case: LayoutCase,
    peft: dict[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> Checkpoint:
    """Train a step on a layout and save it as a run would: (the checkpoint's folder, the policy's log-probs)."""
    target = driver_files(folder, model, case, peft, tokenizer)
    results = ranks.run(
        case.world_size, f"{CASES}:train_and_save", str(model), case, str(target / "policy"), peft
    )  # fmt: skip
    return target, {i: values for result in results for i, values in result.items()}


def logprobs_of_transformers(folder: Path, adapter: Path | None = None) -> dict[int, Tensor]:
    """Log-probs of each sequence in float64. With `adapter`: PEFT applies the adapters of that folder."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    assert network.dtype == torch.float32
    for name, module in network.named_modules():
        if name.endswith("_a_layernorm"):  # of latents: transformers adds 1e-6, engine and policy rms_norm_eps
            module.variance_epsilon = network.config.rms_norm_eps
    vocabulary = network.config.get_text_config().vocab_size
    if adapter is not None:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, adapter).eval()
    network.double()
    found = {}
    for i, tokens in enumerate(sequences(vocabulary, FEW)):
        with torch.no_grad():
            scores = torch.log_softmax(network(tokens[None]).logits[0, :-1], -1)
        found[i] = torch.cat([torch.zeros(1, dtype=scores.dtype), scores.gather(1, tokens[1:, None]).squeeze(1)])
    return found


def furthest(one: dict[int, Tensor], other: dict[int, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[i] - other[i]).abs().max().item() for i in one)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def move_tokenizer(model: Path, folder: Path) -> Path:
    """Move a model's tokenizer into a folder of its own, with the word w7 as a special token that ends an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w7"]})
    tokenizer.save_pretrained(folder)
    for path in model.glob("*token*"):
        path.unlink()
    return folder


def answer_ends_where_training_ends_it(out: Path, words: Path) -> None:
    """The export has the tokenizer and the template that trained; transformers ends an answer by the same tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def likely(end: int) -> Any:
        def choose(tokens: Tensor, scores: Tensor) -> Tensor:
            chosen = end if tokens.shape[1] == 5 else 11
            return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([chosen]), 0.0)

        return choose

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(words).get_vocab()
    shown = [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w3"}]
    assert tokenizer.apply_chat_template(shown, tokenize=False) == "w9 w2 w7 w9 w3 w7 "
    network = AutoModelForCausalLM.from_pretrained(out)
    for end in (1, 7):  # <eos> and w7
        tokens = network.generate(
            torch.tensor([[2, 3, 4]]), max_new_tokens=9, do_sample=False, logits_processor=[likely(end)]
        )
        assert tokens.tolist() == [[2, 3, 4, 11, 11, end]]


TEXT = [family for family in TINY if "processor_class" not in TINY[family]]  # test_images.py exports the others
EXPORTS: dict[str, tuple[LayoutCase, dict[str, Any] | None]] = dict.fromkeys(TEXT, (TP2, None)) | {
    "qwen3": (TP2_PP2, None),
    "qwen2": (TP2_PP2, None),
    "llama": (TP2_PP2, {}),
    "qwen3_moe": (EP2_PP2, {}),
    "gpt_oss": (EP2, None),
    "deepseek_v3": (EP2_TP2, None),
    "nemotron_h": (TP2_PP2, {}),
    "nemotron_h_latent": (EP2_TP2, None),
    "glm_moe_dsa": (EP2_PP2, None),
    "qwen3_next": (EP2_TP2, None),
}


# Each family of these has a kind of layer, or a form of weights, that no other has; the others run with `--chaos`.
KINDS = ("llama", "gpt_oss", "deepseek_v3", "nemotron_h_latent", "qwen3_next", "qwen3_5_moe_text", "gemma3")


@pytest.mark.parametrize(
    "family", [family if family in KINDS else pytest.param(family, marks=pytest.mark.every_state) for family in EXPORTS]
)
def test_transformers_on_the_export_equals_the_policy(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """From a folder that is awkward on purpose, with a tokenizer of another name; no layout divides the vocabulary."""
    case, peft = EXPORTS[family]
    model = make_tiny_model(family, tmp_path / "model", words=True, tie_word_embeddings=family in ("qwen3", "gemma3"))
    make_awkward(model)
    words = move_tokenizer(model, tmp_path / "words")
    folder, expected = checkpoint(ranks, tmp_path, model, case, peft, words)
    out = tmp_path / "out"
    (loaded,) = ranks.run(1, f"{CASES}:export_here", str(folder), str(out), {"shard_bytes": 100_000})
    assert not loaded, "an export starts no engine and no Ray"
    answer_ends_where_training_ends_it(out, words)
    assert furthest(logprobs_of_transformers(out), expected) < LIMITS.get(family, LIMIT)
    assert tensors_in(out).keys() == tensors_in(model).keys()
    assert len(list(out.glob("*.safetensors"))) > 1
    names = {path.name for path in (*model.iterdir(), *words.iterdir()) if ".safetensors" not in path.name}
    names -= {"original"}
    assert names <= {path.name for path in out.iterdir()}
    card = (out / "README.md").read_text()
    assert "step 1" in card and "| val:accuracy |  | 0.25 |" in card and str(model) in card
    assert not list(tmp_path.glob("tmp_*"))


VISION = {  # its text part in TINY, its vision part, and where the network has this
    "Qwen3_5Moe": (
        "qwen3_5_moe_text",
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
        ("model.visual.",),
    ),
    "Gemma3": ("gemma3", TINY["gemma3"]["vision"], ("model.vision_tower.", "model.multi_modal_projector.")),
}


@pytest.mark.parametrize("name", VISION)
def test_a_vision_models_text_part_is_trained_and_the_rest_is_exported_as_it_was(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    import transformers

    family, vision, carried = VISION[name]
    text = {**SIZES, **TINY[family]["config"]}
    network = getattr(transformers, f"{name}ForConditionalGeneration")
    torch.manual_seed(0)  # some random decays (A_log) are so strong that one step does not change them
    whole = network(getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)).float()
    whole.save_pretrained(tmp_path / "model")
    stack_experts(tmp_path / "model" / "model.safetensors")
    folder, expected = checkpoint(ranks, tmp_path, tmp_path / "model", EP2 if "num_experts" in text else TP2)
    out = tmp_path / "out"
    ranks.run(1, f"{CASES}:export_here", str(folder), str(out), {})
    trained = network.from_pretrained(out, experts_implementation="eager").double()
    for i, tokens in enumerate(sequences(text["vocab_size"], FEW)):
        with torch.no_grad():
            scores = torch.log_softmax(trained(tokens[None]).logits[0, :-1], -1)
        found = scores.gather(1, tokens[1:, None]).squeeze(1)
        torch.testing.assert_close(found, expected[i][1:].double(), atol=LIMIT, rtol=0)
    before, after = dict(whole.named_parameters()), dict(trained.named_parameters())
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name].double(), after[name])}
    assert unchanged == {name for name in before if name.startswith(carried)} and unchanged


def stack_experts(file: Path) -> None:
    """Write the experts of each layer as two tensors, as published checkpoints have them."""
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".experts.0.up_proj.weight")]:
        at, parts = name.removesuffix(".0.up_proj.weight"), {}
        for part in ("gate", "up", "down"):
            names = [f"{at}.{expert}.{part}_proj.weight" for expert in range(4)]
            parts[part] = torch.stack([tensors.pop(each) for each in names])
        tensors[f"{at}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{at}.down_proj"] = parts["down"]
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_new_run_starts_from_an_export(ranks: RankPool, tmp_path: Path) -> None:
    model = make_tiny_model("qwen3", tmp_path / "model")
    folder, expected = checkpoint(ranks, tmp_path, model, TP1)
    out = tmp_path / "out"
    ranks.run(1, f"{CASES}:export_here", str(folder.parent), str(out), {})  # the newest of the run
    again = ranks.run(1, "grpo_mcore.tools.parity.rank:logprobs_and_gradients", str(out), TP1, True, FEW)
    assert furthest(again[0]["logprobs"], expected) < LIMIT


def test_peft_on_the_exported_adapters_equals_the_policy_and_the_merged_export(ranks: RankPool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = make_tiny_model("qwen3", tmp_path / "model", words=True, tie_word_embeddings=False)
    words = move_tokenizer(model, tmp_path / "words")
    peft = {"exclude_modules": ["*.layers.0.*linear_proj"]}
    folder, expected = checkpoint(ranks, tmp_path, model, TP2_PP2, peft, words)
    for name, options in (("merged", {}), ("adapter", {"adapter": True})):
        ranks.run(1, f"{CASES}:export_here", str(folder), str(tmp_path / name), options)
    with_peft = logprobs_of_transformers(model, tmp_path / "adapter")
    assert furthest(with_peft, expected) < LIMIT < furthest(logprobs_of_transformers(model), expected)
    base, merged, parts = (tensors_in(tmp_path / name) for name in ("model", "merged", "adapter"))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    seen = set()
    for layer in settings["target_modules"]:
        up, down = (parts.pop(f"base_model.model.{layer}.lora_{part}.weight") for part in "BA")
        torch.testing.assert_close(merged[f"{layer}.weight"], base[f"{layer}.weight"] + scale * up @ down)
        seen.add(f"{layer}.weight")
    assert not parts and len(seen) == 7 * 4 - 1
    assert all(torch.equal(merged[name], base[name]) for name in base.keys() - seen)
    assert settings["base_model_name_or_path"] == str(model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")  # the template that trained is not the base model's
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(words).get_vocab()
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "nemotron_h_latent",
        *(pytest.param(f, marks=pytest.mark.every_state) for f in ("glm4_moe", "gemma3")),
    ],
)
def test_peft_finds_every_exported_adapter_of_a_model_with_its_own_names(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    """With experts, PEFT takes the feed-forward layers beside them for parts of them; other models have modules whose
    names are not those of their tensors. Either left adapters out, or refused the folder. Those of single experts
    become adapters of stacks, but not in Nemotron-H, where PEFT refuses Mamba's out_proj too."""
    model = make_tiny_model(family, tmp_path / "model")
    peft = {"exclude_modules": ["*.local_experts.*", "out_proj"] if family == "nemotron_h_latent" else []}
    folder, expected = checkpoint(ranks, tmp_path, model, TP1, peft)
    ranks.run(1, f"{CASES}:export_here", str(folder), str(tmp_path / "adapter"), {"adapter": True})
    with_peft = logprobs_of_transformers(model, tmp_path / "adapter")
    assert (
        furthest(with_peft, expected) < LIMITS.get(family, LIMIT) < furthest(logprobs_of_transformers(model), expected)
    )


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    model = make_tiny_model("qwen3_moe", tmp_path / "model")
    full, _ = checkpoint(ranks, tmp_path / "full", model, TP1)
    stacks = make_tiny_model("gpt_oss", tmp_path / "stacks")
    fewer = make_tiny_model("qwen3_moe", tmp_path / "fewer", num_hidden_layers=3)
    lora, _ = checkpoint(ranks, tmp_path / "lora", stacks, TP1, {})
    torn = driver_files(tmp_path / "torn", model, TP1)
    ranks.run(1, f"{CASES}:save_without", str(model), TP1, str(torn / "policy"), "final_layernorm.weight")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    lost, _ = checkpoint(ranks, tmp_path / "lost", model, TP1)
    next((lost / "policy").glob("*.distcp")).unlink()
    for source, output, options, message in (
        (full, "out", {"adapter": True}, "ExportError: the checkpoint has no adapters"),
        (lora, "out", {"adapter": True}, "ExportError: .* adapters belong to experts"),
        (torn, "out", {}, r"lacks the tensor decoder.final_layernorm.weight \(model.norm.weight\)"),
        (lost, "out", {}, r"ExportError: .*cannot be read"),
        (full, "taken", {}, "exists and is not empty"),
        (tmp_path / "nowhere", "out", {}, "nowhere does not exist"),
        (model, "out", {}, "holds no checkpoint"),
        (full, "out", {"model": str(fewer)}, "holds a model of num_layers 4, and its config.json says 3; give"),
        (full, "out", {"model": str(tmp_path / "gone")}, "there is no folder .*gone.*see --model"),
    ):
        with pytest.raises(RankFailed, match=message):
            ranks.run(1, f"{CASES}:export_here", str(source), str(tmp_path / output), options)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob("tmp_*"))
