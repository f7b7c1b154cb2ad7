"""The pages name files that exist, and their links lead somewhere."""

from __future__ import annotations

import re
import sys
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_mcore.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "recipe.md")
"""Without the page that `make docs` writes."""
PAGES = [*sorted(ROOT.glob("*.md")), *GUIDES]
CODE = re.compile(r"`([\w./-]+\.(?:py|yaml|md|sh|svg|lock))`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
PLACEHOLDER = re.compile(r"[A-Z]{3,}|\bfile\.py")
SHORT = ("docs", "recipes", "grpo_mcore", "grpo_mcore/algorithms", "tests", "tests/unit/objective")
"""Folders that a page may leave out of a path."""
OF_OTHERS = ("vllm_model_for_training.yaml", "gentle.py", "gentle.yaml", "test_gentle.py")
"""Files of NeMo Gym, and of the reader of first_loss.md."""


def exists(name: str) -> bool:
    if any((ROOT / folder / name).exists() for folder in ("", *SHORT)):
        return True
    folders = () if "/" in name else ("grpo_mcore", "launchers", "recipes", "tests")
    return name in OF_OTHERS or any(True for folder in folders for _ in (ROOT / folder).rglob(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {name for name in CODE.findall(page.read_text()) if not PLACEHOLDER.search(name)}
    assert not sorted(name for name in named if not exists(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert not [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_legible_on_any_background(picture: Path) -> None:
    """It has a panel of its own, colours for dark themes, words for those who cannot see it, and no font to load."""
    text = picture.read_text()
    assert 'class="panel"' in text and "prefers-color-scheme: dark" in text
    assert "<title" in text and "<desc" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_every_page_and_room_is_on_the_map() -> None:
    index, map_of_rooms = ((ROOT / "docs" / name).read_text() for name in ("index.md", "architecture.md"))
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    rooms = {path.parent.name for path in (ROOT / "grpo_mcore").glob("*/__init__.py")}
    assert not [room for room in rooms if f"`{room}/`" not in map_of_rooms or f">{room}/<" not in picture]
    site = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in GUIDES if f"- {page.name}\n" not in site]
    assert not [page.name for page in GUIDES if page.name != "index.md" and page.name not in index]


def test_names_of_the_package_that_the_table_for_users_of_nemo_rl_has_exist() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    names = set(re.findall(r"`(grpo_mcore(?:\.\w+)+)\.(\w+)`", text))
    assert len(names) > 25
    assert not [
        f"{module}.{name}"
        for module, name in names
        if not hasattr(import_module(module), name) and find_spec(f"{module}.{name}") is None
    ]


def test_the_first_loss_does_what_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", (ROOT / "docs" / "first_loss.md").read_text(), re.MULTILINE)
    loss, test, recipe, _ = (textwrap.dedent(block) for block in blocks if block.strip())
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("gentle.py", loss), ("test_gentle.py", test), ("gentle.yaml", recipe)):
        (tmp_path / name).write_text(text)
    import_module("test_gentle").test_negative_advantages_weigh_half()
    config = load_recipe(tmp_path / "gentle.yaml").config
    assert config.loss_fn.path == "gentle:GentleLoss" and config.loss_fn.options == {"negative": 0.5}
    for name in ("gentle", "test_gentle"):
        del sys.modules[name]
