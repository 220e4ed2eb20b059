"""Take the picture of the server's page for the docs: examples/tiny-mixtral answers a chat in headless Chromium.

    python -m tools.draw_serving_page [FOLDER]

It needs playwright and Debian's Chromium: pip install playwright; apt-get install chromium.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.shared.servers import running
from benchmarks.speed._browser import missing, wait_for, window

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "moesched", "serve", str(ROOT / "examples" / "tiny-mixtral"), "--port", "0"]
SIZE = (1000, 620)
MESSAGES = ("Return the", "Raise an")
SETTINGS = {"temperature": "0", "tokens": "50"}
OTHERS = """
() => {
  const body = JSON.stringify({ model, prompt: "Return the", n: 4, max_tokens: 400 });
  const ask = () => fetch("/v1/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body });
  for (const pause of [0, 0, 100, 300]) (async () => {
    for (;;) { await ask(); await new Promise((done) => setTimeout(done, pause)); }
  })();
}
"""
"""Four more users, with pauses of up to 0.3 s between their requests."""
LOOKS = 60
"""Looks at the lanes before the picture, two a second."""


def main() -> None:
    """Serve, chat, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    folder = parser.parse_args().folder
    if lacking := missing():
        sys.exit(lacking)
    with running(COMMAND) as server, window(SIZE) as page:
        page.goto(f"http://127.0.0.1:{server.port}")
        wait_for(page, "model !== ''")
        for field, value in SETTINGS.items():
            page.fill(f"#{field}", value)
        page.evaluate(OTHERS)
        wait_for(page, f"[...pictures.values()].some((each) => each.shares.length >= {LOOKS})")
        for message in MESSAGES:
            page.fill("#text", message)
            page.press("#text", "Enter")
            wait_for(page, "stop === null")
        wait_for(page, "before.running > 0")
        page.screenshot(path=folder / "serving-page.png")


if __name__ == "__main__":
    main()
