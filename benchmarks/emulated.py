"""Policies on an emulated accelerator: real runs in slow motion, beside the simulation of the same plans.

    python benchmarks/emulated.py [--policies cgopipe layer_streaming ...] [--repeats N]

The machine is like the T4 of MoE-Lightning's setting S1, SLOWED times slower in everything, so that time need be
dilated less. Its host is slower still by HOST_SLOWED: attention over the short contexts of this run then takes what
attention over contexts as many times longer takes there. The model has Mixtral's architecture, small enough for two
cores; the accelerator's memory holds GPU_SHARE of its weights. All policies run the same requests in the same
micro-batches, in turn; a policy whose plan does not fit is named with the reason. Figures are medians, in the emulated
machine's time.

It takes some minutes and writes benchmarks/results/emulated-<machine>.json.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
from _results import named_for_machine, write_result

from moesched import plugins
from moesched.errors import BadInput
from moesched.machines import Machine, Tier, load_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.other_load import OtherLoad
from moesched.outcome import Report
from moesched.plan import Plan, split_batch
from moesched.runs import plan_run, run, simulate

SLOWED = 10
HOST_SLOWED = 25
GPU_SHARE = 0.7
REQUESTS, MICRO_BATCH, NEW_TOKENS = 32, 8, 6
PROMPTS = range(16, 33)
REPEATS = 3
DTYPE = "float32"
"""Products in bfloat16 take many times longer on processors without instructions for it."""
NOT_SCHEDULES = ("adversarial",)

SHAPE = msgspec.structs.replace(
    SHAPES["mixtral-0.8b"],
    name="mixtral-small",
    layers=4,
    hidden=512,
    intermediate=1024,
    heads=8,
    kv_heads=8,
    head_dim=64,
    vocabulary=1024,
)


class Measured(NamedTuple):
    """One run of a policy, what was predicted of it, and how many cores other processes kept busy meanwhile."""

    run: Report
    prediction: Report
    other_cores: float


class Bench:
    """The model, the machine and the requests that all policies share."""

    def __init__(self, folder: Path) -> None:
        self.machine = t4_like()
        self.checkpoint: Checkpoint = open_checkpoint(
            write_random_model(SHAPE, folder / "model", dtype=DTYPE)
        )
        self.layout: WeightLayout = weight_layout(self.checkpoint.config, DTYPE)
        chance = random.Random(1)
        lengths = [chance.choice(PROMPTS) for _ in range(REQUESTS)]
        self.prompts = [[chance.randrange(SHAPE.vocabulary) for _ in range(length)] for length in lengths]

    def plan(self, name: str, device: Any) -> tuple[Plan, Any]:
        """A policy made anew, and its plan.

        Raises:
            BadInput: the plan does not fit.
        """
        weights = self.layout.globals_bytes + sum(page.nbytes for page in self.layout.pages)
        batch = split_batch([len(prompt) for prompt in self.prompts], NEW_TOKENS, MICRO_BATCH)
        policy = plugins.make_policy(name)
        budgets = {"gpu": int(GPU_SHARE * weights)}
        return plan_run(self.machine, self.layout, batch, policy, budgets, device.slot_bytes), policy

    def measure(self, name: str) -> Measured:
        """One run, and the simulation of the same plan."""
        gc.collect()
        device = plugins.find("devices", "moesched.devices.emulated_device:EmulatedDevice")(
            self.checkpoint, self.layout
        )
        plan, policy = self.plan(name, device)
        load = OtherLoad()
        report = run(plan, policy, device, self.prompts)
        other_cores = load.cores()
        plan, policy = self.plan(name, device)
        return Measured(report, simulate(plan, policy), other_cores)


def t4_like() -> Machine:
    """The shipped T4, slowed."""
    t4 = load_machine("t4")
    processors = {
        name: msgspec.structs.replace(
            each,
            flops={dtype: rate / _slowed(each.memory) for dtype, rate in each.flops.items()},
            launch_seconds=each.launch_seconds * SLOWED,
        )
        for name, each in t4.processors.items()
    }
    memories = {
        name: Tier(capacity=each.capacity, bandwidth=each.bandwidth / _slowed(name))
        for name, each in t4.memories.items()
    }
    links = [
        msgspec.structs.replace(each, bandwidth=each.bandwidth / SLOWED, latency=each.latency * SLOWED)
        for each in t4.links
    ]
    return msgspec.structs.replace(
        t4,
        name="t4-like",
        description=f"t4, {SLOWED} times slower, its host {SLOWED * HOST_SLOWED} times",
        processors=processors,
        memories=memories,
        links=links,
    )


def _slowed(memory: str) -> float:
    return SLOWED * HOST_SLOWED if memory == "host" else SLOWED


def figures(report: Report) -> dict[str, float]:
    """What is compared, in seconds of the emulated machine."""
    prefill, *decode = report.step_seconds
    return {
        "total": sum(report.step_seconds),
        "prefill": prefill,
        "decode step": fmean(decode),
        **{f"lane {name}": use.busy_seconds for name, use in report.lanes.items()},
    }


def summary(name: str, results: Sequence[Measured]) -> dict[str, Any]:
    """A policy's runs as the result file has them."""
    measured = {
        figure: median(figures(each.run)[figure] for each in results) for figure in figures(results[0].run)
    }
    predicted = figures(results[0].prediction)
    last = results[-1].run
    return {
        "policy": name,
        "plan": msgspec.to_builtins(last.plan),
        "measured": measured,
        "predicted": predicted,
        "error_percent": {
            figure: round(100 * (predicted[figure] / seconds - 1), 2)
            for figure, seconds in measured.items()
            if seconds
        },
        "totals": [figures(each.run)["total"] for each in results],
        "throughput_tokens_per_second": median(each.run.throughput_tokens_per_second for each in results),
        "other_cores": [round(each.other_cores, 2) for each in results],
        "wall_seconds": [each.run.wall_seconds for each in results],
        "emulation": [msgspec.to_builtins(each.run.emulation) for each in results],
    }


