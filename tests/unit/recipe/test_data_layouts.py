import pytest

from grpo_mcore.recipe import load_recipe

FLAT = """\
policy: {model_name: m}
data:
  dataset_name: ResponseDataset
  train_data_path: t.jsonl
  val_data_path: v.jsonl
  input_key: question
  output_key: answer
  prompt_file: p.txt
  train_split: train
  seed: 7
  split_validation_size: 0.1
"""

NESTED = """\
policy: {model_name: m}
data:
  max_input_seq_length: 100
  train:
    data_path: t.jsonl
    input_key: question
    subset: null
    split_validation_size: 0.05
    seed: 42
  validation:
    data_path: v.jsonl
  default:
    dataset_name: ResponseDataset
    input_key: input
    output_key: answer
    prompt_file: p.txt
    split_validation_size: 0.2
"""

LISTS = """\
defaults: nested
data:
  _override_: true
  train:
    - dataset_name: OpenMathInstruct-2
      split_validation_size: 0.05
    - dataset_name: DeepScaler
      prompt_file: null
  validation:
    - dataset_name: AIME2024
      repeat: 16
    - dataset_name: DAPOMathAIME2024
  default:
    prompt_file: p.txt
"""


def test_the_flat_layout(load) -> None:
    recipe = load(FLAT)
    (train,), (validation,) = recipe.config.data.train, recipe.config.data.validation
    assert (train.dataset_name, train.data_path, train.split) == ("ResponseDataset", "t.jsonl", "train")
    assert (train.input_key, train.output_key, train.prompt_file) == ("question", "answer", "p.txt")
    assert (train.seed, train.split_validation_size) == (7, 0.1)
    assert (validation.dataset_name, validation.data_path) == ("ResponseDataset", "v.jsonl")
    assert (validation.input_key, validation.split, validation.split_validation_size) == ("question", None, 0)
    assert recipe.provenance["data.train.0.data_path"] == "r.yaml:4"
    assert recipe.provenance["data.validation.0.input_key"] == "r.yaml:6"


def test_the_nested_layout_with_defaults(load) -> None:
    recipe = load(NESTED)
    (train,), (validation,) = recipe.config.data.train, recipe.config.data.validation
    assert (train.input_key, train.output_key, train.prompt_file) == ("question", "answer", "p.txt")
    assert (train.split_validation_size, train.seed) == (0.05, 42)
    assert (validation.input_key, validation.split_validation_size) == ("input", 0)
    assert recipe.provenance["data.train.0.input_key"] == "r.yaml:6"
    assert recipe.provenance["data.train.0.output_key"] == "r.yaml:15"


def test_lists_of_datasets_and_override(write) -> None:
    write(NESTED, "nested.yaml")
    data = load_recipe(write(LISTS)).config.data
    assert [entry.dataset_name for entry in data.train] == ["OpenMathInstruct-2", "DeepScaler"]
    assert [entry.prompt_file for entry in data.train] == ["p.txt", None], "an explicit null wins"
    assert [entry.repeat for entry in data.validation] == [16, 1]
    assert [entry.input_key for entry in data.train] == ["input", "input"]
    assert data.max_input_seq_length == 512, "the inherited section is gone"


def test_a_flat_file_replaces_inherited_datasets(write) -> None:
    write(NESTED, "nested.yaml")
    data = load_recipe(write("defaults: nested\ndata: {train_data_path: mine.jsonl}\n")).config.data
    (train,) = data.train
    assert (train.data_path, train.dataset_name, train.split_validation_size) == ("mine.jsonl", "ResponseDataset", 0.2)
    assert train.prompt_file == "p.txt", "data.default is still inherited"
    assert data.validation == [], "the inherited validation data belonged to the inherited training data"
    assert data.max_input_seq_length == 100


@pytest.mark.parametrize(
    ("inherited", "data", "expected"),
    [
        (NESTED, "val_data_path: w.jsonl", "train.data_path=t.jsonl validation.data_path=w.jsonl"),
        (NESTED, "prompt_file: q.txt, input_key: x",
         "train.prompt_file=q.txt validation.prompt_file=q.txt train.input_key=question validation.input_key=x"),
        (FLAT, "validation: {data_path: w.jsonl}", "train.data_path=t.jsonl train.input_key=question "
         "validation.data_path=w.jsonl validation.input_key=question"),
        (FLAT, "default: {input_key: q2}", "train.input_key=q2"),
        (FLAT, "train_data_path: u.jsonl",
         "train.data_path=u.jsonl train.input_key=question validation.data_path=v.jsonl"),
    ],
)  # fmt: skip
def test_either_layout_changes_what_is_inherited_key_by_key(write, inherited, data, expected) -> None:
    write(inherited, "inherited.yaml")
    found = load_recipe(write(f"defaults: inherited\ndata: {{{data}}}\n")).config.data
    for key, value in (word.split("=") for word in expected.split()):
        section, name = key.split(".")
        assert getattr(getattr(found, section)[0], name) == value, key


