"""The public names: few, documented, and free until they are used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import moesched
from moesched import dispatch
from moesched.policies.resident import Resident
from moesched.runs.simulation import simulate
from runs import make_plan


@pytest.mark.parametrize("package", [moesched, dispatch])
def test_every_public_name_is_there_and_has_a_docstring(package: Any) -> None:
    assert len(package.__all__) > 30
    for name in package.__all__:
        assert getattr(package, name).__doc__, name
        assert name in dir(package)


def test_other_names_are_refused() -> None:
    assert not hasattr(moesched, "no_such_name")
    assert not hasattr(dispatch, "no_such_name")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else_of_weight() -> None:
    heavy = {"torch", "numpy", "msgspec", "anyio", "tokenizers", "moesched.runs.planning"}
    assert not loaded_by("import moesched") & heavy


def test_importing_the_policy_kit_loads_none_of_its_pieces() -> None:
    loaded = loaded_by("import moesched.dispatch")
    assert not [name for name in loaded if name.startswith(("moesched.dispatch.", "moesched.steps", "numpy"))]


def test_the_command_line_explains_itself_without_loading_what_it_runs() -> None:
    statement = "import io, contextlib\nfrom moesched.cli.main import main\n"
    statement += "with contextlib.redirect_stdout(io.StringIO()): main(['run', '--help'])"
    assert not loaded_by(statement) & {
        "torch", "numpy", "anyio", "structlog", "tokenizers", "moesched.jobs.session",
    }  # fmt: skip


def test_help_lists_what_a_policy_reads_from_its_plan_and_step() -> None:
    seen: list[moesched.Step] = []

    class Looks(Resident):
        async def prefill(self, step: moesched.Step) -> None:
            seen.append(step)
            await super().prefill(step)

    policy = Looks()
    plan = make_plan(policy)
    simulate(plan, policy)
    for each in (plan, *seen):
        _, attributes = (inspect.getdoc(type(each)) or "").split("Attributes:")
        for name in vars(each):
            assert name.startswith("_") or re.search(rf"\b{name}\b.*:", attributes), (
                f"{type(each).__name__}.{name}"
            )


ENTRIES = [
    name
    for page in sorted((Path(__file__).parent.parent / "docs").glob("reference*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


def functions_of(found: Any) -> list[Any]:
    """A function, or the public methods of a class."""
    if inspect.isfunction(found):
        return [found]
    return [each for name, each in vars(found).items() if inspect.isfunction(each) and name[0] != "_"]


@pytest.mark.parametrize("name", ENTRIES)
def test_the_reference_shows_each_argument_in_a_row_of_its_own(name: str) -> None:
    package, _, own = name.rpartition(".")
    for each in functions_of(getattr(import_module(package), own)):
        documented = inspect.getdoc(each) or ""
        section = re.search(r"^Args:\n((?: {4}.*\n?)+)", documented, re.MULTILINE)
        listed = re.findall(r"^ {4}(\S[^:]*):", section[1], re.MULTILINE) if section else []
        assert set(listed) <= set(inspect.signature(each).parameters), each.__qualname__
        assert "][" not in re.sub("`[^`]*`", "", documented), f"{each.__qualname__}: that is a link"