def table(result: dict[str, Any]) -> str:
    """A policy's figures side by side."""
    plan, emulation = result["plan"], result["emulation"][-1]
    lines = [
        f"{result['policy']}: {plan['kept_pages']} pages stay, {plan['streamed_pages']} stream; "
        f"dilated by {emulation['dilation']['prefill']:g} in prefill, {emulation['dilation']['decode']:g} in decode, "
        f"cores {100 * emulation['core_load']:.0f} % busy, others on {max(result['other_cores']):.1f} cores, "
        f"wall {median(result['wall_seconds']):.0f} s"
    ]
    for figure, seconds in result["measured"].items():
        predicted, error = result["predicted"][figure], result["error_percent"].get(figure, 0.0)
        lane = emulation["lanes"].get(figure.removeprefix("lane "))
        real = f"   real work {100 * lane['real_share']:4.1f} %, {lane['late']} late" if lane else ""
        lines.append(
            f"  {figure:<18} {seconds * 1e3:10.3f} ms {predicted * 1e3:10.3f} ms {error:+7.2f} %{real}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Run every policy in turn, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for name in plugins.names("policies") if name not in NOT_SCHEDULES]
    parser.add_argument("--policies", nargs="+", default=every)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args(arguments)
    results: dict[str, list[Measured]] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for _ in range(options.repeats):
            for name in options.policies:
                if name in left_out:
                    continue
                try:
                    done = bench.measure(name)
                except BadInput as error:
                    left_out[name] = str(error)
                    continue
                results.setdefault(name, []).append(done)
                print(
                    f"{name}: {figures(done.run)['total']:.4f} s in {done.run.wall_seconds:.0f} s", flush=True
                )
    summaries = [summary(name, runs) for name, runs in results.items()]
    print(f"{'':<20} {'measured':>13} {'predicted':>13} {'error':>9}")
    for each in summaries:
        print(table(each))
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")
    tokens = [each.run.tokens for runs in results.values() for each in runs]
    result = {
        "command": " ".join(["python benchmarks/emulated.py", *arguments]),
        "emulated_machine": {"name": bench.machine.name, "description": bench.machine.description},
        "model": SHAPE.name,
        "gpu_share": GPU_SHARE,
        "batch_size": REQUESTS,
        "micro_batch_size": MICRO_BATCH,
        "new_tokens": NEW_TOKENS,
        "tokens_equal": all(each == tokens[0] for each in tokens),
        "left_out": left_out,
        "policies": summaries,
    }
    print(write_result(named_for_machine("emulated"), result, "torch"))


if __name__ == "__main__":
    main(sys.argv[1:])
