"""The program `moesched`: its commands, and its handling of errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path

from cyclopts import App, Group

from moesched.cli import (
    calibrate,
    chat,
    check,
    cluster,
    compare,
    doctor,
    explain,
    latencies,
    machine,
    new_policy,
    plan,
    prestack,
    profile_routing,
    random_model,
    reproduce,
    roofline,
    run,
    serve,
    simulate,
    timeline,
    view,
)
from moesched.cli import list as listing
from moesched.cli import sweep as sweeping
from moesched.cli.command import add_commands, commands_with
from moesched.cli.failures import WHOLE_TRACEBACK, exit_code_of, tell
from moesched.cli.files import require_files
from moesched.cli.logs import send_logs_to_stderr
from moesched.cli.options import paragraphs
from moesched.cli.output import stdout
from moesched.errors import BadInput
from moesched.runs.forgotten_awaits import forgotten_awaits
from moesched.system.scratch import sweep
from moesched.system.standard_output import command_output

HELP = "Write, run and compare schedules of Mixture-of-Experts inference for weights that do not fit into fast memory."

EPILOGUE = paragraphs(
    "Start here:",
    """  moesched run examples/tiny-mixtral --prompt "Return a new"
  moesched serve examples/tiny-mixtral
  moesched plan --model mixtral-8x7b --machine t4
  moesched simulate --model mixtral-8x7b --machine t4 --policy cgopipe \\
      --workload mtbench
  moesched random-model mixtral-0.8b models/mixtral-0.8b
  moesched run models/mixtral-0.8b --policy cgopipe --budget host=640MB \\
      --prompt-ids "1,2,3"
  moesched new-policy my_policy""",
    "`moesched run --help` explains a command. KB, MB and GB are powers of 1000; KiB, MiB and GiB of 1024.",
    "With --traceback any command shows all frames of an error, and not only those of your policy.",
    "Results go to standard output, progress and logs to standard error. MOESCHED_LOG=info shows more logs.",
    "Exit codes: 0 done; 1 the run began and failed, or check, doctor or sweep found a failure; 2 bad input, and one "
    "line gives the remedy; 128 and the signal's number if a signal ended it, such as 130 for Ctrl-C.",
)

COMMANDS = {
    "Generate text": (run.run, serve.serve, chat.chat),
    "Predict": (
        plan.plan,
        simulate.simulate,
        sweeping.sweep,
        latencies.latencies,
        roofline.roofline,
        reproduce.reproduce,
    ),
    "Look at runs": (explain.explain, compare.compare, timeline.timeline, view.view),
    "Write a policy": (new_policy.new_policy, check.check),
    "Describe a machine": (doctor.doctor, calibrate.calibrate, machine.machine),
    "Use several machines": (cluster.launch, cluster.node, cluster.keygen),
    "Names, models and their experts": (
        listing.list_kind,
        random_model.random_model,
        prestack.prestack,
        profile_routing.profile_routing,
        profile_routing.sparsity,
    ),
}
"""Functions of all commands, by their headings in `moesched --help`."""

TRACEBACK = "--traceback"
"""Option of all commands that prints an error's whole traceback."""
SPARE_BYTES = 4 << 20
"""Bytes held in reserve; they are freed if a command fails, so that its error can be printed if memory is exhausted."""


def make_app(called: str | None = None) -> App:
    """Build the command line, a cyclopts app.

    Args:
        called: name of the only command whose options will be needed, which saves time; None for all.
    """
    app = App(
        name="moesched",
        help=HELP,
        help_epilogue=EPILOGUE,
        help_format="plaintext",
        group_commands=Group("Help", sort_key=len(COMMANDS)),
        version=lambda: version("moesched"),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    add_commands(app, COMMANDS, called)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code; errors are printed.

    Args:
        arguments: the words of the command line after the program's name; None for those of this process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    WHOLE_TRACEBACK.set(TRACEBACK in given)
    given = [each for each in given if each != TRACEBACK]
    spare = bytearray(SPARE_BYTES)
    with forgotten_awaits() as forgotten:
        try:
            prepare_process()
            if not explains_only(given):
                send_logs_to_stderr()
                sweep()
            code = carry_out(given)
            command_output().flush()
        except BaseException as error:
            del spare
            return exit_code_of(error, forgotten=forgotten, having=partial(commands_with, COMMANDS))
    for each in forgotten:
        tell(f"{each.line}: {each}")
    return code or 0


def carry_out(arguments: Sequence[str]) -> int | None:
    """Check the files that a command line names, call its command, and return the exit code."""
    app = make_app(arguments[0] if arguments else "")
    if explains_only(arguments):
        app(arguments, console=stdout(), exit_on_error=False, print_error=False)
        return 0
    command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    require_files(command, bound.arguments)
    code: int | None = command(*bound.args, **bound.kwargs)
    return code


def explains_only(arguments: Sequence[str]) -> bool:
    """Test whether only help or the version is asked for; neither needs logs or the removal of old temporary files."""
    return not arguments or not {"--help", "-h", "--version"}.isdisjoint(arguments)


def prepare_process() -> None:
    """Make standard output and standard error accept any text, and check that the process has a working directory.

    Raises:
        BadInput: standard output is closed, or the working directory was removed.
    """
    if sys.stdout is None:
        raise BadInput("standard output is closed; redirect it to a file, or to /dev/null")
    for stream in (command_output(), sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
    try:
        Path.cwd()
    except OSError as error:
        raise BadInput("the working directory was removed; change to another one") from error
