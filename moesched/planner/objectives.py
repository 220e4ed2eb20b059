"""The objectives of a plan: throughput, latency and interactive.

Each objective sets the figure that the planner maximises and the requests that a plan is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import get_args

from moesched.errors import BadInput
from moesched.inputs.options import Objective
from moesched.planner.trial_run import MOST_STEPS, TrialFigures
from moesched.requests.batch import Batch

STEPS_OF_ONE_REQUEST = 25
STEPS_OF_ALL_LAYERS = 9
"""Fewest steps of a trial run whose figures are shown.

In two measured steps alone, the number of chosen experts is up to 3 % from its mean.
"""


def require_objective(objective: str, new_tokens: int) -> None:
    """Check an objective and the number of tokens to generate for each request.

    Raises:
        BadInput: the objective is unknown, or is "latency" and only one token is generated, without a decode step.
    """
    if objective == "latency" and new_tokens < 2:
        raise BadInput(
            f"--for latency minimises a decode step, and --gen {new_tokens} has none: "
            "give --gen 2 or more, or --for interactive"
        )
    if objective not in get_args(Objective):
        raise BadInput(f"--for is {objective!r}: choose {', '.join(get_args(Objective))}")


def requests_for(objective: Objective, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the prompt lengths that a plan is for: all of them for throughput, else one prompt of average length."""
    return tuple(lengths) if objective == "throughput" else (round(fmean(lengths)),)


def most_steps(objective: Objective) -> int:
    """Return the most steps of a trial run: more for a single request, which chooses few experts in each step."""
    return MOST_STEPS if objective == "throughput" else STEPS_OF_ONE_REQUEST


def cheap_tasks(objective: Objective) -> int:
    """Return the largest number of tasks for which a trial run simulates all layers, instead of estimating from a few.

    The number is higher for a single request: work outside of layers then takes more of a step, so estimates are worse.
    """
    return 4_000 if objective == "throughput" else 20_000


def close(objective: Objective) -> float:
    """Return the largest ratio of two rates for which estimates from a few layers may have the wrong order."""
    return 1.12 if objective == "throughput" else 1.15


def rate(objective: Objective, trial: TrialFigures, batch: Batch) -> float:
    """Return the figure of a trial run that the objective maximises.

    The figure is tokens per second for throughput, decode steps per second for latency, and whole answers (prefill and
    all decode steps) per second for interactive.
    """
    if objective == "throughput":
        return trial.tokens_per_second(batch)
    return 1 / (trial.step_seconds if objective == "latency" else trial.seconds(batch))
