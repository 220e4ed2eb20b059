"""A reader of the documentation: writes its files, runs its code, types its commands, compares what they print."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import zmq

import moesched
from commands import ONLY_FIGURES
from doc_blocks import Block, agrees, commands
from moesched import plugins
from moesched.cli.main import main, make_app
from moesched.cluster.cluster_file import parse_cluster
from moesched.steps.verbs.table import picture

ROOT = Path(__file__).parent.parent
GROUPS = [f"moesched.{kind}" for kind in get_args(plugins.Kind)]
"""Groups of entry points."""
TARGETS = re.findall(r"^([\w-]+):.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
ORDINARY = {".", "cd", "curl", "echo", "git", "lm_eval", "ln", "mkdir", "openssl", "pip", "pytest"}
"""Programs whose arguments are left to the reader."""


class Reader:
    """Does what a page says, in the current folder."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self._names: dict[str, Any] = {"__name__": "page"}

    def follow(self, block: Block) -> None:
        """Write the file, or run it, or type the commands and compare what they print."""
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, block.where, "exec"), self._names)
        elif block.language == "toml":
            read_toml(block)
        elif block.language == "text":
            assert block.text == picture() + "\n", f"{block.where}: which command prints this?"
        else:
            assert block.language == "console", f"{block.where}: what is this {block.language!r}?"
            assert commands(block), f"{block.where}: which command?"
            for command, shown in commands(block):
                if self._has_figures(command, shown):
                    continue
                printed = self._typed(command)
                assert agrees(shown, printed), (
                    f"{block.where}: {shlex.join(command)} prints:\n{printed}\nand the page shows:\n{shown}"
                )

    def _has_figures(self, command: list[str], shown: str) -> bool:
        """Test whether a simulation prints what a page shows that leaves out its band or its help, which take long."""
        if "simulate" not in command or "…" not in shown.splitlines():
            return False
        return any(
            agrees(narrow(shown), narrow(self._typed([*command, *spared])))
            for spared in (ONLY_FIGURES, ONLY_FIGURES[1:])
            if not set(spared) & set(command)
        )

    def _typed(self, command: list[str]) -> str:
        self._capture.readouterr()
        program, *arguments = command
        program = Path(program).name
        if program == "moesched":
            failed = main(arguments) != 0
            printed = "".join(self._capture.readouterr())
            assert failed == ("moesched: " in printed), printed
            return printed
        if program == "python":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", arguments)
                runpy.run_path(arguments[0], run_name="__main__")
            return self._capture.readouterr().out
        assert program == "pytest", f"nobody types {program}"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout


def narrow(table: str) -> str:
    """A table with the least space between its columns: bands make them wider."""
    return re.sub(" {2,}", "  ", table)


def read_toml(block: Block) -> None:
    """Read a block that is a cluster file, or a part of a pyproject.toml with entry points."""
    if "[[hosts]]" in block.text:
        with_keys = re.sub(r'"\.\.\."', lambda _: f'"{zmq.curve_keypair()[0].decode()}"', block.text)
        parse_cluster(with_keys.encode(), block.where)
        return
    [(group, members)] = tomllib.loads(block.text)["project"]["entry-points"].items()
    assert group in GROUPS, f"{block.where}: {group}"
    assert all(re.fullmatch(r"[\w.]+:\w+", named) for named in members.values()), block.where


def read_only(block: Block) -> None:
    """Check what can be checked of a block that the tests do not run: that its commands and functions exist."""
    if block.language == "python":
        for call in ast.walk(ast.parse(block.text)):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("moesched."):
                called = getattr(moesched, ast.unparse(call.func).removeprefix("moesched."))
                keywords = {each.arg for each in call.keywords}
                assert keywords <= inspect.signature(called).parameters.keys(), block.where
        return
    assert block.language in ("console", "text"), f"{block.where}: what is this {block.language!r}?"
    assert bool(commands(block)) == (block.language == "console"), f"{block.where}: which command?"
    for command, _ in commands(block):
        check_command(command, block.where)


@cache
def options() -> dict[str, set[str]]:
    """The options of each command of ours, by its name."""
    app = make_app()
    commands = [name for name in app if not name.startswith("-")]
    return {
        name: {
            "--help",
            *(option for each in app[name].assemble_argument_collection() for option in each.names),
        }
        for name in commands
    }


def unknown_in_sentences(page: Path) -> list[str]:
    """The commands of ours within a page's sentences that do not exist, or have options that do not."""
    sentences = re.sub(
        r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    unknown = []
    for name, arguments in re.findall(r"`moesched ([a-z][a-z-]*)([^`]*)`", sentences):
        given = {word for word in arguments.split() if word.startswith("--")}
        if name not in options() or not given <= options()[name]:
            unknown.append(f"moesched {name}{arguments}")
    return unknown


def check_command(command: list[str], where: str) -> None:
    """A command of ours has the arguments that the page gives it; a script and a target exist."""
    programs = [Path(word).name or word for word in command]
    if "moesched" in programs:
        arguments = command[programs.index("moesched") + 1 :]
        make_app().parse_args(arguments, exit_on_error=False, print_error=False)
    elif programs[0] == "python":
        script = f"{command[2].replace('.', '/')}.py" if command[1] == "-m" else command[1]
        assert (ROOT / script).is_file(), f"{where}: {script}"
    elif programs[0] == "make":
        targets = [word for word in command[1:] if "=" not in word]
        assert all(word in TARGETS or word.startswith(".venv/") for word in targets), f"{where}: {targets}"
    else:
        assert programs[0] in ORDINARY, f"{where}: nobody types {programs[0]}"
