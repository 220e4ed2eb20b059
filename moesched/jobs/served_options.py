"""Options of jobs with continuous batching, whose requests arrive over time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from moesched.errors import BadInput
from moesched.inputs.options import SIZES, CutPromptsOptions, DeviceOptions, WeightsOptions
from moesched.jobs.options import OUTPUT, BestPolicyOptions, CostOptions, PlannedOptions
from moesched.options import Option, Options
from moesched.plugins import find
from moesched.serving.admission import ADMISSIONS, Admission
from moesched.system.near_names import with_nearest

USERS = 16
"""Default for the largest number of requests that run together."""
REQUESTS = 100
"""Default number of requests that arrive at random."""
SERVING = "Requests that arrive over time"
"""Heading of options in the help."""


class AdmissionOptions(Options):
    """Option `admission`: the rule for the order in which waiting requests begin to run."""

    admission: Annotated[
        str,
        Option(
            "Who runs next: first-come; shortest-prompt, which lowers the mean time to a first token; fair, where "
            "users take turns; or a rule of yours, as file.py:Class.",
            "RULE",
            group=SERVING,
        ),
    ] = "first-come"

    def admission_rule(self) -> Admission:
        """Make the admission rule that `admission` names.

        Raises:
            BadInput: there is no rule of this name, or it cannot be made.
        """
        if self.admission in ADMISSIONS:
            return ADMISSIONS[self.admission]()
        if ":" not in self.admission:
            names = f"give one of {', '.join(ADMISSIONS)}, or file.py:Class"
            remedy = with_nearest(self.admission, ADMISSIONS, names)
            raise BadInput(f"there is no admission {self.admission!r}: {remedy}")
        rule = find("admissions", self.admission)
        try:
            return rule()
        except Exception as error:  # a rule from elsewhere may raise anything
            raise BadInput(
                f"rule of admission {self.admission} cannot be made without arguments: {type(error).__name__}: {error}"
            ) from error


class ContextOptions(Options):
    """Option `context`: the largest number of tokens of a request, prompt and answer together."""

    context: Annotated[
        int | None,
        Option(
            "Tokens of a prompt and its answer together, at most. By default as many as the longest request of a "
            "simulation has; of a server 4,096, or the model's context.",
            "N",
            group=SIZES,
            ge=32,
            le=16_000_000,
        ),
    ] = None


class ArrivalsOptions(AdmissionOptions, ContextOptions):
    """Options of a prediction whose requests arrive over time."""

    arrivals: Annotated[
        str | Path | None,
        Option(
            "Requests that arrive over time: poisson:RATE, in requests a second, or a file with one "
            '{"at": SECONDS, "prompt_tokens": N, "new_tokens": N} per line. --batch-size is then the most that run '
            f"together ({USERS} by default), and --requests their number ({REQUESTS} by default).",
            "poisson:RATE|FILE",
            group=SERVING,
        ),
    ] = None
    slo: Annotated[
        str | None,
        Option(
            "Times that requests are to keep: to the first token (ttft), and between two tokens (tpot), such as "
            "ttft=2s,tpot=200ms. The report says how many did.",
            "TIMES",
            group=SERVING,
        ),
    ] = None


class ServedTraceOptions(Options):
    """Option for a server's trace."""

    trace: Annotated[
        Path | str | None,
        Option(
            "Write a trace of the last steps for ui.perfetto.dev when the server ends: about 200,000 tasks, and the "
            "requests as spans; gzipped when the name ends in .gz.",
            "OUT",
            group=OUTPUT,
            writes="trace",
        ),
    ] = None


class ServedOptions(
    BestPolicyOptions,
    ServedTraceOptions,
    AdmissionOptions,
    ContextOptions,
    CutPromptsOptions,
    CostOptions,
    DeviceOptions,
    PlannedOptions,
    WeightsOptions,
):
    """Options of a model that serves requests."""

    batch_size: Annotated[
        int | None,
        Option("Requests that run together, at most.", "N", group=SIZES, ge=1, le=65_536),
    ] = USERS
