"""A walk through the page of a run in headless Chromium: `pip install -e .[browser]`, Debian's chromium, --browser."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.tools.report import page as report_page
from tests.unit.tools.report_pages import write_run

pytestmark = pytest.mark.browser


@pytest.fixture
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_walk_through_the_page(
    tmp_path: Path, chromium: Any, width: int, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, steps=30, groups=6, length=60)
    monkeypatch.setattr(report_page, "PAGE_BYTES", 40_000)  # so that some steps are only beside the page
    assert main(["report", str(tmp_path), "--all-samples", "--output", str(tmp_path / "page.html")]) == 0
    errors: list[str] = []
    page = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True).new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"file://{tmp_path}/page.html")
    page.wait_for_selector("body[data-ready]")
    assert page.locator("html").get_attribute("data-theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing hangs over on a phone
    assert "disagree" in page.locator("#alarm-list li").first.inner_text()
    assert page.locator(".chart canvas").count() == 2  # reward, mismatch
    page.fill("#metric-search", "unheard")
    assert page.locator(".chart").count() == 0
    page.fill("#metric-search", "")

    page.locator("#step-bars [data-step='7']").click()  # the timeline of a step
    assert page.locator("#timeline-step").input_value() == "7"
    assert page.locator("#timeline svg rect").count() == 5

    assert page.locator("#sample .card .said img").count() == 2  # the picture of the first prompt, in both samples
    assert page.locator("#mismatch table").count() == 2  # by place and by probability
    rewards = "#sample-list tbody tr td:nth-child(2)"
    page.select_option("#filter", "best")
    assert page.locator(rewards).all_inner_texts() == ["1"] * 6 + ["0"] * 6
    page.fill("#search", "p3")
    assert page.locator(rewards).count() == 2
    page.locator("#sample-list tbody tr").nth(1).click()
    assert page.locator("#sample .card").count() == 2  # its group side by side
    assert page.locator("#sample .card.open .facts b").first.inner_text() == "0"
    for card in page.locator("#sample .card").all():  # an advantage is what its formula gives, to the last digit
        advantage, formula = card.locator(".advantage").inner_text(), card.locator(".formula").inner_text()
        assert re.fullmatch(r"[-+*/(). 0-9e]+", formula) and float(advantage) == float(f"{eval(formula):.6g}")
        assert "2 rewards in its group" in card.inner_text() and "level hard" in card.inner_text()
    tokens = page.locator("#sample .card.open .tokens s")
    assert tokens.count() == 58 and "policy" in tokens.first.get_attribute("data-tip")
    page.select_option("#colour", "none")
    plain = tokens.first.get_attribute("style")
    page.select_option("#colour", "age")
    assert plain == "" and "rgba" in page.locator("#sample .card .tokens s").first.get_attribute("style")

    page.fill("#search", "")
    page.select_option("#sample-step", "13")  # from the script beside the page
    page.wait_for_function("loaded['train13']")
    assert page.locator("#sample-list tbody tr").count() == 12
    page.click("#show-over-time")
    steps = page.locator("#over-time tbody tr td:first-child")
    assert steps.all_inner_texts() == ["13", "30"]
    steps.last.click()
    assert page.locator("#sample-step").input_value() == "30"
    assert not errors
