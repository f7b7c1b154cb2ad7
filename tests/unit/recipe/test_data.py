from __future__ import annotations

import pytest

from grpo_mcore.recipe import DATASETS

TEXT = """\
policy: {model_name: m}
grpo: {num_prompts_per_step: 32}
data:
  train:
    - dataset_name: OpenMathInstruct-2
    - dataset_name: DeepScaler
  validation:
    - dataset_name: AIME2024
      repeat: 16
  use_multiple_dataloader: true
  num_prompts_per_dataloader: 16
"""


def test_one_loader_a_dataset(load) -> None:
    data = load(TEXT).config.data
    assert (data.use_multiple_dataloader, data.num_prompts_per_dataloader, data.custom_dataloader) == (True, 16, None)
    # As in the documents, on the command line.
    words = ("grpo.num_prompts_per_step=64", "data.num_prompts_per_dataloader=16", "data.custom_dataloader=my.mix")
    assert load(TEXT, *words).config.data.custom_dataloader == "my.mix"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["data.num_prompts_per_dataloader=12"],
            "command line: data.num_prompts_per_dataloader: grpo.num_prompts_per_step = 32 is not a multiple of 12; "
            "nearest that is: 24 or 36",
        ),
        (
            ["~data.num_prompts_per_dataloader"],
            "r.yaml:10: data.use_multiple_dataloader: required with use_multiple_dataloader: the number of prompts",
        ),
        (
            ["grpo.num_prompts_per_step=64"],
            "r.yaml:11: data.num_prompts_per_dataloader: one batch of each of 2 datasets is 2 x 16 = 32 prompts, but "
            "grpo.num_prompts_per_step is 64; make them equal, or name a custom_dataloader that mixes the "
            "datasets differently",
        ),
        (["~grpo", "+sft.seed=1"], "r.yaml:10: data.use_multiple_dataloader: SFT reads all datasets with one"),
    ],
)
def test_loaders_must_fill_a_step(problems, words: list[str], expected: str) -> None:
    [found] = problems(TEXT, *words)
    assert expected in found


def test_keys_of_several_loaders_have_no_effect_with_one(load) -> None:
    load(TEXT, "data.use_multiple_dataloader=false", "data.num_prompts_per_dataloader=7", "data.custom_dataloader=x.y")


def test_unknown_dataset(problems, load) -> None:
    [found] = problems(TEXT.replace("DeepScaler", "DeepScalar"))
    assert found.startswith("r.yaml:6: data.train.1.dataset_name: 'DeepScalar' is not known; nearest: DeepScaler; ")
    assert found.endswith(f"{', '.join(DATASETS)}, or a dataset class by import path")
    for name in ("deepscaler", "my.package:Dataset", "my.package.Dataset", "squad"):
        assert load(TEXT.replace("DeepScaler", name)).config.data.train[1].dataset_name == name


def test_preference_data_is_for_dpo(problems) -> None:
    for name in ("BinaryPreferenceDataset", "binary_preference_dataset"):
        text = f"policy: {{model_name: m}}\ndata:\n  train:\n    dataset_name: {name}\n    data_path: x.jsonl\n"
        assert problems(text) == [
            "r.yaml:4: data.train.dataset_name: BinaryPreferenceDataset holds pairs of answers for DPO; GRPO and SFT "
            "cannot use them. A recipe for DPO has a section dpo"
        ]
