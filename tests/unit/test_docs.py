"""The pages name files that exist, and their links lead somewhere."""

import os
import re
import signal
import textwrap
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_mcore.base.stopping import StopRequest, on_signal, on_sigterm
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.observe.alarms import KINDS, SIGNS
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.recipe import load_recipe
from grpo_mcore.recipe.schema.keys import fixed_on_resume, known_keys

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "recipe.md")
"""Without the page that `make docs` writes."""
PAGES = [*sorted(ROOT.glob("*.md")), *GUIDES]
CODE = re.compile(r"`([\w./-]+\.(?:py|yaml|md|sh|svg|lock))`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
PLACEHOLDER = re.compile(r"[A-Z]{3,}|\bfile\.py")
SHORT = ("docs", "recipes", "grpo_mcore", "grpo_mcore/algorithms", "tests", "tests/unit/objective")
"""Folders that a page may leave out of a path."""
OF_OTHERS = (
    "vllm_model_for_training.yaml",
    "gentle.py",
    "gentle.yaml",
    "test_gentle.py",
    "make_task.py",
    "sft.yaml",
    "reward.py",
    "task.yaml",
    "ask.py",
)
"""Files of NeMo Gym, and of the reader of first_loss.md and your_task.md."""


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


def table_below(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table below a heading of a page, without its head."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n{heading}\n")[2]
    table = next(block for block in text.split("\n\n") if block.startswith("|"))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def end_after(signals: list[signal.Signals]) -> RunEnd:
    """Return how a run ends whose loop gets these signals, and that can save."""
    stop = StopRequest()
    try:
        with on_signal() as stop, on_sigterm(stop), stop.listening():
            for number in signals:
                os.kill(os.getpid(), number)
    except KeyboardInterrupt as interrupt:
        return RunEnd.by(interrupt, unsaved=1)
    return RunEnd.in_order(str(stop.reason), early=True, at_once=stop.at_once, unsaved=0)


def test_the_table_of_signals_says_what_a_run_does() -> None:
    rows = table_below("operations.md", "## Signals and exit codes")
    assert len(rows) == 5
    for name, action, saves, code in rows:
        names = re.findall(r"SIG(USR1|TERM|HUP|INT)\b", name)
        for number in (signal.Signals[f"SIG{short}"] for short in names):
            end = end_after([number] * (2 if name.startswith("a second") else 1))
            assert (end.exit_code, end.unsaved == 0) == (int(code), saves == "yes"), name
            assert (end.kind == "stopped") == ("finishes the step" in action), name
    text = " ".join(row[0] for row in rows)
    assert all(short in text for short in ("SIGUSR1", "SIGTERM", "SIGHUP", "SIGINT"))


def test_no_other_page_tells_what_a_signal_does_without_the_table() -> None:
    signals = re.compile(r"Ctrl-C|SIGTERM|SIGUSR1|SIGHUP|SIGINT")
    for page in (page for page in [*GUIDES, ROOT / "README.md"] if page.name != "operations.md"):
        text = page.read_text()
        if signals.search(text):
            assert "operations.md#signals-and-exit-codes" in text, page.name
        sentences = re.split(r"(?<=[.:;])\s", text)
        assert not [words for words in sentences if "Ctrl-C" in words and re.search(r"\bsav", words)], page.name


def test_the_page_of_alarms_is_the_table_of_alarms() -> None:
    rows = {row[0].strip("`"): row[1:] for row in table_below("operations.md", "## Alarms")}
    assert rows == {
        name: [kind.by + ", grave" * kind.grave, kind.when.replace("|", "&#124;"), kind.first]
        for name, kind in KINDS.items()
    }
    assert {name for name, kind in KINDS.items() if kind.by == "run"} == {*SIGNS, "left_band"}
    for kind in KINDS.values():  # its words name the number that the code compares with
        assert not kind.above or f"{kind.above:g}" in kind.when, kind
        assert kind.in_a_row == 1 or f"{kind.in_a_row} steps in a row" in kind.when, kind


def test_the_table_of_changes_says_which_layouts_resume() -> None:
    """`optimizer_parts` decides what a checkpoint in parts refuses; tests/distributed/test_policy_state.py resumes."""
    rows = table_below("operations.md", "## What may change over a resume")
    names = [row[0].strip("`") for row in rows]
    assert set(names) == {field.name for field in fields(PolicyLayout)}
    for name, whole, in_parts in zip(names, *list(zip(*rows, strict=True))[1:], strict=True):
        changed = PolicyLayout(**{name: True if name == "sequence_parallel" else 4})
        assert whole == "yes"
        assert in_parts == ("yes" if changed.optimizer_parts() == PolicyLayout().optimizer_parts() else "no"), name
    text = (ROOT / "docs" / "operations.md").read_text()
    refused = text.partition("other values of ")[2].partition(".\n")[0]
    assert set(re.findall(r"`([\w.]+)`", refused)) == {key for key in known_keys() if fixed_on_resume(key)}


def test_the_lines_of_failures_are_those_that_the_package_prints() -> None:
    rows = table_below("operations.md", "## Failures: the line you see, and what to type")
    ours = [re.findall(r"`([^`]+)`", line)[0] for _, line, _ in rows]
    source = "\n".join(path.read_text() for path in (ROOT / "grpo_mcore").rglob("*.py"))
    of_others = ("torch.OutOfMemoryError", "No available memory for the cache blocks", "CUDA error")
    for line in (line for line in ours if not line.startswith(of_others)):
        parts = [
            part for part in re.split(r"\.\.\.|\bN\b|policy-3|engine-0|training|3600|SIGKILL", line) if len(part) > 5
        ]
        assert parts and all(part.strip(" :;") in source for part in parts), line
