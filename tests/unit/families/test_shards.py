"""Published configs, and the layers of pipeline stages."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mcore.families import parameter_count, read_hf_config, shape_of
from grpo_mcore.families.known import known_config, known_configs

# From the model cards and the checkpoints' index files, without layers for multi-token prediction.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Meta-Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B-Thinking-2507": 235_093_634_560,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base": 12_310_001_152,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-4b-it": 3_880_263_168,  # of vision models the text part
    "google/gemma-3-12b-it": 11_766_034_176,
    "google/gemma-3-27b-it": 27_009_346_304,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen/Qwen3.5-27B": 26_895_998_464,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "zai-org/GLM-4.5-Air": 106_852_251_264,
    "zai-org/GLM-4.5": 352_797_829_024,
    "zai-org/GLM-4.7-Flash": 29_943_393_920,
    "moonshotai/Kimi-K2-Instruct-0905": 1_026_408_232_448,
    "moonshotai/Moonlight-16B-A3B": 15_960_111_936 - 27 * 64,  # without the rotary frequencies of each layer
    "MiniMaxAI/MiniMax-M2": 228_689_764_864,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120_668_707_840,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_known_shapes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert parameter_count(shape_of(known_config(name))) == count


def test_an_unknown_name_has_no_config() -> None:
    assert known_config("Qwen/Qwen3-9B") is None


def test_the_demos_config_has_the_shape_of_its_model() -> None:
    import inspect

    from grpo_mcore.tools.demo.arithmetic import make_base_config

    made = {name: parameter.default for name, parameter in inspect.signature(make_base_config).parameters.items()}
    for name in ("results/demo/base/hf", "results/demo/untrained"):
        shape = shape_of(known_configs("folders")[name])
        assert (shape.hidden_size, shape.ffn_hidden_size) == (made["hidden_size"], made["intermediate_size"])
        assert (shape.num_layers, shape.num_heads) == (made["num_layers"], made["num_heads"])
        assert (shape.num_kv_heads, shape.head_dim) == (made["num_kv_heads"], made["head_dim"])


@pytest.mark.slow
def test_the_puzzle_model_has_the_shape_that_is_made(tmp_path: Path) -> None:
    from examples.sliding_puzzle.make_model import make_puzzle_model

    make_puzzle_model(tmp_path)
    assert shape_of(known_configs("folders")["results/puzzle/untrained"]) == replace(
        shape_of(read_hf_config(tmp_path)),
        max_positions=shape_of(known_configs("folders")["results/puzzle/untrained"]).max_positions,
    )