def test_null_is_not_a_dataset(load) -> None:
    text = FLAT.replace("v.jsonl", "null")
    assert load(text).config.data.validation == []
    text = NESTED.replace("  validation:\n    data_path: v.jsonl\n", "  validation: null\n")
    assert load(text).config.data.validation == []


def test_null_is_the_default_of_a_key_that_cannot_be_null(load) -> None:
    data = load(
        "policy: {model_name: m}\ndata: {dataset_name: Squad, output_key: null, seed: null, split: null}\n"
    ).config.data
    assert (data.train[0].output_key, data.train[0].seed, data.train[0].split) == ("output", 42, None)


def test_problems_name_the_key_as_it_was_written(problems) -> None:
    assert problems(FLAT.replace("question", "5").replace("p.txt", "[a]")) == [
        "r.yaml:6: data.input_key: expected text, got 5",
        "r.yaml:8: data.prompt_file: expected text or null, got ['a']",
    ]
    assert problems(NESTED.replace("output_key", "ouput_key").replace("subset: null", "subest: null")) == [
        "r.yaml:7: data.train.subest: unknown key; nearest known key: data.train.subset",
        "r.yaml:15: data.default.ouput_key: unknown key; nearest known key: data.default.output_key",
    ]


def test_what_is_no_data(problems) -> None:
    assert problems(NESTED + "  train_data_path: x.jsonl\n") == [
        "r.yaml:18: data.train_data_path: use one layout: data.train (r.yaml:4) belongs to the nested one, "
        "this key to the flat one"
    ]
    assert problems("policy: {model_name: m}\ndata:\n  train:\n    - train.jsonl\n    - {data_path: x}\n") == [
        "r.yaml:4: data.train.0: expected a dataset (a mapping of keys) or a list of them, got 'train.jsonl'"
    ]
    expected = "data.train: no training dataset; give data.train, or data.dataset_name and data.train_data_path"
    assert problems("policy: {model_name: m}\ndata: {}\n") == [f"r.yaml: {expected}"]
    assert problems("policy: {model_name: m}\ndata:\n  train: []\n") == [f"r.yaml:3: {expected}"]
    assert problems("policy: {model_name: m}\n") == ["r.yaml: data: this key is required"]
    assert problems("policy: {model_name: m}\ndata: {train: {dataset_name: openai_format}}\n") == [
        "r.yaml:2: data.train.dataset_name: openai_format needs a data_path"
    ]


def test_environments_of_datasets(load, problems) -> None:
    text = "policy: {model_name: m}\ndata: {train: {data_path: x}}\nenv:\n  math: {}\n"
    assert load(text).config.data.train[0].env_name == "math", "the only one there is"
    assert problems(text, "data.train.env_name=mth") == [
        "command line: data.train.env_name: 'mth' is not in env, which has math; nearest: math"
    ]
    assert problems(text + "  code: {}\n") == [
        "r.yaml:2: data.train: ResponseDataset: name the environment that scores it with env_name: math, code "
        "(_override_: true in env leaves out those that a recipe inherits)"
    ]


def test_a_file_replaces_a_known_dataset(write) -> None:
    def train(inherited: str) -> tuple[str, float]:
        write(f"policy: {{model_name: m}}\ndata: {{train: {{{inherited}, split_validation_size: 0.3}}}}\n", "base.yaml")
        entry = load_recipe(write("defaults: base\n"), ["data.train.data_path=x.jsonl"]).config.data.train[0]
        assert entry.data_path == "x.jsonl"
        return entry.dataset_name, entry.split_validation_size

    assert train("dataset_name: NuminaMath-1.5") == ("ResponseDataset", 0)
    assert train("dataset_name: my.package.Dataset") == ("my.package.Dataset", 0.3)
    assert train("dataset_name: openai_format") == ("openai_format", 0.3)
    assert train("data_path: old.jsonl") == ("ResponseDataset", 0.3)
