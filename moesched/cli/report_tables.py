"""Prints the figures of a run as text: rates, lanes, memories, pools, nodes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from moesched.analysis.helps import Help
from moesched.analysis.published import PUBLISHED_PREFILLS
from moesched.analysis.what_if import DECISIONS_HELD
from moesched.cli.output import in_band, planners_choice, say, say_band
from moesched.cli.tables import print_table
from moesched.jobs.report import ClusterReport, JobReport, NodeReport
from moesched.runs.outcome import ForecastUse, LaneUse, PoolUse, PreviewUse
from moesched.runs.process_bytes import ProcessBytes
from moesched.seams import Emulation
from moesched.system.plain_text import counted
from moesched.units import format_bytes, format_seconds, format_token_rate


def print_report(report: JobReport, trace: Path | str | None = None) -> None:
    """Print the figures of a run's report, measured or predicted: sizes, rates, bottleneck, lanes, memories, pools.

    Args:
        trace: path of the run's trace, for the suggested commands; None if none was written.
    """
    say(f"\n{_title(report)}")
    say(_sizes(report))
    if report.cores is not None:
        say(_cores(report.cores))
    if report.kernels:
        say(_kernels(report.kernels))
    say()
    _print_rates(report)
    if repeated := _repeated(report):
        say(repeated)
    say()
    if report.bottleneck is not None:
        say(f"bottleneck: {report.bottleneck}")
        say_helps(report.helps, trace)
        say()
    say_band(report.band, report.widest_rate, report.at_peak)
    _print_lanes(report.lanes, None if report.expected is None else report.expected.lanes)
    if report.no_expectation is not None:
        say(f"\nNot compared with a prediction: {report.no_expectation}")
    if report.weights_home is not None:
        say(f"\n{report.weights_home.words}")
    say()
    _print_memories(report)
    if any(pool.hits or pool.fetched for pool in report.pools):
        say()
        _print_pools(report.pools)
    if report.previews:
        say(f"\n{_accuracy('previews', report.previews, 'previews')}")
    for predictor, answers in groupby(report.forecasts, key=lambda each: each.predictor):
        say(f"\n{_accuracy(predictor, list(answers), 'forecasts')}")
    if report.emulation is not None:
        say()
        _print_emulation(report.emulation)
    if isinstance(report, ClusterReport):
        say()
        _print_members(report.members)


def say_helps(helps: Sequence[Help], trace: Path | str | None) -> None:
    """Print the changes that would save the most time, each with its gain and the command that simulates it.

    Args:
        trace: path of the run's trace, for the commands; with None, the commands have the word TRACE instead.
    """
    if not helps:
        return

    say("\nWhat would help")
    for each in helps:
        command = each.command if trace is None else each.command.replace("TRACE", shlex.quote(str(trace)))
        say(f"{each.sentence}:\n  moesched {command}")
    if trace is None and any("TRACE" in each.command for each in helps):
        say("TRACE is the file that --trace of this command writes.")
    if any(each.decisions_unchanged for each in helps):
        say(DECISIONS_HELD)


def _title(report: JobReport) -> str:
    """Return a line of text with the report's policy, model, dtype and machine."""
    policy = report.policy + planners_choice(report.chosen_at)
    instead = f" instead of {report.model_dtype}" if report.dtype == "float16" != report.model_dtype else ""
    return f"{policy} on {report.model} ({report.dtype}{instead}), {_measured_or_predicted(report)} on {report.place}"


def _measured_or_predicted(report: JobReport) -> str:
    return "measured" if report.measured else "predicted"


def _sizes(report: JobReport) -> str:
    """Return a line of text with the sizes of a run's batches, and with the places of weights and KV cache."""
    plan = report.plan
    sizes = f"{counted(plan.batch_size, 'request')}, micro-batches of {plan.micro_batch_size}, {_new_tokens(report)}"
    if plan.prefill_chunk is not None:
        sizes += f", prompts in chunks of {plan.prefill_chunk} tokens"
    if report.padded:
        sizes += ", padded"
    if report.batches > 1:
        sizes += f", {report.batches} batches"
    pages = f"{plan.resident_pages} resident pages, {plan.streamed_pages} streamed"
    return f"{sizes}; {pages}; {_kv_cache(plan.kv_on_gpu)}"


