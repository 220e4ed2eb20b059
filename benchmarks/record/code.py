"""The code that figures depend on: the modules imported while they were measured, and the data and C files beside them.

Comments, docstrings and blank lines do not count, nor do functions of a benchmark that only present its figures.
"""

from __future__ import annotations

import ast
import atexit
import hashlib
import io
import os
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkstemp

from benchmarks.record.claims import Result
from benchmarks.record.results import ROOT

Files = dict[str, str]
"""Names of files by folder, each name after a blank."""

IMPORTS = "MOESCHED_IMPORTS"
"""Environment variable: the file to which `children/sitecustomize.py` adds the names of imported modules."""
DATA = {".c", ".css", ".csv", ".h", ".html", ".js", ".toml"}
PRESENTING = {"claims", "tables"}
NOT_MEASURED = ("benchmarks/__init__.py", "benchmarks/record/", "benchmarks/pages/")
ONLY_NAMED = ("benchmarks/", "tests/")
"""Folders of which a data file counts only where a module has its name."""


class Imports:
    """Notes the modules that processes import which are started from now on."""

    def __init__(self) -> None:
        handle, name = mkstemp(prefix="moesched-imports-")
        os.close(handle)
        self._file = Path(name)
        atexit.register(self._file.unlink, missing_ok=True)
        os.environ[IMPORTS] = name
        path = [str(Path(__file__).parent / "children"), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))

    def by_children(self) -> set[str]:
        """The names of modules so far."""
        return {*self._file.read_text().split()}


def imported(by_children: Iterable[str] = (), also: Iterable[str] = ()) -> Files:
    """The files of this tree that this process has imported, or others by name, what lies beside them, and others."""
    own = {str(module.__file__) for module in [*sys.modules.values()] if getattr(module, "__file__", None)}
    here = [Path(file) for file in own if file.startswith(str(ROOT)) and "site-packages" not in file]
    modules = {file.resolve() for file in [*here, *_of_names(by_children)] if file.suffix == ".py"}
    counted = {file for file in modules if not _path(file).startswith(NOT_MEASURED)}
    folders = {file.parent for file in counted}
    scripts = "".join(file.read_text() for file in counted if _path(file).startswith(ONLY_NAMED))
    beside = {data for folder in folders for data in _data_of(folder)}
    kept = {data for data in beside if not _path(data).startswith(ONLY_NAMED) or data.name in scripts}
    return by_folder([*map(_path, counted | kept), *also])


def by_folder(paths: Iterable[str]) -> Files:
    """Paths from the root of the tree by their folder."""
    folders: dict[str, list[str]] = {}
    for path in sorted(set(paths)):
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    return {folder: " ".join(names) for folder, names in sorted(folders.items())}


def hash_of(files: Files, root: Path = ROOT) -> str:
    """A hash of what files mean; of those that are missing, of that."""
    digest = hashlib.sha256()
    for folder, names in files.items():
        for name in names.split():
            digest.update(f"{folder}/{name}\0{_meaning(root / folder / name)}\0".encode())
    return digest.hexdigest()[:16]


def changed_since(files: Files, seconds: float) -> bool:
    """Test whether a file was written after a time of the system's clock."""
    paths = (ROOT / folder / name for folder, names in files.items() for name in names.split())
    return any(path.stat().st_mtime > seconds for path in paths if path.exists())


def older_than_the_code(result: Result) -> bool:
    """Test whether the sources of a result, or of a part, changed since it was measured, or were not recorded."""
    sources = result.get("sources", {})
    codes = [each.get("code") for each in result.get("parts", {"": result}).values()]
    return any(code not in sources or hash_of(sources[code]) != code for code in codes)


def _of_names(names: Iterable[str]) -> Iterator[Path]:
    for name in set(names):
        place = ROOT.joinpath(*name.split("."))
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def _data_of(folder: Path) -> Iterator[Path]:
    """Data and C files in a folder of modules, and in its folders that have no modules."""
    for path in folder.iterdir():
        if path.is_dir() and not any(path.glob("*.py")):
            yield from (each for each in path.rglob("*") if each.suffix in DATA)
        elif path.suffix in DATA:
            yield path


def _path(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _meaning(file: Path) -> str:
    """The text of a file without what changes no figure."""
    if not file.is_file():
        return "missing"
    return _meaning_of(file.read_text(), file.suffix, presents="benchmarks" in file.parts)


@cache
def _meaning_of(text: str, suffix: str, *, presents: bool) -> str:
    if suffix == ".py":
        return _python(text, presents=presents)
    if suffix == ".toml":
        return repr(tomllib.loads(text))
    if suffix in {".c", ".h"}:
        return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL).split())
    return text


def _python(text: str, *, presents: bool) -> str:
    """Lines of code; as text, so that it is the same in all versions of Python."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if "#" in text else ():
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            _blank(lines, node)
        if presents and isinstance(node, ast.FunctionDef) and node.name in PRESENTING:
            _blank(lines, node)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _blank(lines: list[str], node: ast.stmt) -> None:
    assert node.end_lineno is not None
    lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
