"""Signals end a program in order: once, with its temporary files removed, and at once if they come again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from moesched.system.signals import ctrl_c_interrupts
from patience import PATIENCE_SECONDS

PROGRAM = """
import sys, time
from pathlib import Path
from moesched.system.scratch import scratch_folder
from moesched.system.signals import Stopped, ends_in_order, exit_code_of_signal, signals_held, stopped_by

def ready():
    print("ready", flush=True)

def wait():
    ready()
    time.sleep(60)

{functions}
with ends_in_order():
    try:
        main()
    except Stopped:
        print("stopped", flush=True)
        code = exit_code_of_signal()
    else:
        code = 0
sys.exit(code)
"""


@contextmanager
def started(functions: str, folder: Path, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A program that has said that it is ready."""
    script = folder / "program.py"
    script.write_text(PROGRAM.format(functions=functions))
    command = [*before, sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    ) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "ready\n", it.communicate()
        try:
            yield it
        finally:
            it.kill()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, complained = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, said, complained


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_program_through_its_finally_blocks(tmp_path: Path, number: signal.Signals) -> None:
    with started("def main():\n  with scratch_folder(Path('.')): wait()", tmp_path) as program:
        program.send_signal(number)
        assert end_of(program) == (128 + number, "stopped\n", "")
    assert [each.name for each in tmp_path.iterdir()] == ["program.py"]


def test_a_signal_that_is_ignored_from_the_start_stays_ignored(tmp_path: Path) -> None:
    ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    with started("def main(): wait()", tmp_path, ignoring) as program:
        program.send_signal(signal.SIGHUP)
        program.send_signal(signal.SIGTERM)
        assert end_of(program)[0] == 128 + signal.SIGTERM


STUBBORN = """
def main():
    with scratch_folder(Path('.')):
        try:
            wait()
        finally:
            time.sleep({pause})
            wait()
"""


def test_a_second_signal_ends_the_program_at_once_without_temporary_files(tmp_path: Path) -> None:
    with started(STUBBORN.format(pause=0.6), tmp_path) as program:
        program.send_signal(signal.SIGTERM)
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGINT)
        assert end_of(program) == (128 + signal.SIGTERM, "", "")
    assert [each.name for each in tmp_path.iterdir()] == ["program.py"]


def test_signals_that_come_together_count_as_one(tmp_path: Path) -> None:
    with started("def main():\n  try: wait()\n  finally: time.sleep(0.2)", tmp_path) as program:
        stopped, goes_on = signal.SIGSTOP, signal.SIGCONT
        for number in (stopped, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, goes_on):
            program.send_signal(number)
        code, said, _ = end_of(program)
    assert said == "stopped\n"
    assert code in (128 + signal.SIGHUP, 128 + signal.SIGTERM)


HELD = """
def main():
    with signals_held():
        ready()
        while first_signal() is None: time.sleep(0.01)
        print("finished")
    print("not reached")
from moesched.system.signals import first_signal
"""


IMPORTS = """
def main():
    Path("half.py").write_text('''
import time
from moesched.system.signals import first_signal
print("ready", flush=True)
while first_signal() is None: time.sleep(0.01)
time.sleep(0.2)
whole = True
''')
    try:
        import half
        time.sleep(60)
    finally:  # no other signal comes here
        print(sys.modules["half"].whole)
sys.path.insert(0, ".")
"""


LOADED = """
import sys
from moesched.system.signals import Stopped

class Finder:
    def find_spec(self, name, *others):
        if name == "moesched.cli.main":
            raise Stopped

sys.meta_path.insert(0, Finder())
from moesched.__main__ import main
sys.exit(main())
"""


def test_a_command_that_a_signal_ends_while_it_is_loaded_says_so() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "moesched: interrupted\n")


FINALIZER = """
class Finalized:
    def __del__(self):
        wait()

def main():
    Finalized()
    time.sleep(60)
"""


OWN_WAY = """
def main():
    asked = []
    with stopped_by(lambda: asked.append(True)):
        ready()
        while not asked: time.sleep(0.01)
    print("in its own way")
"""


PROGRAMS = {
    "a held signal waits for the end": (HELD, signal.SIGINT, (130, "finished\nstopped\n", "")),
    "a module is loaded whole before": (IMPORTS, signal.SIGINT, (130, "True\nstopped\n", "")),
    "what Python ignores in a finalizer is delivered again": (
        FINALIZER,
        signal.SIGTERM,
        (143, "stopped\n", ""),
    ),
    "a part may stop in its own way": (OWN_WAY, signal.SIGTERM, (0, "in its own way\n", "")),
}
"""A program, the signal that it is sent, and its end."""


@pytest.mark.parametrize("what", PROGRAMS)
def test_of_signals(tmp_path: Path, what: str) -> None:
    functions, number, end = PROGRAMS[what]
    with started(functions, tmp_path) as program:
        program.send_signal(number)
        assert end_of(program) == end


def test_ctrl_c_interrupts_each_time_and_then_does_what_it_did_before() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with ctrl_c_interrupts():
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT]
