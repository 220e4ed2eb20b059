"""Print the largest files, functions and classes of the sources, for a reader who looks for what to divide.

python tools/sizes.py [ROWS]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("moesched", "devices", "transports", "policies")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Sizes = list[tuple[int, str]]


def main() -> None:
    """Print a table for each kind of size."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    trees = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in sources()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    functions = [
        (f"{path}:{node.lineno} {node.name}", node) for path, node in nodes if isinstance(node, Function)
    ]
    classes = [
        (f"{path}:{node.lineno} {node.name}", node) for path, node in nodes if isinstance(node, ast.ClassDef)
    ]
    tables: dict[str, Sizes] = {
        "lines of a file": [
            (len((ROOT / path).read_text(encoding="utf-8").splitlines()), path) for path in trees
        ],
        "lines of a function": [(lines(node), place) for place, node in functions],
        "parameters of a function": [(parameters(node), place) for place, node in functions],
        "methods of a class": [(methods(node), place) for place, node in classes],
        "attributes of a class": [(attributes(node), place) for place, node in classes],
    }
    for title, sizes in tables.items():
        print(f"\n{title}")
        for size, place in sorted(sizes, reverse=True)[:rows]:
            print(f"{size:6}  {place}")


def sources() -> Iterator[str]:
    """The source files, by path from the root; the folders linked into moesched/ count once."""
    linked = [path for path in (ROOT / "moesched").iterdir() if path.is_symlink()]
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(path.is_relative_to(link) for link in linked):
                yield path.relative_to(ROOT).as_posix()


def lines(function: Function) -> int:
    """Lines from the first to the last."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: Function) -> int:
    """Number of parameters without `self` and `cls`."""
    listed = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return len([each for each in listed if each.arg not in ("self", "cls")])


def methods(kind: ast.ClassDef) -> int:
    """Number of methods."""
    return len({node.name for node in kind.body if isinstance(node, Function)})


def attributes(kind: ast.ClassDef) -> int:
    """Number of fields that the class declares, and of attributes that its methods assign to `self`."""
    declared = {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assigned = {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return len(declared | assigned)


if __name__ == "__main__":
    main()
