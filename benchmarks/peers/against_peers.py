"""moesched beside what people would use instead, on the same weights and prompts, in interleaved rounds.

A random mixtral-0.8b in bfloat16 is written to the cache folder once. Each peer is installed into an environment of its
own ($MOESCHED_PEERS, by default peers/ in the cache folder) and runs as a process that stays: it loads the model once
and answers requests. In every round each request is run by all of them in turn, and the order changes from round to
round. Figures are medians; a peer that fails or takes too long leaves its reason. Parts:

resident     All weights in memory, greedy tokens. A row's limit is what the machine could do at best: see
             benchmarks/shared/limits.py. A decode step's bytes are the weights that it touched, as the routing says.
first_token  From a command's start to its end with one token, the files in the page cache.
page_cache   40 % of the weights' bytes as memory for weights, the files in the page cache.
capped       The same, in a memory cgroup that holds the page cache as well and 450 MB for Python and libraries.
             A cap that the system cannot enforce, or that does not bind a peer, is reported as such.
disk         Ours alone, with as much memory, reading past the page cache: a decode step over the time in which the
             disk gives the bytes that it reads.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers import comparison, disk, first_token
from benchmarks.peers.bars import claims, tables
from benchmarks.peers.environment import Peer, peers_folder
from benchmarks.peers.memory_cap import NoCap, drop_from_page_cache, memory_cap
from benchmarks.peers.protocol import PeerFailed, Worker
from benchmarks.peers.registry import CAPPED, OURS, OURS_ON_DISK, PAGE_CACHE, RESIDENT
from benchmarks.peers.rounds import Field
from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.shared.kept_models import kept_model
from benchmarks.shared.reading import warm
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ITEM_BYTES
from moesched.models.tensors import count_weights
from moesched.system.cache import cache_folder

MODEL = "mixtral-0.8b"
MODEL_FOLDER = cache_folder() / MODEL
LIBRARY_BYTES = 450_000_000

Options = argparse.Namespace
Part = Callable[[Options], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write the JSON after each part."""
    options = BENCHMARK.parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # processes and caps end, too
    kept_model(MODEL)
    found = BENCHMARK.stored_parts()
    for part in options.only:
        progress.print(f"[bold]{part}[/bold]")
        try:
            others = found.get(part, {}).get("cases", {}) if options.cases else {}
            found[part] = PARTS[part](options) | {"rounds": options.rounds}
            if others:
                found[part]["cases"] = others | found[part]["cases"]
        except PeerFailed as reason:  # ours: without it there is nothing to compare
            found[part] = {"failed": str(reason)}
            progress.print(found[part])
        BENCHMARK.done(part)
        BENCHMARK.write(found)
        if "interrupted" in found[part]:
            sys.exit("interrupted: the rounds so far are written")


def part_resident(options: Options) -> dict[str, Any]:
    """All weights in memory."""
    with Field(named(RESIDENT, options), str(MODEL_FOLDER)) as field:
        return compared(field, comparison.RESIDENT, options)


def part_first_token(options: Options) -> dict[str, Any]:
    """Commands from start to end."""
    warm(MODEL_FOLDER)
    found = first_token.compare(MODEL_FOLDER, options.rounds)
    progress.print(found)
    return {"commands": found}


def part_page_cache(options: Options) -> dict[str, Any]:
    """Weights beyond the budget stream from the page cache."""
    warm(MODEL_FOLDER)
    budget = budget_of(MODEL_FOLDER)
    arguments = str(MODEL_FOLDER), str(budget)
    with Field(named(PAGE_CACHE, options), *arguments) as field:
        return {"budget_bytes": budget, **compared(field, comparison.STREAMED, options)}


def part_capped(options: Options) -> dict[str, Any]:
    """The system takes care that nobody uses more memory, and files must come from the disk."""
    budget = budget_of(MODEL_FOLDER)
    limit, peers = budget + LIBRARY_BYTES, named(CAPPED, options)
    with ExitStack() as closing:
        try:
            caps = {peer: closing.enter_context(memory_cap(peer, limit)) for peer in (p.name for p in peers)}
        except NoCap as reason:
            return {"failed": str(reason)}

        def start(peer: Peer, *arguments: str) -> Worker:
            drop_from_page_cache([*MODEL_FOLDER.glob("*.safetensors"), *peers_folder().glob("*/*.gguf")])
            return peer.start(*arguments, within=caps[peer.name].wrapped)

        arguments = str(MODEL_FOLDER), str(budget)
        with Field(peers, *arguments, start=start) as field:
            found = compared(field, comparison.CAPPED, options)
            found["caps"] = {name: cap.report() for name, cap in caps.items()}
        progress.print(found["caps"])
    return {"budget_bytes": budget, "cap_bytes": limit, **found}


def part_disk(options: Options) -> dict[str, Any]:
    """Our steps against the disk."""
    budget = budget_of(MODEL_FOLDER)
    with Field([OURS_ON_DISK], str(MODEL_FOLDER), str(budget)) as field:
        chosen = [case for case in disk.CASES if is_named(case.name, options.cases)]
        return {
            "budget_bytes": budget,
            "cases": disk.against_disk(field, MODEL_FOLDER, chosen, options.rounds),
        }


PARTS: dict[str, Part] = {
    "resident": part_resident,
    "first_token": part_first_token,
    "page_cache": part_page_cache,
    "capped": part_capped,
    "disk": part_disk,
}
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=PARTS,
    rounds=5,
    rounds_help="rounds of every request",
    keeps_parts=True,
    replaces=("offload_disk",),
)
BENCHMARK.parser.add_argument(
    "--peers", nargs="+", metavar="NAME", help="only peers whose name contains one of these, beside ours"
)
BENCHMARK.parser.add_argument(
    "--cases",
    nargs="+",
    metavar="TEXT",
    help='only requests whose name contains one of these, such as "batch 1,"; the results of the others stay',
)


def named(peers: Sequence[Peer], options: Options) -> list[Peer]:
    """The peers that were asked for; ours is always among them."""
    return [peer for peer in peers if peer.name == OURS.name or is_named(peer.name, options.peers)]


def is_named(name: str, wanted: Sequence[str] | None) -> bool:
    """Test whether a name contains one of the texts that are wanted; all are if none is given."""
    return wanted is None or any(text.lower() in name.lower() for text in wanted)


def budget_of(model: Path) -> int:
    """Bytes of memory for weights that do not fit."""
    config = open_checkpoint(model).config
    return int(comparison.BUDGET_SHARE * count_weights(config) * ITEM_BYTES[config.dtype])


def compared(field: Field, cases: Sequence[comparison.Case], options: Options) -> dict[str, Any]:
    """Rounds of the chosen cases, printed as they come."""
    for name, about in field.about.items():
        progress.print(f"{name}: {about}", soft_wrap=True)
    chosen = [case for case in cases if is_named(case.name, options.cases)]
    config = open_checkpoint(MODEL_FOLDER).config
    found: dict[str, Any] = {}
    result: dict[str, Any] = {"peers": field.about, "cases": found}
    try:
        for name, figures in comparison.compare(field, OURS.name, config, chosen, options.rounds):
            found[name] = {**figures, "ratios": comparison.ratios(figures, OURS.name)}
            progress.print(name, found[name]["ratios"], found[name]["failed"], soft_wrap=True)
    except KeyboardInterrupt:
        result["interrupted"] = True
    return result


if __name__ == "__main__":
    main()
