"""The scripts of a report: their parts in node, and a whole page in Chromium. Skipped where these are missing."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.speed._browser import SHIFTED, missing, wait_for, window
from moesched.analysis.lane_times import lane_times, together
from moesched.report import write_run_page
from moesched.trace import About
from moesched.trace.waits import waits_of
from report_pages import unpacked
from runs import FORTY_PERCENT, realtime_run, virtual_run
from traces import ranks_that_meet

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCRIPTS = Path(__file__).with_name("report_scripts.mjs")
USES = Path(__file__).with_name("report_uses.mjs")
DRAWN = "performance.getEntriesByName('timeline drawn').length > 0"


@pytest.fixture
def in_node(tmp_path: Path) -> Callable[..., str]:
    """A function that runs node beside the scripts of a report."""
    if shutil.which("node") is None:
        pytest.skip("needs node; this machine has none")
    with resources.as_file(resources.files("moesched.report") / "assets" / "js") as scripts:
        shutil.copytree(scripts, tmp_path / "js")
    for script in (SCRIPTS, USES):
        shutil.copy(script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(*arguments: str) -> str:
        done = subprocess.run(["node", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_parts_of_the_scripts_do_as_they_say(in_node: Callable[..., str]) -> None:
    in_node("--test", SCRIPTS.name)


@pytest.mark.parametrize("case", ["predicted", "measured", "ranks"])
def test_the_scripts_find_the_causes_of_the_analysis_and_the_room_that_the_page_keeps(
    case: str, in_node: Callable[..., str], tmp_path: Path
) -> None:
    recording = {
        "predicted": lambda: virtual_run("expert_cache", budgets=FORTY_PERCENT).recording,
        "measured": lambda: realtime_run("lru_offload", budgets=FORTY_PERCENT).recording,
        "ranks": lambda: ranks_that_meet(10, 90),
    }[case]()
    write_run_page(tmp_path / "report.html", recording, About(driver="virtual"))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "data").write_bytes(unpacked(page))
    said = json.loads(in_node(USES.name, "data"))
    [found] = said["lanes"]
    for name, lane in lane_times(recording, waits_of(recording), together(recording).alone).items():
        causes: Counter[str] = Counter()
        for each in lane.causes:
            causes[each.cause] += round(each.seconds * 1e9)
        assert found[name] == {"busy": round(lane.busy_seconds * 1e9), **causes}
    assert f"--lanes: {said['height']}px" in page


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


@pytest.mark.slow
def test_nothing_moves_while_a_page_loads(page: Page) -> None:
    assert page.evaluate(SHIFTED) <= 0.1


@pytest.mark.slow
def test_a_slash_finds_tasks_and_a_row_of_any_table_leads_to_its_place(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("post_attention L3")
    page.keyboard.press("Enter")
    assert "found" in page.locator("#found").inner_text()
    assert page.locator("#details h3").inner_text() == "post_attention L3 mb0"
    page.keyboard.press("Escape")
    assert page.locator("#found").inner_text() == ""
    for row in page.locator("#tables table:has(th:text-is('until')) tbody tr").all():
        row.click()
        until = row.locator("td").nth(1).inner_text()
        assert until.startswith(page.locator("#details h3").inner_text())
    page.locator("#tables table:has(th:text-is('kernel')) tbody tr").first.click()
    assert page.locator("#details h3").count() == 1


@pytest.mark.slow
def test_a_dragged_range_tells_what_lanes_did_and_the_tooltip_follows_the_pointer(page: Page) -> None:
    box = page.locator("#lanes canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 400, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 10, steps=4)
    page.mouse.up()
    rows = page.locator("#details tbody tr").all_inner_texts()
    assert any("accelerator" in row and "%" in row for row in rows)
    page.keyboard.press("Escape")
    for x in (600, 800):
        page.mouse.move(box["x"] + x, box["y"] + 100)
        tooltip = page.locator("#tooltip").bounding_box()
        assert tooltip is not None
        assert 0 < tooltip["x"] - (box["x"] + x) < 30


@pytest.mark.slow
def test_on_a_phone_the_names_of_lanes_take_a_fifth(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(100)
    gutter = "parseFloat(getComputedStyle(document.documentElement).getPropertyValue('--gutter'))"
    width = page.evaluate("document.querySelector('#lanes').clientWidth")
    assert page.evaluate(gutter) == pytest.approx(width / 5, abs=1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
