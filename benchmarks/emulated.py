"""MoE-Lightning's Tables 4 and 5 on an emulated T4: real runs in slow motion, beside the simulation of the same plans.

Every capacity, bandwidth and FLOP rate of the T4 profile is divided by one factor, by how many times Mixtral 8x7B in
16 bits has the bytes of a small random Mixtral in float32: what takes a second on the one takes about a second on the
other. (FLOP rates are divided by twice as much, as float32 does half of the FLOPs for each byte.) The hidden size is a
32nd of Mixtral's, and so are the lengths: MTBench padded to its longest prompt, 128 tokens generated, as in Table 5.

    own        each policy under the best plan that the planner finds for it
    equal      CGOPipe with the sizes of FlexGen's own plan; its own do not fit FlexGen, which needs room for KV caches
    published  FlexGen with the micro-batches of "their policy" in Table 5, and as many requests as it has or as fit

FlexGen's own search counts computing by FLOPs alone, so that small micro-batches seem to cost nothing; the planner here
knows better, which is why FlexGen has both plans. Throughput is the paper's: generated tokens over prefill and decode.

Each run takes some minutes. Figures are medians of the rounds, in the emulated machine's time. Cases that are not run
stay in the result file.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
from _options import EXECUTION, Benchmark, track

from moesched import plugins
from moesched.calibration.other_load import OtherLoad
from moesched.errors import BadInput
from moesched.machines import Machine, Tier, load_machine
from moesched.machines.staging import staged
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.planner import KV_SHARE, plan_best, splits_kv
from moesched.requests.batching import BatchSizes, batch_of
from moesched.runs.hardware import run
from moesched.runs.outcome import Report
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.steps.plan import Plan
from moesched.tasks import Task

SHORTER = 32
"""Factor by which the hidden size, the experts and the lengths are smaller than Mixtral 8x7B's and MTBench's."""
PROMPT, NEW_TOKENS = 418 // SHORTER, 1 + 128 // SHORTER
"""The prefill gives the first token: 127 decode steps are 4 of a 32nd of the length."""
PUBLISHED = BatchSizes(1112, 8)
MOST_REQUESTS = 2048
COMPARED_REQUESTS = 64
LINK = "host->gpu"

BIG = SHAPES["mixtral-8x7b"]
SHAPE = BIG.varied(
    name="mixtral-8x7b / 32",
    hidden=BIG.hidden // SHORTER,
    intermediate=BIG.routed.intermediate // SHORTER,
    heads=8,
    kv_heads=1,
    head_dim=16,
    vocabulary=BIG.vocabulary // SHORTER,
    dtype="float32",
)
"""Products in bfloat16 take many times longer on processors without instructions for it."""

BASELINES = ("flexgen", "flexgen_cpu", "layer_streaming")
CASES = (
    "own/cgopipe",
    *(f"own/{name}" for name in BASELINES),
    "equal/cgopipe",
    "published/flexgen",
)


class Measured(NamedTuple):
    """One run, what was predicted of it, what its link did, and how many cores other processes kept busy meanwhile."""

    run: Report
    prediction: Report
    link: dict[str, float]
    other_cores: float


class Bench:
    """The model, the machine and the requests that all cases share."""

    def __init__(self, folder: Path, dilation: float) -> None:
        self._dilation = dilation
        big = weight_layout(BIG, "bfloat16")
        row = SHAPE.routed.intermediate * 4
        self.layout = weight_layout(
            SHAPE, "float32", weight_layout(SHAPE).page_bytes // big.pages_per_expert + row
        )
        self.smaller = _bytes(big) / _bytes(self.layout)
        self.machine = t4_like(self.smaller)
        self.checkpoint = open_checkpoint(write_random_model(SHAPE, folder / "model", dtype="float32"))
        chance = random.Random(1)
        self.prompts = [
            [chance.randrange(SHAPE.vocabulary) for _ in range(PROMPT)] for _ in range(MOST_REQUESTS)
        ]

    def device(self) -> Any:
        """The emulated device, anew."""
        kind = plugins.find("devices", "moesched.devices.emulated.device:EmulatedDevice")
        return kind(self.checkpoint, self.layout, dilation=self._dilation)

    def best(self, policy: str) -> BatchSizes:
        """The sizes of the best plan of a policy."""
        found = plan_best(
            self.machine,
            self.layout,
            [PROMPT] * MOST_REQUESTS,
            NEW_TOKENS,
            policies=(policy,),
            slot_bytes=self.device().slot_bytes,
        )
        seen = found.seen
        return BatchSizes(seen.batch_size, seen.micro_batch_size, kv_on_gpu=seen.kv_on_gpu)

    def sizes(self, case: str) -> BatchSizes:
        """The sizes of a case."""
        part, policy = case.split("/")
        if part == "published":
            return self._most(policy, PUBLISHED)
        return self.best(policy if part == "own" else "flexgen")

    def plan(self, name: str, sizes: BatchSizes) -> tuple[Plan, Policy]:
        """A policy made anew, and its plan.

        Raises:
            BadInput: the plan does not fit.
        """
        batch = batch_of([PROMPT] * sizes.batch_size, NEW_TOKENS, sizes)
        policy = plugins.make_policy(name, {KV_SHARE: sizes.kv_on_gpu} if self._splits(name, sizes) else {})
        return plan_run(self.machine, self.layout, batch, policy, None, self.device().slot_bytes), policy

    def measure(self, name: str, sizes: BatchSizes) -> Measured:
        """One run, and the simulation of the same plan."""
        gc.collect()
        link = Link()
        plan, policy = self.plan(name, sizes)
        load = OtherLoad()
        report = run(plan, policy, self.device(), self.prompts[: sizes.batch_size], observers=[link])
        other_cores = load.cores()
        again, policy = self.plan(name, sizes)
        return Measured(report, simulate(again, policy), link.figures(plan, report), other_cores)

    def _splits(self, policy: str, sizes: BatchSizes) -> bool:
        return sizes.kv_on_gpu is not None and splits_kv(plugins.find("policies", policy), self.machine)

    def _most(self, policy: str, sizes: BatchSizes) -> BatchSizes:
        """As many micro-batches of that size as fit, up to that number of requests."""
        for count in range(sizes.micro_batches, 1, -1):
            fewer = BatchSizes(min(count * sizes.micro_batch_size, sizes.batch_size), sizes.micro_batch_size)
            try:
                self.plan(policy, fewer)
            except BadInput:
                continue
            return fewer
        return BatchSizes(sizes.micro_batch_size, sizes.micro_batch_size)


class Link:
    """The busy spans of the link to the accelerator, and its contents."""

    def __init__(self) -> None:
        self._tasks: list[tuple[int, int, float]] = []

    def ended(self, task: Task) -> None:
        """Remember a transfer of any step; loading is none."""
        if task.lane.name == LINK and task.step >= 0:
            self._tasks.append((task.start, task.end, task.work.nbytes))

    def figures(self, plan: Plan, report: Report) -> dict[str, float]:
        """Its busy share of the decode steps but the last one, which brings nothing for a next, and of all.

        Needed is what streams once for each step, and what host attention made of each token in every layer.
        """
        ends = [report.load_seconds]
        for seconds in report.step_seconds:
            ends.append(ends[-1] + seconds)
        kept = {page.id for each in plan.weights.resident for page in each.pages()}
        streamed = sum(page.nbytes for page in plan.layout.pages if page.id not in kept)
        attended = 0
        if not plan.kv.slots:
            requests = sum(len(plan.batch.micro_batches[number]) for number in plan.kv.held_by("host"))
            tokens = requests * (plan.batch.new_tokens - 1)
            attended = tokens * len(plan.layers) * plan.operations.attention_bytes
        return {
            "busy_share": self._busy(ends[1], ends[-2]),
            "busy_share_with_last_step": self._busy(ends[1], ends[-1]),
            "bytes_moved": sum(nbytes for _, _, nbytes in self._tasks),
            "bytes_needed": streamed * plan.batch.new_tokens + attended,
        }

    def _busy(self, start: float, end: float) -> float:
        spans = ((first / 1e9, last / 1e9) for first, last, _ in self._tasks)
        return sum(max(0.0, min(last, end) - max(first, start)) for first, last in spans) / (end - start)


def t4_like(smaller: float) -> Machine:
    """The shipped T4, staged, with every capacity and rate divided; launches and latencies take as long as there."""
    t4 = staged(load_machine("t4"), "16GB", ring=False)
    replace = msgspec.structs.replace
    processors = {
        name: replace(each, flops={"float32": each.flops["bfloat16"] / smaller / 2})
        for name, each in t4.processors.items()
    }
    memories = {
        name: Tier(capacity=int(each.nbytes / smaller), bandwidth=each.bandwidth / smaller)
        for name, each in t4.memories.items()
    }
    links = [replace(each, bandwidth=each.bandwidth / smaller) for each in t4.links]
    return replace(t4, name="t4-like", processors=processors, memories=memories, links=links)


def figures(report: Report) -> dict[str, float]:
    """Figures to compare, in seconds of the emulated machine."""
    prefill, *decode = report.step_seconds
    return {
        "total": sum(report.step_seconds),
        "prefill": prefill,
        "decode step": fmean(decode),
        **{f"lane {name}": use.busy_seconds for name, use in report.lanes.items()},
    }


def summary(case: str, results: Sequence[Measured]) -> dict[str, Any]:
    """A case's runs as the result file has them."""
    measured = {
        figure: median(figures(each.run)[figure] for each in results) for figure in figures(results[0].run)
    }
    predicted = figures(results[0].prediction)
    last = results[-1].run
    return {
        "case": case,
        "policy": f"{case.split('/')[1]}, {case.split('/')[0]}",
        "plan": msgspec.to_builtins(last.plan),
        "throughput_tokens_per_second": median(each.run.throughput_tokens_per_second for each in results),
        "measured": measured,
        "predicted": predicted,
        "error_percent": {
            figure: round(100 * (predicted[figure] / seconds - 1), 2)
            for figure, seconds in measured.items()
            if seconds
        },
        "link": {name: median(each.link[name] for each in results) for name in results[0].link},
        "totals": [figures(each.run)["total"] for each in results],
        "other_cores": [round(each.other_cores, 2) for each in results],
        "wall_seconds": [round(each.run.wall_seconds, 1) for each in results],
        "emulation": [msgspec.to_builtins(each.run.emulation) for each in results],
        "tokens": _tokens(results),
    }


