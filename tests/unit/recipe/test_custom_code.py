"""Custom code is `{path, options}` in every key that takes some; earlier spellings load."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.recipe import CustomCode, RecipeError, environment_class, load_recipe

OLD = {
    "grpo": {"adv_estimator": {"name": "mine.code:advantages", "options": {"scale": 2.0}}},
    "loss_fn": {"reference_policy_kl_type": "mine.code:kl"},
    "data": {
        "train": {"data_path": "train.jsonl", "processor": "mine.code:rows"},
        "sampler": {"name": "mine.code:worth", "options": {"low": 0.1}},
    },
    "env": {"math": {"environment": "mine.code.World", "height": 3}, "rules": {"environment": "math"}},
    "logger": {"own": [{"path": "mine.code:Lines", "options": {"file": "x"}}]},
}
NEW = {
    "grpo": {"adv_estimator": {"path": "mine.code:advantages", "options": {"scale": 2.0}}},
    "loss_fn": {"reference_policy_kl_type": {"path": "mine.code:kl"}},
    "data": {
        "train": {"data_path": "train.jsonl", "processor": {"path": "mine.code:rows"}},
        "sampler": {"path": "mine.code:worth", "options": {"low": 0.1}},
    },
    "env": {"math": {"path": "mine.code.World", "height": 3}, "rules": {"environment": "math"}},
    "logger": {"custom": [{"path": "mine.code:Lines", "options": {"file": "x"}}]},
}


def written(folder: Path, keys: dict[str, Any]) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({"defaults": "grpo_math_1B", **keys}))
    return file


def test_the_spellings_of_before_load_as_the_same_recipe(tmp_path: Path) -> None:
    old, new = load_recipe(written(tmp_path, OLD)), load_recipe(written(tmp_path, NEW))
    assert old.config.model_dump(exclude={"env"}) == new.config.model_dump(exclude={"env"})
    classes = [environment_class("math", recipe.config.env["math"]) for recipe in (old, new)]
    assert classes[0] == classes[1] and classes[0][0] == "mine.code.World"
    notes = {note.key: note.message for note in old.imported}
    assert notes["grpo.adv_estimator.name"] == "used as grpo.adv_estimator.path"
    assert notes["logger.own"] == "used as logger.custom"
    assert old.config.loss_fn.reference_policy_kl_type == CustomCode(path="mine.code:kl")


def test_of_two_spellings_the_later_one_decides_and_in_one_file_they_must_agree(tmp_path: Path) -> None:
    custom = {"custom": [{"path": "c:d"}]}
    later = load_recipe(written(tmp_path, {"logger": custom}), ["logger.own=[{path: 'a:b'}]"]).config
    assert [logger.path for logger in later.logger.custom] == ["a:b"]
    with pytest.raises(RecipeError, match="logger.own: contradicts logger.custom"):
        load_recipe(written(tmp_path, {"logger": custom | {"own": [{"path": "a:b"}]}}))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"height": 3}, ("x", {"height": 3})),
        ({"environment": "math", "height": 3}, ("math", {"height": 3})),
        ({"path": "a:B", "options": {"height": 3}, "width": 2}, ("a:B", {"height": 3, "width": 2})),
        ({"environment": "a:B", "path": "data"}, ("a:B", {"path": "data"})),
    ],
)
def test_the_class_of_an_environment_and_what_it_reads(section: dict[str, Any], expected: tuple[str, Any]) -> None:
    assert environment_class("x", section) == expected