def _print_rates(report: JobReport) -> None:
    """Print the rates and times of a report, beside the expected ones if there are any."""
    wall = "wall" if report.emulation is None else "wall, not dilated"
    rates = _rates(report) | {wall: format_seconds(report.wall_seconds)}
    if report.expected is None:
        print_table(["", _measured_or_predicted(report)], list(rates.items()), figures=1)
        return
    beside = _rates(report.expected)
    rows = [(name, figure, beside.get(name, "")) for name, figure in rates.items()]
    print_table(["", _measured_or_predicted(report), "expected"], rows, figures=2)


def _rates(report: JobReport) -> dict[str, str]:
    """Return the rates and times of a report as text, by name."""
    decode = report.decode_tokens_per_second
    rates = {
        **({"decode": format_token_rate(decode)} if decode else {}),
        "throughput": format_token_rate(report.throughput_tokens_per_second)
        + in_band(report.band, "throughput_tokens_per_second", "{:.4g}".format),
        "load": format_seconds(report.load_seconds),
        **({"warm-up": format_seconds(report.warm_up_seconds)} if report.warm_up_seconds else {}),
        "prefill": format_seconds(report.prefill_seconds)
        + in_band(report.band, "prefill_seconds", format_seconds),
    }
    if not (report.measured or report.costs_measured):
        rates |= [PUBLISHED_PREFILLS]
    if report.first_token_seconds is not None:
        rates["first token, on average"] = format_seconds(report.first_token_seconds)
    if report.between_tokens_seconds is not None:
        rates["between tokens, average"] = format_seconds(report.between_tokens_seconds)
    if report.simulated_seconds is not None:
        rates["simulated"] = format_seconds(report.simulated_seconds)
    return rates


def _new_tokens(report: JobReport) -> str:
    """Return the number of new tokens as text: for each request or, if some requests ended early, for all together."""
    most, tokens = report.plan.new_tokens, report.tokens
    if tokens is None or all(len(each) == most for each in tokens):
        return counted(most, "new token")
    made = sum(map(len, tokens))
    return f"{made:,} new token{'' if made == 1 else 's'}, at most {most} a request"


def _repeated(report: JobReport) -> str:
    """Return a sentence on the predicted steps that repeat the last simulated one; empty if all were simulated."""
    simulated, steps = report.simulated_steps, len(report.step_seconds)
    if simulated is None or simulated >= steps:
        return ""
    return (
        f"simulated {simulated:,} of {steps:,} steps: the others repeat the last one, with longer KV caches"
    )


def _cores(cores: Mapping[str, int]) -> str:
    """Return a sentence on the use of the host's cores: for kernels, for copies of weights, and for issuing tasks.

    Args:
        cores: number of cores for "kernels", "copies" and "issuing".
    """
    kernels, copies, issuing = (cores[name] for name in ("kernels", "copies", "issuing"))
    return (
        f"threads on the host: {kernels} for attention and experts, {copies} for copies of weights; "
        f"{issuing} core{'s' * (issuing > 1)} left to issuing and waiting"
    )


def _kernels(kernels: Mapping[str, Sequence[str]]) -> str:
    """Return a line of text with the kernels that ran, each with its operations.

    Args:
        kernels: names of kernels, by operation.
    """
    operations: dict[str, list[str]] = {}
    for operation, names in kernels.items():
        for name in names:
            operations.setdefault(name, []).append(operation)
    return "kernels: " + "; ".join(f"{name}: {', '.join(each)}" for name, each in operations.items())


def _print_lanes(lanes: Mapping[str, LaneUse], expected: Mapping[str, LaneUse] | None) -> None:
    """Print the use of each lane, beside the predicted use (`expected`) if there is one."""
    columns = ["lane", "busy", "in use"]
    rows = [
        [name, format_seconds(lane.busy_seconds), f"{100 * lane.utilization:.1f} %"]
        for name, lane in lanes.items()
    ]
    if expected is not None:
        columns.insert(2, "expected")
        for row in rows:
            row.insert(2, format_seconds(expected[row[0]].busy_seconds))
    print_table(columns, rows, figures=len(columns) - 1)


