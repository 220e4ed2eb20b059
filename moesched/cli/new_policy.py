"""`moesched new-policy`: writes a runnable policy to start from, with its test."""

from __future__ import annotations

import re
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.output import print_json, print_lines, say
from moesched.errors import BadInput
from moesched.options import Option
from moesched.system.plain_text import shown
from moesched.system.whole_file import whole_file

EPILOGUE = """Examples:

  moesched new-policy my_policy
  moesched new-policy ahead_of_time --dir policies"""


@command(EPILOGUE)
def new_policy(
    name: Annotated[
        str, Option("Name of the file, without .py: small letters, digits and underscores.", flag="NAME")
    ],
    *,
    directory: Annotated[
        Path, Option("Folder for the files. By default the current one.", flag="--dir")
    ] = Path(),
    json: options.Json = False,
) -> None:
    """Write a policy to start from, and its test.

    NAME is the file's name, such as my_policy; the class is then MyPolicy. The policy runs as it is: weights stream
    layer by layer. Comments explain each part.
    """
    policy, test = write_starter(name, directory)
    named = f"{policy}:{class_named(name)}"
    if json:
        print_json({"policy": named, "files": [str(policy), str(test)]})
        return
    say(f"{policy}: the policy\n{test}: its test\n\nTry it:")
    simulate = "moesched simulate --model mixtral-8x7b --machine t4 --workload mtbench"
    print_lines(
        [f"  {simulate} \\", f"      --policy {named}", f"  pytest {test}", f"  moesched check {named}"]
    )


def write_starter(name: str, directory: Path) -> tuple[Path, Path]:
    """Write a policy to start from, and its test; return both paths.

    Raises:
        BadInput: the name cannot be a module's, or one of the files exists.
    """
    if iskeyword(name) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise BadInput(
            f"{shown(name)} is no name of a module: give small letters, digits and underscores, as in mine"
        )
    policy, test = directory / f"{name}.py", directory / f"test_{name}.py"
    for path in (policy, test):
        if path.exists():
            raise BadInput(f"{path} exists: choose another name, or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    for path, starter in ((policy, "new_policy.py"), (test, "test_new_policy.txt")):
        text = (files("moesched.cli.starter") / starter).read_text(encoding="utf-8")
        text = text.replace("new_policy", name).replace("NewPolicy", class_named(name))
        with whole_file(path, "policy") as file:
            file.write(text.encode())
    return policy, test


def class_named(name: str) -> str:
    """Return the class name for the name of a module: my_policy gives MyPolicy."""
    return "".join(part.capitalize() for part in name.split("_"))
