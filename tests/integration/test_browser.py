"""The report in a real browser: runs of every size, on a screen, a phone and paper, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.consumers.report import Report
from headrace.consumers.report.page import page as html_of
from headrace.consumers.report.sections import sections
from tests.pages import DESK, PHONE, browser_path, opened_page, reports

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(browser_path() is None, reason="no Chromium on this machine: apt-get install chromium")


@pytest.fixture(scope="module")
def found() -> dict[str, Report]:
    return reports()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_page(*DESK) as page:
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        yield page


def shown(browser: Any, tmp_path: Path, *runs: Report) -> Any:
    """The page, opened; it says nothing to the console and asks for nothing but itself."""
    file = tmp_path / "report.html"
    file.write_text(html_of(*runs))
    browser.said.clear()
    browser.asked.clear()
    browser.goto(file.as_uri())
    assert not browser.said and browser.asked == [file.as_uri()]
    return browser


@pytest.mark.slow
def test_pages_of_every_size_and_kind_of_run_open_without_error_network_or_sideways_scrolling(
    browser: Any, found: dict[str, Report], tmp_path: Path
) -> None:
    assert found["5000"].reliability.attempts == 5000 and found["100"].ledger is not None
    for name in ("1", "100", "5000"):
        ledger = found[name].ledger
        assert ledger is not None
        assert ledger.closes, (name, ledger.failures)
    pages = [*((report,) for report in found.values()), (found["100"], found["5000"])]
    for runs in pages:
        page = shown(browser, tmp_path, *runs)
        for width, height in (DESK, PHONE):
            page.set_viewport_size({"width": width, "height": height})
            name = f"{[run.run for run in runs]} at {width}"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            wide = page.evaluate("""width => [...document.querySelectorAll('td, th, p, figure')].filter(
                e => e.getBoundingClientRect().right > width + 1).map(e => e.outerHTML.slice(0, 200))""", width)
            assert not wide, name
            letters = page.evaluate("""[...document.querySelectorAll('svg text, svg tspan')].map(
                e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a).filter(size => size > 0)""")
            assert not letters or min(letters) >= 7, name  # px: a plot scrolls in itself before it gets unreadable
        verdicts = page.locator(".verdict").all_inner_texts()
        assert len(verdicts) == len(sections(runs[0])) * len(runs)
        size = page.evaluate("parseFloat(getComputedStyle(document.querySelector('td')).fontSize)")
        assert size >= 12  # px: readable on a phone without zooming


@pytest.mark.slow
def test_paper_gets_every_section_and_no_navigation(browser: Any, found: dict[str, Report], tmp_path: Path) -> None:
    page = shown(browser, tmp_path, found["100"])
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert all(section.is_visible() for section in page.locator("section").all())
    printed = page.pdf(format="A4")
    page.emulate_media(media="screen")
    assert printed.startswith(b"%PDF") and 1 <= printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page/") < 12


def test_jumping_to_a_question_works(browser: Any, found: dict[str, Report], tmp_path: Path) -> None:
    page = shown(browser, tmp_path, found["100"])
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    page.click("nav a[href='#publication']")
    top = page.evaluate("document.querySelector('#publication').getBoundingClientRect().top")
    assert -1 <= top < PHONE[1]
