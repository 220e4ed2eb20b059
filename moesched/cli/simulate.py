"""`moesched simulate`: predicts a run on the virtual clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import Bar, print_json, say
from moesched.cli.tables import print_table
from moesched.errors import BadInput
from moesched.jobs.options import ScenarioOptions, SimulationOptions
from moesched.jobs.served_options import ArrivalsOptions
from moesched.options import flags_given, part_of
from moesched.system.plain_text import counted
from moesched.units import format_seconds

if TYPE_CHECKING:
    from moesched.jobs.report import JobReport
    from moesched.runs.service_report import Percentiles, ServiceReport

EPILOGUE = """Examples:

  moesched simulate --model mixtral-8x7b --machine t4 --policy cgopipe \\
      --workload mtbench --gen 64
  moesched simulate --model mixtral-8x7b --machine t4 --policy flexgen \\
      --workload summarization --padded --requests 500
  moesched simulate --model models/mixtral-0.8b --machine auto \\
      --policy layer_streaming --workload uniform --batch-size 16 \\
      --budget host=640MB --trace out/predicted.json
  moesched simulate --model mixtral-8x7b --machine t4 \\
      --policy expert_streaming --workload mtbench --batch-size 8 \\
      --routing zipf --routing-set locality=0.5
  moesched simulate --model mixtral-8x7b --machine t4 --policy expert_cache \\
      --workload mtbench --batch-size 1 --routing request.npy
  moesched simulate --model deepseek-v2-lite --format q4_k_m --machine l4 \\
      --policy twiddler --workload mtbench --batch-size 1
  moesched simulate --model dbrx --machine m2-ultra --nodes 4 --network 10gbe \\
      --policy ep_router_aided --workload uniform --batch-size 1
  moesched simulate --model mixtral-8x7b --machine a100-80g \\
      --policy expert_cache --workload mtbench --gen 64 \\
      --arrivals poisson:0.5 --slo ttft=10s,tpot=500ms"""


@command(EPILOGUE)
def simulate(given: SimulationOptions, arriving: ArrivalsOptions, shown: options.ReportArguments) -> int:
    """Predict, on a virtual clock, a run on any machine; needs neither weights nor a GPU.

    Simulates one full batch of the workload, or --requests N in successive batches, from loading to the last token. A
    prompts file is simulated as a whole.

    Without --policy the planner chooses the one that it predicts to be the fastest of those that fit. The report names
    it.

    With --arrivals, requests arrive over time, and join and leave between steps: the report has their times to the
    first token and per token, and can be written as JSON, but not as an HTML page.

    Malformed lines of a prompts file are reported by number and skipped; the exit code is then 2.
    """
    from moesched.cli.display import SIMULATING, SimulationBar
    from moesched.cli.results import hand_out
    from moesched.jobs.simulate_model import simulate_model

    if arriving.arrivals is not None:
        _simulate_arrivals(given, arriving, shown)
        return 0
    for flag in flags_given(arriving):
        raise BadInput(f"{flag} is for requests that arrive over time: give --arrivals as well, or omit it")
    code = 0
    if str(given.workload).endswith(".jsonl"):
        prompts, code = options.read_prompt_file(Path(str(given.workload)))
        given = replace(given, workload=prompts)

    def job() -> JobReport:
        with Bar(SIMULATING) as bar:
            asked = replace(given, html=shown.page, listener=SimulationBar(bar))
            return simulate_model(**part_of(asked, SimulationOptions))

    hand_out(job, shown, given.trace)
    return code


def _simulate_arrivals(
    given: SimulationOptions, arriving: ArrivalsOptions, shown: options.ReportArguments
) -> None:
    from moesched.cli.display import SIMULATING
    from moesched.cli.results import say_where
    from moesched.jobs.simulate_arrivals import simulate_arrivals
    from moesched.system.whole_file import write_json

    options.require_json(shown.report, "requests that arrive over time have")
    with Bar(SIMULATING) as bar:
        report = simulate_arrivals(
            **part_of(given, ScenarioOptions),
            **part_of(arriving, ArrivalsOptions),
            trace=given.trace,
            progress=bar.update,
        )
    if shown.json_report is not None:
        write_json(shown.json_report, "report", report.as_dict())
    if shown.json:
        print_json(report.as_dict())
        return
    print_service(report)
    say_where(given.trace, None)


def print_service(report: ServiceReport) -> None:
    """Print the report: model, policy, requests' times, rates, numbers of running and waiting requests, KV cache."""
    word = "measured" if report.measured else "predicted"
    capacity = report.capacity
    place = report.machine if report.nodes == 1 else f"{report.nodes} nodes of {report.machine}"
    say(f"\n{report.model} ({report.dtype}) on {place}, {report.policy}, {word}\n")
    done = report.requests - report.left
    say(f"{counted(report.requests, 'request')} in {format_seconds(report.seconds)}, {done} completed")
    say(
        f"{report.requests_per_second:.3g} requests/s, {report.tokens_per_second:,.3g} tokens/s, "
        f"{report.steps:,} steps\n"
    )
    times = {
        "to a place": report.waited,
        "to the first token": report.ttft,
        "between tokens": report.tpot,
        "between tokens, longest": report.pause,
    }
    rows = [[name, *_cells(found)] for name, found in times.items() if found is not None]
    print_table(["seconds", "p50", "p90", "p99"], rows, figures=3)
    mean, most = report.running
    waiting, longest = report.queue
    held, fullest = report.cache_held
    say(
        f"\non average {mean:.3g} requests ran at once ({most} at most, of {capacity.places * capacity.sequences}), "
        f"and {waiting:.3g} waited ({longest} at most)"
    )
    say(f"KV cache: {held:.0%} taken, {fullest:.0%} at most")
    if report.objectives is not None and report.kept is not None:
        say(f"objectives kept by {report.kept:.1%}: goodput {report.goodput:.3g} requests/s")


def _cells(found: Percentiles) -> list[str]:
    return [format_seconds(each) for each in (found.p50, found.p90, found.p99)]
