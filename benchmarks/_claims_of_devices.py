"""The claims of docs/results.md on kernels and memory of real devices."""

from __future__ import annotations

from collections.abc import Iterator

from _claim import Claim, Result, all_of, at_least, at_most, times


def attention_kernel(result: Result) -> Iterator[Claim]:
    """Native attention in decode steps."""
    rows, bars = result["rows"].values(), result["bars"]
    share, ratio = (min(each[name] for each in rows) for name in ("fraction_of_limit", "times_torch"))
    reached = share >= bars["fraction_of_limit"] and ratio >= bars["times_torch"]
    bar = f"≥ {bars['fraction_of_limit']:.2f}, ≥ {bars['times_torch']:.1f}x"
    words = (
        f"attention in decode, {len(rows)} contexts and batches: share of the limit, and over torch, least"
    )
    yield Claim(words, f"{share:.2f}, {ratio:.1f}x", bar, reached)


def expert_kernel(result: Result) -> Iterator[Claim]:
    """The CPU expert kernel, with the best instruction set."""
    bars = result["bars"]
    for part, cores in (("one_core", "one core"), ("all_cores", "all cores")):
        if part not in result:
            continue
        experts = result[part][result["instructions"]].values()
        reached = [
            each[rows]["share_of_limit"] >= least
            for each in experts
            for rows, least in bars["share_of_limit"].items()
        ]
        words = f"CPU expert kernel, {cores}: experts by rows whose share of the limit reaches its bar"
        yield all_of(words, sum(reached), len(reached))
        ratio = min(row["times_torch"] for each in experts for row in each.values())
        words = f"CPU expert kernel over torch, 1 to 16 rows, {cores}, least"
        yield at_least(words, ratio, bars["times_torch"], "{:.2f}x")
    ratio = result["decode_1"]["ratio"]
    yield at_least(
        "`mixtral-0.8b` at batch 1, kernel over torch", ratio, bars["decode_ratio_at_batch_1"], "{:.3f}x"
    )


def host_time(result: Result) -> Iterator[Claim]:
    """The host's own time between native calls."""
    row, bars = result["rows"]["batch 1"], result["bars"]
    words = "a decode step of `mixtral-0.8b`, batch 1, resident: the host's own time"
    figure, bar = row["microseconds_per_task"], bars["microseconds_per_task"]
    yield at_most(f"{words} for each task", figure, bar, "{:.1f} µs")
    yield at_most(f"{words}, share", 100 * row["share"], 100 * bars["share"], "{:.1f} %")


def leaks(result: Result) -> Iterator[Claim]:
    """Many runs in one process."""
    words = "many good and failing runs in one process: memory, devices, threads and files flat, by device"
    yield all_of(words, result["flat"], len(result["cases"]))


def offload_disk(result: Result) -> Iterator[Claim]:
    """Decoding against the disk; older results compare with other programs as well."""
    for name, bar in result["summary"].items():
        if not name.endswith("disk bandwidth)"):
            continue
        limit = str(bar["bar"]).replace("at most", "≤").replace("at least", "≥")
        yield Claim(f"disk offloading: {name}", f"{bar['value']:.3f}", limit, bar["reached"])


def mlx_evaluations(result: Result) -> Iterator[Claim]:
    """Evaluations for a token, and its time."""
    needed = result["cases"]["where needed"]
    words = "MLX, a token of a toy DBRX on two nodes: evaluations (309 before), and speed-up"
    figure = f"{needed['evaluations_per_token']:.0f}, {needed['speedup']:.2f}x"
    reached = needed["evaluations_per_token"] <= 90 and needed["speedup"] >= 1.3
    yield Claim(words, figure, "≤ 90, ≥ 1.30x", reached)


def packing(result: Result) -> Iterator[Claim]:
    """Weights in many arrays beside weights in one; without Metal no gap is expected, and nothing is claimed."""
    if result["metal"]:
        yield Claim(
            "unstacked over prestacked weights, on Metal", times(result["median_between_8_and_512_ms"])
        )


def peak_memory(result: Result) -> Iterator[Claim]:
    """Peak memory beside the system's high-water mark."""
    words = "runs whose peak memory is predicted, never below, at most 5 % and 64 MB above"
    yield all_of(words, result["holding"], len(result["runs"]))


def soak(result: Result) -> Iterator[Claim]:
    """A million tasks in one process."""
    words = f"{result['tasks']:,} tasks in real time: growth of memory, and of the time of a task"
    figures = f"{100 * result['grown']:.1f} %, {100 * result['slower']:.1f} %"
    yield Claim(words, figures, "≤ 1.0 %, ≤ 5.0 %", result["holds"])
