"""The command `moesched`: its commands, and what happens to errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

from cyclopts import App

from moesched.cli import (
    calibrate,
    cluster,
    compare,
    latencies,
    plan,
    prestack,
    profile_routing,
    random_model,
    reproduce,
    roofline,
    run,
    simulate,
)
from moesched.cli import list as listing
from moesched.cli.failures import exit_code_of
from moesched.cli.logs import send_logs_to_stderr
from moesched.cli.options import paragraphs

HELP = "Write, run and compare schedules of Mixture-of-Experts inference when the weights do not fit fast memory."

EPILOGUE = paragraphs(
    "Start here:",
    """  moesched random-model mixtral-0.8b models/mixtral-0.8b
  moesched run models/mixtral-0.8b --policy cgopipe --budget host=640MB \\
      --prompt-ids "1,2,3"
  moesched run models/mixtral-0.8b --local 2 --policy ep_router_aided \\
      --prompt-ids "1,2,3"
  moesched simulate --model mixtral-8x7b --machine t4 --policy cgopipe \\
      --workload mtbench""",
    "Each command explains itself: moesched run --help. KB, MB and GB are powers of 1000, KiB, MiB and GiB of 1024.",
    "Results go to standard output, progress and logs to standard error; MOESCHED_LOG=info shows more of them.",
    "Exit codes: 0 done, 2 bad input (one line says what and what to do), 130 interrupted, 1 anything else.",
)


def make_app() -> App:
    """The command line, in the order in which one needs its commands."""
    app = App(
        name="moesched",
        help=HELP,
        help_epilogue=EPILOGUE,
        help_format="plaintext",
        version=lambda: version("moesched"),
        result_action="return_value",
    )
    for command in (
        run,
        simulate,
        plan,
        random_model,
        prestack,
        listing,
        compare,
        calibrate,
        roofline,
        latencies,
        reproduce,
        profile_routing,
        cluster,
    ):
        command.add_to(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not explains_only(given):
            send_logs_to_stderr()
        code = make_app()(given, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except BaseException as error:
        code = exit_code_of(error)
    return code or 0


def explains_only(arguments: Sequence[str]) -> bool:
    """Whether nothing is run, so that nothing will be logged: loading the logs takes as long as all the rest."""
    return not arguments or not {"--help", "-h", "--version"}.isdisjoint(arguments)
