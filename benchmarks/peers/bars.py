"""Results of against_peers.py: the figures that have a bar, and the tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.record.claims import Claim, all_of, at_least, at_most
from benchmarks.record.tables import markdown

Result = dict[str, Any]
OURS = "moesched"
LLAMA_CPP, HUGGING_FACE, ACCELERATE = "llama.cpp", "Hugging Face", "Accelerate"
DECODE_BARS = {1: 1.0, 4: 1.2, 16: 1.4, 64: 1.4}
PREFILL_BARS = {LLAMA_CPP: {1: 1.2, 4: 1.5, 16: 2.0}, HUGGING_FACE: {1: 1.0, 4: 1.0, 16: 1.0}}
STEP_BAR = 0.8
PAGE_CACHE_BAR = 3.0
CAPPED_BARS = {ACCELERATE: 5.0, LLAMA_CPP: 1.5}
FIRST_TOKEN_BAR = 1.5
DISK_BARS = {16: 1.10, 1: 1.20}
"""Of the fastest policy's step over (bytes read / disk bandwidth), by batch."""
CAPPED = "capped"
over = partial(at_least, form="{:.2f}")
DISTURBED = 0.1


def bars(result: Result) -> Iterator[Claim]:
    """All figures that have a bar, as far as they were measured."""
    yield from _resident(_cases(result, "resident"))
    for name, case in _cases(result, "page_cache").items():
        if ratio := _ratio(case, "decode", ACCELERATE):
            yield _page_cache(name, ratio, best(case["decode"], OURS)["fraction_of_limit"])
    for name, case in _cases(result, CAPPED).items():
        for peer, bar in CAPPED_BARS.items():
            if (ratio := _ratio(case, "decode", peer)) and result[CAPPED]["caps"][peer]["binds"]:
                yield over(f"capped memory, {name}: decode over {peer}", ratio, bar)
    commands = result.get("first_token", {}).get("commands", {})
    if all("seconds" in commands.get(name, {}) for name in (OURS, LLAMA_CPP)):
        mine, theirs = (commands[name]["seconds"]["median"] for name in (OURS, LLAMA_CPP))
        words = "command to first token, beyond llama.cpp's"
        yield at_most(words, mine - theirs, FIRST_TOKEN_BAR, "{:.1f} s")


def claims(result: Result) -> Iterator[Claim]:
    """The number of bars that are reached; the page names the others."""
    reached = [bool(each.reached) for each in bars(result)]
    if reached:
        words = "bars of [beside other programs](performance.md#bars-that-are-missed) that are reached"
        yield all_of(words, sum(reached), len(reached))
    for name, policies in _cases(result, "disk").items():
        policy, row = min(policies.items(), key=lambda each: float(each[1]["step_seconds"]))
        words = f"disk offloading: {name}, {policy}: step over (bytes read / disk bandwidth)"
        yield at_most(words, row["over_disk"], DISK_BARS[_batch(name)], "{:.3f}")


def tables(result: Result) -> dict[str, str]:
    """The tables of docs/performance.md."""
    rated = {part: rates(part, result) for part in ("resident", "page_cache", CAPPED)}
    return {**rated, "missed-bars": missed(result), "peers": versions(result)}


def missed(result: Result) -> str:
    """A line for each bar that is missed."""
    lines = [[each.words, each.figure, each.bar] for each in bars(result) if not each.reached]
    return markdown(["figure", "measured", "bar"], lines)


def _page_cache(name: str, ratio: float, share: float) -> Claim:
    """The ratio to Accelerate, or the share of the limit where that alone reaches its bar."""
    if ratio < PAGE_CACHE_BAR and share >= STEP_BAR:
        return over(
            f"weights in the page cache, {name}: share of the limit of a decode step", share, STEP_BAR
        )
    return over(f"weights in the page cache, {name}: decode over {ACCELERATE}", ratio, PAGE_CACHE_BAR)


