"""The code keeps its shape: plain docstrings, and seams instead of probes. `make sizes` prints sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORK = ROOT / "moesched"
FOLDERS = ("moesched", "devices", "transports", "policies")

Function = ast.FunctionDef | ast.AsyncFunctionDef

PROBES = {
    "moesched/runs/policy_errors.py": "reads local variables of a traceback's frames, which can be anything",
    "moesched/plugins.py": "resolves the attribute that an entry point names",
}
"""Files that may ask an object for attributes that its type does not promise, and the reason for each."""


@cache
def sources() -> dict[str, ast.Module]:
    """The syntax tree of every source file, by path from the root; the folders linked into moesched/ count once."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    linked = [path for path in FRAMEWORK.iterdir() if path.is_symlink()]
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in paths
        if not any(path.is_relative_to(link) for link in linked)
    }


@cache
def all_nodes() -> list[tuple[str, ast.AST]]:
    return [(path, node) for path, tree in sources().items() for node in ast.walk(tree)]


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    return ((path, node) for path, node in all_nodes() if isinstance(node, kinds))


@cache
def docstrings() -> list[tuple[str, str]]:
    """The docstring of every module, class and function, with its place."""
    documented = nodes(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (
        (f"{path}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node))
        for path, node in documented
        if isinstance(node, ast.Module | ast.ClassDef | Function)
    )
    return [(place, text) for place, text in found if text]


def listed(offenders: Iterable[str]) -> str:
    return "\n" + "\n".join(offenders)


def test_at_most_1_percent_of_docstrings_open_with_a_question_word() -> None:
    questions = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in docstrings()
        if re.match(r"(What|Who|Where|How|Which|Whether|When|Why)\b", text)
    ]
    assert len(questions) <= 0.01 * len(docstrings()), listed(questions)


def test_no_file_says_so_many_where_a_name_or_number_belongs() -> None:
    folders = [ROOT / name for name in (*FOLDERS, "docs", "tests", "benchmarks", "examples")]
    vague = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
        if (path.suffix in (".py", ".md", ".c", ".h", ".toml") or path.name == "Makefile")
        and path.is_file()
        and path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "so many" in line.lower() and re.search(r"\bso many\b", line, re.IGNORECASE)
    ]
    assert not vague, listed(sorted(set(vague)))


def test_make_names_files_of_tests_that_exist() -> None:
    [names] = re.findall(r"^SMOKE = .*test_,(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert not [name for name in names.split() if not (ROOT / "tests" / f"test_{name}").is_file()]


def test_no_object_of_another_package_is_probed_for_attributes() -> None:
    """`os` differs between systems, and `getattr` without a default reads fields by name; anything else is a seam."""
    probes = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, node in nodes(ast.Call)
        if isinstance(node, ast.Call) and path.startswith("moesched/") and path not in PROBES
        if is_probe(node)
    ]
    assert not probes, listed(probes)


def is_probe(call: ast.Call) -> bool:
    """Test whether the call asks if an attribute exists, or gets an attribute by a name written out in the code."""
    if not isinstance(call.func, ast.Name) or ast.unparse(call.args[0] if call.args else call) == "os":
        return False
    if call.func.id == "hasattr":
        return True
    return call.func.id == "getattr" and (len(call.args) > 2 or isinstance(call.args[1], ast.Constant))