def _print_memories(report: JobReport) -> None:
    """Print peak and budget of each memory and of the process, and the parts of the process's memory."""
    memories = [
        [name, format_bytes(peak), format_bytes(report.budget_bytes[name])]
        for name, peak in report.peak_bytes.items()
        if peak
    ]
    process = report.process_bytes
    if process is not None and process.measured is not None:
        limit = "" if process.limit is None else format_bytes(process.limit)
        memories.append(["process", format_bytes(process.measured), limit])
    print_table(["memory", "peak", "budget"], memories, figures=2)
    if process is not None and process.predicted is not None:
        say(f"\n{_process(process)}")


def _print_pools(pools: Sequence[PoolUse]) -> None:
    """Print the use of each pool, in pages."""
    rows = [
        [
            f"{pool.name} in {pool.memory}",
            *(f"{count:,}" for count in (pool.slots, pool.fetched, pool.hits, pool.misses, pool.wasted)),
            f"{pool.hits / (pool.hits + pool.misses):.1%}" if pool.hits + pool.misses else "",
        ]
        for pool in pools
    ]
    columns = ["pool, in pages", "slots", "fetched", "hits", "misses", "wasted", "hit rate"]
    print_table(columns, rows, figures=6)


def _accuracy(source: str, forecasts: Sequence[PreviewUse | ForecastUse], noun: str) -> str:
    """Return a sentence on the share of chosen experts that were forecast correctly, by the number of layers ahead.

    Args:
        source: words for the source of the forecasts, such as "previews".
        noun: word for forecasts in the plural.
    """
    rates = [
        f"{each.accuracy:.1%} {each.ahead} layer{'s' * (each.ahead > 1)} ahead ({each.forecasts:,} {noun})"
        for each in forecasts
    ]
    return f"chosen experts that {source} forecast: {', '.join(rates)}"


def _process(process: ProcessBytes) -> str:
    """Return the parts of the process's predicted memory as text."""
    parts = {
        "weights, KV cache and buffers": process.plan,
        "Python and libraries": process.runtime,
        "released memory that the allocator keeps": process.allocator,
        "code of kernels": process.kernels,
    }
    listed = ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in parts.items() if nbytes)
    before, predicted = "", process.predicted or 0
    if predicted > (total := sum(parts.values())):
        before = f", before the first batch; then {format_bytes(total)}"
    return f"process: {format_bytes(predicted)} predicted at peak{before}: {listed}"


def _kv_cache(on_gpu: float) -> str:
    """Return words for the place of the KV cache: accelerator, host, or both.

    Args:
        on_gpu: share of the (micro-batch, layer) pairs whose KV cache is on the accelerator, from 0 to 1.
    """
    if 0 < on_gpu < 1:
        return f"{on_gpu:.0%} of the KV cache on the accelerator, the rest on the host"
    return f"KV cache on the {'accelerator' if on_gpu else 'host'}"


def _print_members(members: Sequence[NodeReport]) -> None:
    """Print a table of a cluster's nodes: times, and whether each node stayed to the end."""
    rows = [
        [
            f"{member.rank}: {member.name}",
            format_seconds(member.load_seconds),
            ", ".join(f"{name} {format_bytes(peak)}" for name, peak in _peaks(member).items() if peak),
            "there to the end" if member.lost is None else f"lost: {member.lost}",
        ]
        for member in members
    ]
    print_table(["node", "load", "peak", ""], rows)


def _peaks(member: NodeReport) -> dict[str, int]:
    """Return the peak bytes of each of a node's memories, and of its process."""
    process = member.process_bytes
    return {**member.peak_bytes, "process": 0 if process is None else process.measured or 0}


def _print_emulation(emulation: Emulation) -> None:
    """Print a table that shows, by lane, how well emulated tasks kept to their predicted durations."""
    columns = ["emulated lane", "real work", "tasks over a third", "late", "too long by"]
    rows = [
        [
            name,
            f"{100 * lane.real_share:.1f} %",
            str(lane.overruns),
            str(lane.late),
            format_seconds(lane.excess_seconds),
        ]
        for name, lane in emulation.lanes.items()
    ]
    print_table(columns, rows, figures=4)
    say(f"\nreal work is a share of the dilated time; the cores were {100 * emulation.core_load:.0f} % busy")