def _resident(cases: Mapping[str, Result]) -> Iterator[Claim]:
    for name, case in cases.items():
        batch = _batch(name)
        ratios = {
            peer: ratio
            for peer in case["ratios"].get("decode", {})
            if (ratio := _ratio(case, "decode", peer))
        }
        if batch == 1:
            ratios = {peer: ratio for peer, ratio in ratios.items() if peer == LLAMA_CPP}
        if batch in DECODE_BARS and ratios:
            peer = min(ratios, key=lambda peer: ratios[peer])
            yield over(f"resident, {name}: decode over {peer}", ratios[peer], DECODE_BARS[batch])
        for peer, bars_of in PREFILL_BARS.items():
            if batch in bars_of and (ratio := _ratio(case, "prefill", peer)):
                yield over(f"resident, {name}: prefill over {peer}", ratio, bars_of[batch])
        if batch == 1 and "decode" in case:
            share = best(case["decode"], OURS)["fraction_of_limit"]
            yield over(f"resident, {name}: share of the limit of a decode step", share, STEP_BAR)


def rates(part: str, result: Result) -> str:
    """A line for each request and phase: the rates of everybody's best settings, ratios, and our share of the limit."""
    cases = _cases(result, part)
    peers = list(dict.fromkeys(row["peer"] for case in cases.values() for row in _rows(case)))
    lines = []
    for name, case in cases.items():
        for phase in ("prefill", "decode"):
            if phase not in case:
                continue
            cells = [_cell(case, phase, peer) for peer in peers]
            share = best(case[phase], OURS).get("fraction_of_limit")
            limit = "" if part == CAPPED or share is None else f"{share:.0%} ({case[phase]['bound_by']})"
            lines.append([name, phase, *cells, limit])
    return markdown(["request", "tokens/s", *peers, "our share of the limit"], lines)


def versions(result: Result) -> str:
    """The versions of all peers, and why some do not run."""
    found: dict[str, str] = {}
    for part in result.values():
        if isinstance(part, dict):
            for name, about in part.get("peers", {}).items():
                listed = ", ".join(
                    f"{package} {which}" for package, which in about.get("versions", {}).items()
                )
                found[name] = listed or f"failed: {about.get('failed', '')}"
    return markdown(["", "versions"], [[name, said] for name, said in found.items()])


def best(phase: Result, peer: str) -> Result:
    """The row of a peer's fastest setting; empty if it has none."""
    rows = [row for row in phase["contestants"].values() if row["peer"] == peer]
    return max(rows, key=lambda row: float(row["tokens_per_second"]["median"]), default={})


def _batch(name: str) -> int:
    """Of a request, by its name."""
    return int(name.removeprefix("batch ").split(",")[0])


def _cases(result: Result, part: str) -> dict[str, Result]:
    found: dict[str, Result] = result.get(part, {}).get("cases", {})
    return found


def _rows(case: Result) -> Iterator[Result]:
    for phase in ("prefill", "decode"):
        yield from case.get(phase, {}).get("contestants", {}).values()


def _ratio(case: Result, phase: str, peer: str) -> float | None:
    """Ours over a peer's best setting; None where it was not measured, or never undisturbed."""
    found = case["ratios"].get(phase, {}).get(peer)
    return float(found["median"]) if found and found["undisturbed_rounds"] else None


def _cell(case: Result, phase: str, peer: str) -> str:
    row = best(case[phase], peer)
    if not row:
        reasons = [reason for name, reason in case["failed"].items() if name.startswith(peer)]
        return f"failed: {reasons[0]}" if reasons else ""
    rate = f"{row['tokens_per_second']['median']:,.1f}"
    if min(row["other_cores"]) >= DISTURBED:
        rate += f", others kept {min(row['other_cores'])} cores busy"
    ratio = case["ratios"].get(phase, {}).get(peer)
    if ratio is None:
        return rate
    return f"{rate} (ours over it {ratio['median']:.2f}, {ratio['least']:.2f} to {ratio['most']:.2f})"
