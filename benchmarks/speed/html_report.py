"""Open the page of a run of 180,000 tasks in headless Chromium: size, layout shift, time to use, and frame rate.

A page can be used once the first frame of its timeline is on the screen; the time counts from the start of navigation.
The layout shift is cumulative, as browsers define it, until half a second after that; the worst of all rounds counts.
Durations vary by chance, as measured ones do, since equal ones would compress well. Frames are counted while the wheel
zooms in and out, and while the timeline is moved, both with the critical path shown and all lanes in view. The browser
draws without a GPU. Needs playwright and Debian's Chromium: pip install playwright; apt-get install chromium
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_least, at_most
from benchmarks.speed._browser import SHIFTED, missing, wait_for, window
from moesched.jobs.simulate_model import simulate_model
from moesched.report import write_run_page
from moesched.trace import Recording, Trace, read_trace

SIZES = {"390 px": (390, 844), "1280 px": (1280, 900), "2560 px": (2560, 1400)}
BAR_BYTES = 12_000_000
BAR_SECONDS = 1.5
BAR_SHIFT = 0.1
BAR_FRAMES = 30.0
FRAMES_FOR_MS = 3000


def claims(result: Result) -> Iterator[Claim]:
    """The page of a run of 180,000 tasks, in headless Chromium without a GPU."""
    tasks, windows = f"page of {result['tasks']:,} tasks", result["windows"]
    yield at_most(f"{tasks}, MB", result["bytes"] / 1e6, BAR_BYTES / 1e6, "{:.1f}")
    widths = f"in Chromium, {', '.join(windows)} wide"
    slowest = max(each["usable_seconds"] for each in windows.values())
    yield at_most(f"{tasks} {widths}: usable after", slowest, BAR_SECONDS, "{:.2f} s")
    shift = max(each["layout_shift"] for each in windows.values())
    yield at_most(f"{tasks} {widths}: cumulative layout shift", shift, BAR_SHIFT, "{:.2f}")
    least = min(each[f"{what}_frames_per_second"] for each in windows.values() for what in ("zoom", "pan"))
    words = f"{tasks} {widths}: frames per second while it zooms and moves"
    yield at_least(words, least, BAR_FRAMES, "{:.0f}")


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=SIZES,
    rounds=5,
    rounds_help="times that each page is opened",
)

DRAWN = "performance.getEntriesByName('timeline drawn').map((mark) => mark.startTime / 1000)"

MOVED = """
async ([motion, milliseconds]) => {
  const canvas = document.querySelector("#lanes canvas");
  const box = canvas.getBoundingClientRect();
  const at = { clientX: box.left + 0.6 * box.width, clientY: box.top + 80, bubbles: true, cancelable: true };
  const times = [];
  await new Promise((done) => {
    function frame(now) {
      times.push(now);
      const passed = now - times[0];
      if (passed > milliseconds) return done();
      const forth = Math.sin(passed / 450) > 0;
      const wheel = motion === "zoom" ? { deltaY: forth ? -40 : 40 } : { deltaX: forth ? 30 : -30 };
      canvas.dispatchEvent(new WheelEvent("wheel", { ...at, ...wheel }));
      requestAnimationFrame(frame);
    }
    requestAnimationFrame(frame);
  });
  return (1000 * (times.length - 1)) / (times.at(-1) - times[0]);
}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, open it, and write what was found."""
    options = BENCHMARK.parse(arguments)
    if missing():
        raise SystemExit(missing())
    with TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        trace = simulated(Path(folder, "trace.json"))
        vary(trace.recording)
        begun = perf_counter()
        write_run_page(page, *trace)
        figures: dict[str, Any] = {
            "tasks": len(trace.recording.slices),
            "edges": trace.recording.edges,
            "write_seconds": round(perf_counter() - begun, 2),
            "bytes": page.stat().st_size,
        }
        figures["windows"] = {
            name: opened(page, SIZES[name], options.rounds)
            for name in track(options.only, "opening pages", still=True)
        }
    return BENCHMARK.write(figures)


def simulated(path: Path) -> Trace:
    """A run on the virtual clock, by way of its trace."""
    simulate_model(
        "mixtral-8x7b",
        machine="t4",
        policy="cgopipe",
        workload="mtbench",
        batch_size=320,
        micro_batch_size=16,
        gen=47,
        trace=path,
    )
    return read_trace(path)


def vary(recording: Recording) -> None:
    """Start each task up to a quarter of its time later, and end it as much earlier; lanes and edges stay in order."""
    random = Random(0)
    for each in recording.slices:
        spare = (each.end - each.start) // 4
        each.start += random.randint(0, spare)
        each.end -= random.randint(0, spare)


def opened(page: Path, size: tuple[int, int], rounds: int) -> dict[str, Any]:
    """One page in a window of some width and height, several times."""
    found: dict[str, list[float]] = {"usable": [], "shift": [], "zoom": [], "pan": []}
    for _ in range(rounds):
        with window(size) as shown:
            shown.goto(page.as_uri())
            wait_for(shown, f"{DRAWN}.length > 0")
            found["usable"] += shown.evaluate(DRAWN)
            found["shift"].append(shown.evaluate(SHIFTED))
            for motion in ("zoom", "pan"):
                found[motion].append(shown.evaluate(MOVED, [motion, FRAMES_FOR_MS]))
    return {
        "usable_seconds": round(median(found["usable"]), 2),
        "layout_shift": round(max(found["shift"]), 3),
        "zoom_frames_per_second": round(median(found["zoom"]), 1),
        "pan_frames_per_second": round(median(found["pan"]), 1),
        "all": {name: [round(each, 2) for each in values] for name, values in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
