"""Headless Chromium, as Debian packages it, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

WAIT_MS = 20
MOST_WAITS = 1500

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


SHIFTED = """
() => new Promise((done) => {
  let total = 0;
  const observer = new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) total += entry.value;
  });
  observer.observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(total), 500);
})
"""
"""Gives the cumulative layout shift of a page, until half a second later."""


def missing() -> str:
    """Names the missing one of browser and driver, and its installation; empty if none is missing."""
    if find_spec("playwright") is None:
        return "needs playwright, which is not installed: pip install playwright"
    if chromium() is None:
        return "needs chromium, which is not installed: apt-get install chromium"
    return ""


def chromium() -> str | None:
    """The program: MOESCHED_CHROMIUM in the environment, or the one of the path."""
    return os.environ.get("MOESCHED_CHROMIUM") or shutil.which("chromium")


def wait_for(page: Page, expression: str) -> None:
    """Wait until a JavaScript expression is true.

    Playwright's own waiting evaluates text in the page, which the page's content security policy does not allow.
    """
    for _ in range(MOST_WAITS):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(WAIT_MS)
    raise TimeoutError(f"not true after {MOST_WAITS * WAIT_MS / 1000:.0f} s: {expression}")


@contextmanager
def window(size: tuple[int, int]) -> Iterator[Page]:
    """A new browser with one empty page of some width and height."""
    from playwright.sync_api import sync_playwright

    width, height = size
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(OPTIONS))
        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        finally:
            browser.close()
