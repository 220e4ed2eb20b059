"""The scripts of a report: their parts in node, and a whole page in Chromium. Skipped where these are missing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _browser import missing, wait_for, window

from moesched.report import write_run_page
from runs import FORTY_PERCENT, virtual_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCRIPTS = Path(__file__).with_name("report_scripts.mjs")
DRAWN = "performance.getEntriesByName('timeline drawn').length > 0"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node; this machine has none")
def test_the_parts_of_the_scripts_do_as_they_say(tmp_path: Path) -> None:
    with resources.as_file(resources.files("moesched.report") / "assets" / "js") as scripts:
        shutil.copytree(scripts, tmp_path / "js")
    shutil.copy(SCRIPTS, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    done = subprocess.run(
        ["node", "--test", SCRIPTS.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A page in a browser, in which a script's error or a refused piece fails the test."""
    if missing():
        pytest.skip(missing())
    run = virtual_run("cgopipe", budgets=FORTY_PERCENT)
    write_run_page(tmp_path / "report.html", run.recording, run.about)
    complaints: list[str] = []
    with window((1280, 900)) as shown:
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.goto((tmp_path / "report.html").as_uri())
        wait_for(shown, DRAWN)
        yield shown
    assert complaints == []


@pytest.mark.slow
def test_a_page_zooms_by_key_selects_by_click_and_shows_what_a_task_depends_on(page: Page) -> None:
    canvas = page.locator("#lanes canvas")
    box = canvas.bounding_box()
    assert box is not None
    middle = 200 + (box["width"] - 200) / 2
    page.mouse.move(box["x"] + middle, box["y"] + 80)
    page.mouse.wheel(0, 100)
    wait_for(page, "scrollY > 0")
    page.evaluate("scrollTo(0, 0)")
    page.mouse.move(2, 2)
    before = canvas.screenshot()
    page.locator("#lanes").focus()
    page.keyboard.press("+")
    page.wait_for_timeout(50)
    assert canvas.screenshot() != before
    page.keyboard.press("0")
    page.keyboard.press("Shift+ArrowRight")
    label = page.locator("#details h3").inner_text()
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator("#details h3").inner_text() != label
    needed_by = page.locator("#details .tasks").nth(1).locator("button").first
    name = needed_by.inner_text()
    needed_by.click()
    assert page.locator("#details h3").inner_text() == name
    page.locator("#lanes").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.locator("#details h3").count() == 0
    found = []
    for y in range(60, int(box["height"]), 12):
        canvas.click(position={"x": middle, "y": y})
        found += page.locator("#details h3").all_inner_texts()
    assert name in found
    assert page.locator("#tooltip").is_visible()
