"""Ten minutes on a machine with a CUDA GPU: every figure that has a bar, beside its limit and beside other programs.

Needs torch for CUDA and no network. A random Mixtral 8x7B with 4 layers is written once (12 GB), and one with 16 layers
(47 GB) where disk and memory hold it. The cheapest rows come first; each runs in a process of its own, which begins
without a CUDA context, gives all its memory back and can be ended when its time is over. The result file is written
after each row. Rows that lack something, or more time than is left, are left out by name. Parts:

limits       The link, memories and products, on the spot. They belong to each run, as the limits of all other rows.
choices      The ways that the device takes, beside those that it does not.
calibration  `moesched calibrate --device cuda` into a temporary folder, so that all later runs are predicted.
resident     All weights on the GPU: 64 requests at a time, and one.
triton       The same, by kernels in Triton.
streaming    512 requests, the GPU limited to 8 GB, under three policies.
staging      The same, page-locked memory limited to 2 GB.
prompts      All weights on the GPU, batches of 1, 16 and 64.
half         One request, half of the experts on the host.
order        64 requests under ten policies, the GPU limited to 8 GB: as fast, and in the order, as predicted?
families     gpt-oss and Granite, resident and streamed; their greedy tokens in float32 beside the CPU's.
others       Prompts and half, by Hugging Face if it is installed, and by llama.cpp if it is given.
large        16 layers, the GPU limited to 24 GB, 2,048 requests, beside Accelerate if it is installed.

The exit code is 1 if a bar is missed or a row fails. `--small` tries all of this with tiny models on an imitated GPU;
its figures measure nothing.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu._claims import claims
from benchmarks.gpu._preparations import Preparations
from benchmarks.gpu._rows import (
    ALWAYS,
    PARTS,
    Bench,
    Places,
    Row,
    about_gpu,
    about_models,
    preparations,
    rows,
)
from benchmarks.gpu._sizes import FULL, SMALL
from benchmarks.gpu._tables import tables
from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.tables import markdown
from benchmarks.shared.fresh_process import RowFailed, preload
from moesched.system.cache import cache_folder

LEAST_SECONDS = 5.0
"""Kept for the end: processes and models are removed."""
FAILED = "failed: "
PRELOADED = ("moesched.cli.main", "moesched.jobs.session", "moesched.devices.torch.cuda_device")

BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=PARTS,
    shows_parts=True,
    rounds_help="measure all rows this often, as far as time allows; the last figures count",
)
BENCHMARK.parser.add_argument(
    "--seconds", type=float, default=600.0, help="end after as many seconds (default: 600)"
)
BENCHMARK.parser.add_argument("--small", action="store_true", help="tiny models on an imitated GPU")
BENCHMARK.parser.add_argument(
    "--model-dir",
    type=Path,
    metavar="DIR",
    help="folder of models, which are kept; by default one in the cache folder that is removed",
)
BENCHMARK.parser.add_argument(
    "--llama-source", type=Path, metavar="DIR", help="llama.cpp's source, to be built beside the first rows"
)
BENCHMARK.parser.add_argument("--llama", type=Path, metavar="DIR", help="folder of llama.cpp's programs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what there is time for, print it, and write the JSON after each row; returns the exit code."""
    options = BENCHMARK.parse(arguments)
    if not options.small and not torch.cuda.is_available():
        print("torch sees no CUDA device here: nothing is measured")
        return 0
    preload(*PRELOADED)
    with TemporaryDirectory(prefix="gpu-hour-", dir=parent_of(options.model_dir)) as work:
        models = options.model_dir or Path(work)
        bench = Bench(
            SMALL if options.small else FULL, Places(models, Path(work), options.llama_source, options.llama)
        )
        chosen = [row for row in rows(bench.sizes) if row.part in (ALWAYS, *options.only)]
        with Preparations(preparations(bench, chosen)) as made:
            return Hour(bench, made, options.seconds - LEAST_SECONDS).run(chosen * options.rounds)


def parent_of(models: Path | None) -> Path:
    """The folder of what is removed at the end: it is on the same disk as the models."""
    folder = models or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


class Hour:
    """The rows of one run.

    Args:
        seconds: time for all of them.

    Attributes:
        result: what the result file has.
    """

    def __init__(self, bench: Bench, made: Preparations, seconds: float) -> None:
        self._bench = bench
        self._made = made
        self._began = time.monotonic()
        self._seconds = seconds
        self._gpu = about_gpu()
        self.result: dict[str, Any] = {
            "small": bench.sizes.small,
            "gpu": self._gpu,
            "models": about_models(bench.sizes),
            "rows": {},
            "left_out": {},
        }

    def run(self, waiting: list[Row]) -> int:
        """Measure rows, and print the bars; returns the exit code. Ctrl-C ends it, and what was measured stays."""
        try:
            self._measure(waiting)
        except KeyboardInterrupt:
            self.result["interrupted"] = True
            return 128 + signal.SIGINT
        finally:
            self._write()
        bars = list(claims(self.result))
        print(markdown(["measure", "figure", "bar"], [[each.words, each.figure, each.bar] for each in bars]))
        failed = any(reason.startswith(FAILED) for reason in self.result["left_out"].values())
        return int(failed or any(each.reached is False for each in bars))

    def _measure(self, waiting: list[Row]) -> None:
        """Measure rows in order, but those whose preparations are done before those that have to wait."""
        while waiting:
            self._made.advance()
            row = next((each for each in waiting if self._settled(each)), None)
            if row is not None:
                waiting.remove(row)
                self._take(row)
            elif self._left() > 0:
                self._made.wait()
            else:
                self.result["left_out"] |= {each.name: "no time was left" for each in waiting}
                waiting.clear()

    def _write(self) -> None:
        """Write what is known."""
        self.result["preparations"] = self._made.seconds
        BENCHMARK.write(self.result)

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._began)

    def _settled(self, row: Row) -> bool:
        """Test whether it can be measured, or never will be."""
        disturbed = row.alone and self._made.running()
        return (self._made.ready(row.after) and not disturbed) or bool(self._reason_against(row))

    def _reason_against(self, row: Row) -> str:
        """The reason that a row is left out; empty if nothing is known against it."""
        if reason := self._made.failure(row.after) or row.lacks(self._bench, self._gpu["bytes"]):
            return reason
        if not self._bench.sizes.small and row.seconds > self._left():
            return f"it takes {row.seconds:.0f} s, and {max(0.0, self._left()):.0f} s are left"
        return ""

    def _take(self, row: Row) -> None:
        """Measure a row, or say why not; then write."""
        if reason := self._reason_against(row):
            self.result["left_out"][row.name] = reason
            progress.print(f"{row.name}: left out: {reason}", markup=False)
            return
        beside, begun = self._made.running(), time.monotonic()
        progress.print(f"{begun - self._began:.0f} s, {self._left():.0f} s left: {row.name}")
        try:
            figures = row.measure(self._bench, self._left())
        except RowFailed as error:
            self.result["left_out"][row.name] = f"{FAILED}{error}"
            progress.print(f"{row.name}: {FAILED}{error}", markup=False)
        else:
            took = round(time.monotonic() - begun, 2)
            self.result["rows"][row.name] = {"part": row.part, "took": took, "beside": beside, **figures}
        self._write()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # processes and folders end, too
    sys.exit(main())
