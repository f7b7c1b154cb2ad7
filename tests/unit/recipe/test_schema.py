import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_mcore.recipe
from grpo_mcore.recipe import load_recipe
from grpo_mcore.recipe.schema.keys import docstrings, known_keys, nearest_key
from grpo_mcore.recipe.schema.section import Section

PACKAGE = Path(grpo_mcore.recipe.__file__).parent


def test_the_package_imports_none_of_the_large_libraries() -> None:
    code = (
        "import sys, grpo_mcore.recipe; "
        "print([name for name in ('torch', 'numpy', 'ray', 'vllm', 'megatron', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_package_imports_no_room_but_the_layouts() -> None:
    for_every_room = ("grpo_mcore.base.files", "grpo_mcore.base.imports", "grpo_mcore.base.processor")
    own = ("grpo_mcore.recipe", "grpo_mcore.layout", "grpo_mcore.families", *for_every_room)
    others = {"omegaconf", "pydantic", "yaml"} | sys.stdlib_module_names
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name == "grpo_mcore" or name.startswith(own) or name.split(".")[0] in others, (file.name, name)


def sections() -> list[type[Section]]:
    found = []
    for file in sorted((PACKAGE / "schema").glob("*.py")):
        module = importlib.import_module(f"grpo_mcore.recipe.schema.{file.stem}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, Section) and member is not Section and member.__module__ == module.__name__:
                found.append(member)
    return found


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_field_has_a_docstring(section: type[Section]) -> None:
    assert inspect.getdoc(section)
    assert set(section.model_fields) == set(docstrings(section))


def test_there_are_sections() -> None:
    assert len(sections()) >= 25 and len(known_keys()) > 180


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("policy.train_micro_batchsize", "policy.train_micro_batch_size"),
        ("polcy", "policy"),
        ("policy.lr", "policy.megatron_cfg.optimizer.lr"),
        ("grpo.train_global_batch_size", "policy.train_global_batch_size"),
        ("policy.generation.gpu_memory_utilisation", "policy.generation.vllm_cfg.gpu_memory_utilization"),
        ("data.train.0.datapath", "data.train.0.data_path"),
        ("grpo.qqqqqqqq", None),
        ("policy.megatron_cfg.train_iterations", None),  # not data.train, for a word
        ("optimizer.learning_rate", "policy.megatron_cfg.optimizer.lr"),
        ("grpo.learning_rate", "policy.megatron_cfg.optimizer.lr"),
        ("generation.temprature", "policy.generation.temperature"),
        ("policy.generation.max_tokens", "policy.generation.max_new_tokens"),
        ("data.train.path", "data.train.data_path"),
    ],
)
def test_the_nearest_known_key(wrong: str, right: str | None) -> None:
    assert nearest_key(wrong) == right


def test_every_key_of_the_policy_is_read_or_refused() -> None:
    """The code beside the schema names it as an attribute or in a table of keys."""
    sources = [path for path in PACKAGE.parent.rglob("*.py") if path.parent.name != "schema"]
    sources.append(PACKAGE / "validation" / "rules.yaml")
    words = set(re.findall(r"""(?<=[."])\w+""", "\n".join(path.read_text() for path in sources)))
    assert not [key for key in known_keys() if key.startswith("policy.") and key.rpartition(".")[2] not in words]


def test_one_key_lowers_the_learning_rate_and_the_other_rates_follow_unless_they_are_set() -> None:
    at = "policy.megatron_cfg"
    for words, rates in (
        ([f"{at}.optimizer.lr=1e-8"], (1e-9, 1e-9)),
        ([f"{at}.optimizer.lr=1e-8", f"{at}.optimizer.min_lr=0"], (0.0, 1e-9)),
        ([f"{at}.optimizer.lr=1e-8", f"{at}.scheduler.lr_warmup_init=1e-8"], (1e-9, 1e-8)),
        ([], (5e-7, 5e-7)),
    ):
        megatron = load_recipe("grpo_math_1B", words).config.policy.megatron_cfg
        assert (megatron.optimizer.min_lr, megatron.scheduler.lr_warmup_init) == pytest.approx(rates)
