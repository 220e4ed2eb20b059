"""One layer under twiddler and twiddler_makespan: their decisions, a timeline, and a picture of both.

    python examples/layer_decision.py [--machine NAME] [--experts N] [--tokens N ...] [--out FILE.svg]

The layer is the first of Mixtral 8x7B in a simulated decode step whose router gives its experts these numbers
of tokens. docs/layer-decision.md shows the output with the defaults.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesched.analysis.pictures import drawing, require_picture, write_picture
from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.tasks import Task

LAYOUT = weight_layout(SHAPES["mixtral-8x7b"], "bfloat16")
POLICIES = ("twiddler", "twiddler_makespan")
TOKENS = (300, 190, 140, 120, 100, 90, 60, 24)
LANES = ("host", "host->gpu", "accelerator", "gpu->host")
NAMES = {"host": "CPU", "host->gpu": "link to the GPU", "accelerator": "GPU", "gpu->host": "link to the host"}
COLOURS = {"fetch": "#c0392b", "host": "#2e8b57", "accelerator": "#1f5fa8", "other": "#e08a00"}


class Fixed:
    """A routing in which every layer's experts get these numbers of tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = dict(enumerate(tokens))

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        return self.tokens


class Ended:
    """Collects the tasks of the first layer in the first decode step, from the router on."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def ended(self, task: Task) -> None:
        if (task.step, task.layer) == (1, 0) and task.verb not in ("pre_attention", "attention"):
            self.tasks.append(task)


def layer_of(name: str, machine: str, experts: int, tokens: Sequence[int]) -> tuple[Any, list[Task]]:
    """The policy, and the tasks of its layer in the order of their starts."""
    policy: Any = make_policy(name, {"experts": experts})
    plan = plan_run(load_machine(machine), LAYOUT, split_batch([4], 2, 1), policy)
    ended = Ended()
    simulate(plan, policy, routing=Fixed(tokens), observers=[ended])
    return policy, sorted(ended.tasks, key=lambda task: task.start)


def begin(tasks: Sequence[Task]) -> int:
    """The time at which the router has chosen, in nanoseconds."""
    return next(task.end for task in tasks if task.verb == "route")


def told(name: str, policy: Any, tasks: Sequence[Task]) -> list[str]:
    """Tasks with their starts and ends, in milliseconds since the router's answer."""
    start = begin(tasks)
    lines = [f"{name}: the layer ends after {(max(t.end for t in tasks) - start) / 1e6:.1f} ms"]
    for task in tasks:
        if task.verb == "route":
            continue
        rows = f" of {task.work.tokens} tokens" if task.verb == "run_expert" else ""
        stays = " (stays)" if (task.layer, task.expert) in policy.at_gpu else ""
        which = f" E{task.expert}{stays}" if task.expert >= 0 else ""
        when = f"{(task.start - start) / 1e6:6.1f} to {(task.end - start) / 1e6:6.1f} ms"
        lines.append(f"  {when}  {NAMES[task.lane.name]:<16}  {task.verb}{which}{rows}")
    return lines


def draw(layers: Sequence[tuple[str, Sequence[Task]]], path: Path) -> None:
    """One picture with a row of lanes for each policy."""
    from matplotlib.figure import Figure

    require_picture(path)
    with drawing():
        figure = Figure(figsize=(10.5, 2.3 * len(layers)), layout="constrained")
        for axes, (name, tasks) in zip(figure.subplots(len(layers), 1, sharex=True), layers, strict=True):
            start = begin(tasks)
            for task in tasks:
                if task.verb == "route":
                    continue
                at, long = (task.start - start) / 1e6, (task.end - task.start) / 1e6
                kind = task.verb if task.verb == "fetch" else task.lane.name
                colour = COLOURS[kind if task.expert >= 0 else "other"]
                place = LANES.index(task.lane.name)
                axes.broken_barh([(at, long)], (place - 0.4, 0.8), color=colour, edgecolor="white")
                if task.expert >= 0:
                    axes.text(
                        at + long / 2, place, f"E{task.expert}", ha="center", va="center", color="white"
                    )
            axes.axvline((max(task.end for task in tasks) - start) / 1e6, color="#333333", linestyle=":")
            axes.set_yticks(range(len(LANES)), [NAMES[lane] for lane in LANES])
            axes.invert_yaxis()
            axes.set_title(name, fontsize=10)
        axes.set_xlabel("milliseconds from the router's answer on")
        write_picture(figure, path)


def main(arguments: Sequence[str]) -> None:
    """Print the layer under both policies, and draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="rtx6000")
    parser.add_argument("--experts", type=int, default=56)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    plan_machine = load_machine(options.machine)
    layers = []
    for name in POLICIES:
        policy, tasks = layer_of(name, options.machine, options.experts, options.tokens)
        layers.append((name, tasks))
        if name == POLICIES[0]:
            latencies: ExpertLatencies = policy.latencies
            print(f"{plan_machine.name}: moving an expert takes {1e3 * latencies.transfer:.1f} ms")
            for expert, tokens in enumerate(options.tokens):
                here, there = latencies.at_accelerator(tokens), latencies.at_host(tokens)
                print(f"  E{expert} of {tokens} tokens: GPU {1e3 * here:.1f} ms, CPU {1e3 * there:.1f} ms")
        print("\n".join(["", *told(name, policy, tasks)]))
    if options.out is not None:
        draw(layers, options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
