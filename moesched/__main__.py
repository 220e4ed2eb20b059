"""The entry point of `python -m moesched`, which runs the same command line as `moesched`."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line that `sys.argv` holds, and return the process's exit code."""
    import signal

    # Until the handlers are there, Ctrl-C ends this process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moesched.errors import memory_refusal
    from moesched.system.collector import rare_collections
    from moesched.system.signals import Stopped, ends_in_order, exit_code_of_signal, interruption
    from moesched.system.standard_output import abandon, reserve_stdout

    reserve_stdout()
    with ends_in_order(), rare_collections():
        try:
            from moesched.cli.main import main as command_line

            return command_line()
        except Stopped:  # while modules are imported
            try:
                sys.stderr.write(f"moesched: {interruption()}\n")
            except OSError:
                abandon(sys.stderr)
            return exit_code_of_signal()
        except (ImportError, MemoryError) as error:  # while modules are imported
            if memory_refusal(error) is None:
                raise
            sys.stderr.write("moesched: out of memory: raise the limits of this process\n")
            return 2


def leave_current_folder_out() -> None:
    """Remove the current folder from `sys.path`, so that a file there cannot replace a library of the same name."""
    try:
        here = os.getcwd()  # noqa: PTH109  # pathlib could be such a file
    except OSError:  # the folder was removed
        return
    if sys.path[0] in ("", here):
        del sys.path[0]


if __name__ == "__main__":
    leave_current_folder_out()
    sys.exit(main())
