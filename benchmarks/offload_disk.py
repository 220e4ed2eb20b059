"""Decoding with weights on the disk, and without: steps against what the disk allows, and against Hugging Face.

    python benchmarks/offload_disk.py [MODEL_DIR] [--only disk page_cache resident]

Without MODEL_DIR a random mixtral-0.8b is written to the cache folder once. About five minutes, in three parts:

disk        16 sequences, 40 % of the weights' bytes as memory, the files read past the page cache. Each run of a policy
            lies between two measurements of the disk: the same pages read into the same sort of memory, with nothing
            else to do, by one thread and by two; the better counts. A step is held against
            (needed bytes / disk bandwidth). Needed are the weights that the step touched, as its routing says, but for
            the pages that the plan keeps. Read is what the schedule fetched in the step, in whole blocks of the disk,
            checked against the reader's own count over the run.
page_cache  The same budget and prompts with the files in the page cache, against Accelerate's disk offload with the
            budget as its `max_memory` for weights alone: activations, cache and buffers come on top of it, where ours
            lie within. Neither copies what streams: Accelerate opens safetensors as mapped memory, and so do we here.
            Both sides' files are dropped from the page cache and read into it once. How fast all cores together read
            the mapped files bounds every implementation: no step is faster than the weights that it touches are read.
            `most_any_could_reach` is Accelerate's step over that bound.
resident    All weights in memory, batches of 1 and 16, against Hugging Face with both of its expert settings.

Ours and theirs run in turn in one process, on the same weights and prompts, decoding greedily. Figures are medians.
`cores_of_others` says how many cores other processes kept busy meanwhile (Linux): with more than a few hundredths, the
figures are those of a fight for the cores.
Without transformers and accelerate the comparisons are left out, and the result says so.
The result is written to benchmarks/results/offload_disk-<machine>.json.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _results import named_for_machine, write_result
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moesched import plugins
from moesched.machines.local import cache_folder, local_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import Page, WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.outcome import Report
from moesched.plan import Plan, split_batch
from moesched.runs import plan_run, run
from moesched.tasks import PageTransfer, Task

MODEL = "mixtral-0.8b"
PARTS = ("disk", "page_cache", "resident")
BUDGET_SHARE = 0.4
BATCH = 16
PROMPT_TOKENS = 16
STEPS = 9  # tokens for each request: a prefill and eight decode steps
COUNTED = slice(
    1, -1
)  # of the decode steps: the first finds pages fetched by prefill, the last fetches none ahead
ROUNDS = {"disk": 3, "page_cache": 3, "resident": 5}
EXPERT_SETTINGS = ("eager", "grouped_mm")
POLICIES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("layer_streaming", 16, {}),
    ("cgopipe", 16, {}),
    ("cgopipe", 8, {}),
    ("expert_streaming", 16, {}),
)
"""Name, sequences of a micro-batch, settings."""

BARS = {
    "step over (needed bytes / disk bandwidth)": ("at most", 1.10),
    "bytes read over needed": ("at most", 1.02),
    "page cache: Accelerate's step over ours": ("at least", 3.0),
    "resident, batch 1: Hugging Face's step over ours": ("at least", 1.2),
    "resident, batch 16: Hugging Face's step over ours": ("at least", 1.2),
}

console = Console(stderr=True)


class Model(NamedTuple):
    """What all runs share."""

    directory: Path
    checkpoint: Checkpoint
    layout: WeightLayout

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layout.globals_bytes + sum(page.nbytes for page in self.layout.pages)

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head."""
        return self.checkpoint.tensors["lm_head"].nbytes

    @property
    def budget(self) -> int:
        """Bytes of host memory for a run whose weights do not fit."""
        return int(BUDGET_SHARE * self.weight_bytes)

    def prompts(self, count: int) -> list[list[int]]:
        """The same random prompts each time."""
        chance = random.Random(1)
        vocabulary = self.checkpoint.config.vocabulary
        return [[chance.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


# ---------------------------------------------------------------- ours


class Uses:
    """An observer that notes which pages each step fetched, which experts it used, and when each lane was busy."""

    def __init__(self) -> None:
        self.busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.ends: dict[int, float] = defaultdict(float)
        self.fetched: dict[int, list[Page]] = defaultdict(list)
        self.experts: dict[int, set[tuple[int, int]]] = defaultdict(set)

    def ended(self, task: Task) -> None:
        """Note a task."""
        self.busy[task.lane.name].append((task.start / 1e9, task.end / 1e9))
        if task.verb == "sample":
            self.ends[task.step] = max(self.ends[task.step], task.end / 1e9)
        if isinstance(task, PageTransfer) and task.verb == "fetch":
            self.fetched[task.step] += task.pages
        elif task.verb in ("post_attention", "route"):
            self.experts[task.step].update((task.layer, expert) for expert in task.value)

    def utilization(self, lane: str, steps: Sequence[int]) -> float:
        """The share of the time that these steps took in which a lane was busy."""
        since, until = self.ends[steps[0] - 1], self.ends[steps[-1]]
        busy = sum(max(0.0, min(end, until) - max(start, since)) for start, end in self.busy[lane])
        return busy / (until - since)

    def touched(self, step: int, page: Page) -> bool:
        """Whether the step used a page: the dense part always, an expert if a token was routed to it."""
        return page.expert < 0 or (page.layer, page.expert) in self.experts[step]


class Decoded(NamedTuple):
    """One run of ours."""

    plan: Plan
    report: Report
    needed: list[int]  # bytes, by counted step
    read: list[int]
    touched: list[int]  # needed, and what stays
    utilization: dict[str, float]  # by lane, over the counted steps

    @property
    def steps(self) -> list[float]:
        """Seconds of the decode steps that count."""
        return self.report.step_seconds[1:][COUNTED]


def decode(
    model: Model,
    policy: str,
    batch: int,
    micro_batch: int,
    settings: dict[str, Any],
    *,
    budget: int | None = None,
    direct: bool = True,
    steps: int = STEPS,
) -> Decoded:
    """Run a policy once and count its bytes."""
    device = plugins.find("devices", "torch")(open_checkpoint(model.directory), model.layout, direct=direct)
    prompts = model.prompts(batch)
    chosen, uses = plugins.make_policy(policy, settings), Uses()
    budgets = {"host": budget or 2 * model.weight_bytes}
    lengths = [len(prompt) for prompt in prompts]
    split = split_batch(lengths, steps, micro_batch)
    plan = plan_run(local_machine(), model.layout, split, chosen, budgets, device.slot_bytes)
    report = run(plan, chosen, device, prompts, observers=[uses])
    kept = [page for fixed in plan.kept for page in fixed.pages()]
    check_count(device, kept, uses)
    streamed = set(range(len(model.layout.pages))) - {page.id for page in kept}
    counted = range(1, steps)[COUNTED]
    used = [[page for page in model.layout.pages if uses.touched(step, page)] for step in counted]
    needed = [sum(page.nbytes for page in pages if page.id in streamed) for pages in used]
    touched = [model.head_bytes + sum(page.nbytes for page in pages) for pages in used]
    read = [sum(map(device.bytes_to_read, uses.fetched[step])) for step in counted]
    utilization = {lane: uses.utilization(lane, counted) for lane in report.lanes}
    return Decoded(plan, report, needed, read, touched, utilization)


def check_count(device: Any, kept: Iterable[Page], uses: Uses) -> None:
    """Hold what the schedule fetched against what the reader says it read."""
    pages = [*kept, *(page for fetched in uses.fetched.values() for page in fetched)]
    counted = sum(map(device.bytes_to_read, pages))
    unexplained = device.bytes_read - counted - device.layout.globals_bytes
    if not 0 <= unexplained < 1 << 20:  # the blocks around the embedding, the norm and the head
        raise SystemExit(f"the reader read {unexplained:,} bytes that no task accounts for")


def disk_bandwidth(model: Model) -> dict[str, float]:
    """Bytes per second of reading all pages past the page cache, by one thread and by two."""
    reader = plugins.find("devices", "moesched.devices.page_reader:PageReader")(
        model.checkpoint, model.layout
    )
    arena = plugins.find("devices", "moesched.devices.arena:Arena")(4, reader.slot_bytes)

    def read(first: int, threads: int) -> None:
        for number in range(first, len(model.layout.pages), threads):
            reader.read(model.layout.pages[number], arena.slot(first + threads * (number // threads % 2)))

    rates = {}
    with reader:
        for threads in (1, 2):
            before, started = reader.bytes_read, time.perf_counter()
            workers = [threading.Thread(target=read, args=(n, threads)) for n in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            rates[f"{threads} threads"] = (reader.bytes_read - before) / (time.perf_counter() - started)
    return rates


class Others:
    """How many cores other processes kept busy since this was made; nothing where there is no /proc/stat."""

    def __init__(self) -> None:
        self._since = self._now()

    @property
    def cores(self) -> float | None:
        """Busy cores of others, on average."""
        now = self._now()
        if now is None or self._since is None:
            return None
        wall, busy, own = (after - before for after, before in zip(now, self._since, strict=True))
        return max(0.0, (busy - own) / wall)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds on the clock, of busy cores, and of this process's."""
        try:
            ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        except OSError:
            return None
        busy = (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()


# ---------------------------------------------------------------- theirs


def missing_peers() -> str | None:
    """Why there is nothing to compare with, if so."""
    absent = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


class HuggingFace:
    """A model of transformers, decoding greedily."""

    def __init__(self, directory: Path, experts: str, **loading: Any) -> None:
        from transformers import AutoModelForCausalLM
        from transformers import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.bfloat16,
                attn_implementation="sdpa",
                experts_implementation=experts,
                **loading,
            ).eval()

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[float]]:
        """Seconds of the prefill, and of each decode step."""
        torch.set_num_threads(usable_cores())
        tokens_ST, cache, seconds = torch.tensor(prompts), None, []
        with torch.inference_mode():
            for _ in range(steps):
                started = time.perf_counter()
                output = self.model(tokens_ST, past_key_values=cache, use_cache=True)
                cache, tokens_ST = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
                seconds.append(time.perf_counter() - started)
        return seconds[0], seconds[1:]


# ---------------------------------------------------------------- the three parts


def part_disk(model: Model, advance: Callable[[str], None]) -> dict[str, Any]:
    """Each policy between two measurements of the disk, several times."""
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    disk: list[dict[str, float]] = []
    advance("the disk")
    before = best_of(disk, disk_bandwidth(model))
    for _ in range(ROUNDS["disk"]):
        for index, (policy, micro_batch, settings) in enumerate(POLICIES):
            advance(f"{policy}, micro-batches of {micro_batch}")
            decoded = decode(model, policy, BATCH, micro_batch, settings, budget=model.budget)
            after = best_of(disk, disk_bandwidth(model))
            runs[index].append(disk_figures(decoded, (before + after) / 2))
            before = after
    policies = []
    for index, (policy, micro_batch, settings) in enumerate(POLICIES):
        name = {"policy": policy, "micro_batch_size": micro_batch, "settings": settings}
        policies.append({**name, **medians(runs[index]), "runs": runs[index]})
    return {"disk_bytes_per_second": disk, "policies": policies}


def best_of(disk: list[dict[str, float]], rates: dict[str, float]) -> float:
    """Note the rates and return the highest."""
    disk.append(rates)
    return max(rates.values())


def disk_figures(decoded: Decoded, bandwidth: float) -> dict[str, Any]:
    """One run against the disk that was measured around it."""
    plan, report = decoded.plan, decoded.report
    needed, seconds = median(decoded.needed), median(decoded.steps)
    return {
        "step_seconds": seconds,
        "disk_bytes_per_second": bandwidth,
        "needed_bytes": needed,
        "read_bytes": median(decoded.read),
        "step_over_disk": median(
            step * bandwidth / touched for step, touched in zip(decoded.steps, decoded.needed, strict=True)
        ),
        "read_over_needed": sum(decoded.read) / sum(decoded.needed),
        "disk_lane_utilization": decoded.utilization["disk->host"],
        "accelerator_lane_utilization": decoded.utilization["accelerator"],
        "load_seconds": report.load_seconds,
        "prefill_seconds": report.prefill_seconds,
        "kept_bytes": sum(page.nbytes for fixed in plan.kept for page in fixed.pages()),
        "buffer_bytes": sum(len(pool.slots) * pool.slot_bytes for pool in plan.pools),
        "peak_bytes": report.peak_bytes["host"],
        "steps": decoded.steps,
    }


def part_page_cache(model: Model, advance: Callable[[str], None]) -> dict[str, Any]:
    """Ours and Accelerate's disk offload, both reading what the page cache holds."""
    warm(model.directory)
    peers = missing_peers()
    ours: dict[str, list[dict[str, float]]] = defaultdict(list)
    theirs: dict[str, list[dict[str, float]]] = defaultdict(list)
    bandwidths, touched = [], []
    for _ in range(ROUNDS["page_cache"]):
        bandwidths.append(memory_bandwidth(model))
        for policy, micro_batch, settings in POLICIES:
            name = f"{policy}, micro-batches of {micro_batch}"
            advance(f"{name}, page cache")
            decoded = decode(model, policy, BATCH, micro_batch, settings, budget=model.budget, direct=False)
            share = {"transfer_share": decoded.utilization["disk->host"]}
            ours[name].append(timed(decoded.report.step_seconds, COUNTED) | share)
            touched += decoded.touched
        for experts in EXPERT_SETTINGS if peers is None else ():
            advance(f"Accelerate, {experts}, page cache")
            theirs[experts].append(accelerate_decode(model, experts))
    figures = compared(ours, theirs, peers)
    figures |= {"memory_bytes_per_second": max(bandwidths), "touched_bytes": median(touched)}
    figures["fastest_step_seconds"] = figures["touched_bytes"] / figures["memory_bytes_per_second"]
    if theirs:
        fastest_theirs = min(runs["step_seconds"] for runs in figures["hugging_face"].values())
        figures["most_any_could_reach"] = fastest_theirs / figures["fastest_step_seconds"]
    return figures


def memory_bandwidth(model: Model) -> float:
    """Bytes per second that all cores together read of the mapped files, at best."""
    torch.set_num_threads(usable_cores())
    best = 0.0
    for file in model.directory.glob("*.safetensors"):
        words = torch.from_file(str(file), size=file.stat().st_size // 8, dtype=torch.int64)
        for _ in range(6):  # the first maps the file
            started = time.perf_counter()
            words.sum()
            best = max(best, words.nbytes / (time.perf_counter() - started))
    return best


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warm(directory: Path) -> None:
    """Read a folder's weights into the page cache, from nothing, as any reader would."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while stream.read(1 << 24):
                pass


def accelerate_decode(model: Model, experts: str) -> dict[str, float]:
    """Accelerate's disk offload under the same budget."""
    folder = Path(tempfile.mkdtemp(dir=model.directory.parent, prefix=".offload-"))
    try:
        limits = {"max_memory": {"cpu": model.budget}, "offload_folder": str(folder)}
        peer = HuggingFace(model.directory, experts, device_map="auto", **limits)
        warm(folder)
        prefill, steps = peer.decode(model.prompts(BATCH), STEPS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return timed([prefill, *steps], COUNTED)


def part_resident(model: Model, advance: Callable[[str], None]) -> dict[str, Any]:
    """Everything in memory, at two batch sizes."""
    missing = missing_peers()
    peers = {} if missing else {experts: HuggingFace(model.directory, experts) for experts in EXPERT_SETTINGS}
    results = {}
    for batch in (1, BATCH):
        ours: dict[str, list[dict[str, float]]] = defaultdict(list)
        theirs: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(ROUNDS["resident"]):
            advance(f"resident, batch {batch}")
            report = decode(model, "resident", batch, batch, {}, steps=13).report
            ours["resident"].append(timed(report.step_seconds, slice(1, None)))
            for experts, peer in peers.items():
                prefill, steps = peer.decode(model.prompts(batch), 13)
                theirs[experts].append(timed([prefill, *steps], slice(1, None)))
        results[f"batch {batch}"] = compared(ours, theirs, missing)
    return results


def timed(seconds: Sequence[float], counted: slice) -> dict[str, float]:
    """A run's prefill and its median decode step, of those that count."""
    return {"prefill_seconds": seconds[0], "step_seconds": median(seconds[1:][counted])}


def compared(
    ours: dict[str, list[dict[str, float]]], theirs: dict[str, list[dict[str, float]]], missing: str | None
) -> dict[str, Any]:
    """Medians over the rounds, and the best of ours against the best of theirs."""
    figures: dict[str, Any] = {
        "moesched": {name: {**medians(runs), "runs": runs} for name, runs in ours.items()},
        "hugging_face": {name: {**medians(runs), "runs": runs} for name, runs in theirs.items()},
    }
    if missing is not None:
        return {**figures, "left_out": missing}
    for what in ("step", "prefill"):
        ours_best, theirs_best = (
            min(runs[f"{what}_seconds"] for runs in figures[side].values())
            for side in ("moesched", "hugging_face")
        )
        figures[f"{what}_ratio"] = theirs_best / ours_best
    return figures


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure over the runs."""
    return {
        name: median(one[name] for one in runs)
        for name, value in runs[0].items()
        if not isinstance(value, list)
    }


# ---------------------------------------------------------------- the report


def summary(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures that have a bar, with it."""
    values: dict[str, float] = {}
    names = iter(BARS)
    if "disk" in results:
        best = min(results["disk"]["policies"], key=lambda policy: policy["step_seconds"])
        values = {next(names): best["step_over_disk"], next(names): best["read_over_needed"]}
    keys = dict(
        zip(
            list(BARS)[2:],
            (("page_cache",), ("resident", "batch 1"), ("resident", f"batch {BATCH}")),
            strict=True,
        )
    )
    for name, path in keys.items():
        figures: Any = results
        for key in path:
            figures = figures.get(key, {})
        if "step_ratio" in figures:
            values[name] = figures["step_ratio"]
    return {
        name: {"value": value, "bar": f"{BARS[name][0]} {BARS[name][1]}", "reached": reached(name, value)}
        for name, value in values.items()
    }


def reached(name: str, value: float) -> bool:
    """Whether a figure is on the right side of its bar."""
    sense, bar = BARS[name]
    return value <= bar if sense == "at most" else value >= bar


def tables(results: dict[str, Any]) -> Iterable[Table]:
    """All figures for people."""
    if "disk" in results:
        table = Table(
            "policy", "step", "over disk", "read/needed", "disk lane", "needed", "disk", title="disk"
        )
        for one in results["disk"]["policies"]:
            table.add_row(
                f"{one['policy']}, {one['micro_batch_size']}",
                f"{one['step_seconds'] * 1e3:.0f} ms",
                f"{one['step_over_disk']:.3f}",
                f"{one['read_over_needed']:.3f}",
                f"{one['disk_lane_utilization']:.3f}",
                f"{one['needed_bytes'] / 1e6:,.0f} MB",
                f"{one['disk_bytes_per_second'] / 1e9:.2f} GB/s",
            )
        yield table
    resident = {
        f"resident, {key}": value
        for key, value in results.get("resident", {}).items()
        if key.startswith("batch")
    }
    for title, part in {"page cache": results.get("page_cache"), **resident}.items():
        if part:
            table = Table("", "prefill", "decode step", title=title)
            for side in ("moesched", "hugging_face"):
                for name, one in part[side].items():
                    times = [f"{one[f'{what}_seconds'] * 1e3:.1f} ms" for what in ("prefill", "step")]
                    table.add_row(f"{side}: {name}", *times)
            if "most_any_could_reach" in part:
                table.caption = (
                    f"{part['touched_bytes'] / 1e6:,.0f} MB touched, read at best at "
                    f"{part['memory_bytes_per_second'] / 1e9:.1f} GB/s in {part['fastest_step_seconds'] * 1e3:.1f} ms: "
                    f"the most that any implementation could reach is {part['most_any_could_reach']:.2f}"
                )
            if "left_out" in part:
                table.caption = f"Hugging Face left out: {part['left_out']}"
            yield table
    table = Table("figure", "value", "bar", "", title="summary")
    for name, row in results["summary"].items():
        table.add_row(name, f"{row['value']:.3f}", row["bar"], "reached" if row["reached"] else "missed")
    yield table


def steps_of(part: str) -> int:
    """How many steps of the progress bar a part has."""
    if part == "disk":
        return 1 + ROUNDS["disk"] * len(POLICIES)
    if part == "page_cache":
        return ROUNDS["page_cache"] * (
            len(POLICIES) + (len(EXPERT_SETTINGS) if missing_peers() is None else 0)
        )
    return 2 * ROUNDS["resident"]


def measure(model: Model, parts: Sequence[str]) -> dict[str, Any]:
    """Run the parts under a progress bar."""
    functions = {"disk": part_disk, "page_cache": part_page_cache, "resident": part_resident}
    columns = TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    results: dict[str, Any] = {}
    # Refreshed by hand: a thread that draws ten times a second would show in the figures.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=sum(map(steps_of, parts)))
        done = -1

        def advance(what: str) -> None:
            nonlocal done
            done += 1
            progress.update(bar, completed=done, description=what, refresh=True)

        for part in parts:
            others = Others()
            results[part] = functions[part](model, advance)
            results[part]["cores_of_others"] = others.cores
            gc.collect()
        advance("done")
    return results


def main(arguments: Sequence[str]) -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=cache_folder() / MODEL)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    if not options.model.exists():
        console.print(f"writing a random {MODEL} to {options.model}")
        write_random_model(MODEL, options.model)
    checkpoint = open_checkpoint(options.model)
    model = Model(options.model, checkpoint, weight_layout(checkpoint.config))
    started = time.perf_counter()
    results = measure(model, options.only)
    results["summary"] = summary(results)
    for table in tables(results):
        console.print(table)
    if set(options.only) != set(PARTS):
        console.print("only a part was measured: no result is written")
        return
    peers = () if missing_peers() else ("transformers", "accelerate")
    path = write_result(
        named_for_machine("offload_disk"),
        {
            "command": "python benchmarks/offload_disk.py",
            "model": checkpoint.config.name,
            "weight_bytes": model.weight_bytes,
            "budget_bytes": model.budget,
            "batch_size": BATCH,
            "prompt_tokens": PROMPT_TOKENS,
            "rounds": ROUNDS,
            "seconds": time.perf_counter() - started,
            **results,
        },
        "torch",
        *peers,
    )
    console.print(f"written to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