def _tokens(results: Sequence[Measured]) -> str:
    """The first requests' tokens, of all repeats where they are not the same."""
    said = {
        ";".join(",".join(map(str, tokens)) for tokens in (each.run.tokens or [])[:COMPARED_REQUESTS])
        for each in results
    }
    return " or ".join(sorted(said))


def findings(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The ratios and shares that count, as far as the cases were run."""
    rates = {case: each["throughput_tokens_per_second"] for case, each in cases.items()}
    found: dict[str, Any] = {}
    own = [f"own/{name}" for name in ("cgopipe", *BASELINES)]
    if all(case in rates for case in own):
        found["own_plans"] = {case: rates[case] for case in own}
        found["in_the_papers_order"] = all(rates[faster] > rates[slower] for faster, slower in pairwise(own))
    for name, ours, theirs in (
        ("times_flexgen_with_equal_sizes", "equal/cgopipe", "own/flexgen"),
        ("times_flexgen_with_its_published_micro_batches", "own/cgopipe", "published/flexgen"),
        ("times_flexgen_with_the_planners_plan", "own/cgopipe", "own/flexgen"),
    ):
        if ours in rates and theirs in rates:
            found[name] = rates[ours] / rates[theirs]
    if "own/cgopipe" in cases:
        link = cases["own/cgopipe"]["link"]
        found["link_busy_share"] = link["busy_share"]
        found["bytes_moved_over_needed"] = link["bytes_moved"] / link["bytes_needed"]
    found["requests_with_equal_tokens"] = _equal_tokens([each["tokens"] for each in cases.values()])
    return found


def _equal_tokens(said: Sequence[str]) -> str:
    """Of how many of the first requests all cases made the same tokens."""
    requests = list(zip(*(each.split(";") for each in said), strict=False))
    return f"{sum(len(set(each)) == 1 for each in requests)} of {len(requests)}"


def table(result: dict[str, Any]) -> Iterator[str]:
    """A case's figures side by side."""
    plan, emulation, link = result["plan"], result["emulation"][-1], result["link"]
    yield (
        f"{result['case']} {plan['batch_size']} / {plan['micro_batch_size']}: "
        f"{result['throughput_tokens_per_second']:.2f} tokens/s; {plan['resident_pages']} pages stay, "
        f"{plan['streamed_pages']} stream; link {100 * link['busy_share']:.1f} % busy in decode; dilated by "
        f"{emulation['dilation']['prefill']:g} in prefill, {emulation['dilation']['decode']:g} in decode, cores "
        f"{100 * emulation['core_load']:.0f} % busy, others on {max(result['other_cores']):.1f} cores"
    )
    for figure, seconds in result["measured"].items():
        predicted, error = result["predicted"][figure], result["error_percent"].get(figure, 0.0)
        lane = emulation["lanes"].get(figure.removeprefix("lane "))
        real = f"   real work {100 * lane['real_share']:4.1f} %, {lane['late']} late" if lane else ""
        yield f"  {figure:<18} {seconds:10.4f} s {predicted:10.4f} s {error:+7.2f} %{real}"


def stored() -> dict[str, Any]:
    """The cases of the result file, if there is one of this shape."""
    return {each["case"]: each for each in BENCHMARK.stored().get("policies", []) if "case" in each}


def _bytes(layout: WeightLayout) -> int:
    return layout.globals_bytes + sum(page.nbytes for page in layout.pages)


def attempt(bench: Bench, case: str, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """A case's runs, or why there are none."""
    try:
        sizes = bench.sizes(case)
        results = [bench.measure(case.split("/")[1], sizes) for _ in range(repeats)]
    except BadInput as error:
        say(f"{case} is left out: {error}")
        return {"left_out": str(error)}
    found = summary(case, results)
    for line in table(found):
        say(line)
    return found


BENCHMARK = Benchmark(
    __doc__,
    "emulated",
    measures=EXECUTION,
    packages=("torch",),
    parts=CASES,
    rounds_help="runs of each case",
    keeps_parts=True,
)
BENCHMARK.parser.add_argument("--dilation", type=float, default=0.0, help="0: found by a rehearsal")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases, print the tables, write the JSON."""
    options = BENCHMARK.parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.dilation)
        for case in track(options.only, "emulating", still=True):
            write(bench, case, attempt(bench, case, options.rounds, lambda line: print(line, flush=True)))
    print(json.dumps(findings(stored()), indent=2))


def write(bench: Bench, case: str, done: dict[str, Any]) -> None:
    """Put a case's result to the others."""
    left_out = BENCHMARK.stored().get("left_out", {})
    cases = stored()
    cases.pop(case, None)
    left_out.pop(case, None)
    if "left_out" in done:
        left_out[case] = done["left_out"]
    else:
        cases[case] = done
    BENCHMARK.write(
        {
            "emulated_machine": {"profile": "t4", "divided_by": bench.smaller},
            "model": SHAPE.name,
            "prompt_tokens": PROMPT,
            "new_tokens": NEW_TOKENS,
            **findings(cases),
            "left_out": left_out,
            "policies": [cases[each] for each in CASES if each in cases],
        }
    )


if __name__ == "__main__":
    main()
