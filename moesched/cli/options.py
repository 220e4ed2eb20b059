"""Options that several commands share, such as for reports; the options of jobs are in `moesched/jobs/options.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moesched.cli.failures import BAD_INPUT, tell
from moesched.errors import BadInput
from moesched.jobs.options import OUTPUT
from moesched.options import Option, Options
from moesched.system.outputs import is_html

if TYPE_CHECKING:
    from moesched.inputs.prompts import Prompt

Json = Annotated[bool, Option("Print only one JSON object on standard output.", group=OUTPUT)]
Picture = Annotated[
    Path | None,
    Option("Draw a picture; the file's name ends in .png or .svg.", "OUT", group=OUTPUT, writes="picture"),
]
ReportFile = Annotated[
    Path | None,
    Option(
        "Write the report to a file: a page with the timeline if its name ends in .html, otherwise JSON.",
        "OUT",
        group=OUTPUT,
        writes="report",
    ),
]


class ReportArguments(Options):
    """Options for a job's report: its file, and JSON on standard output."""

    report: ReportFile = None
    json: Json = False

    @property
    def page(self) -> Path | None:
        """File of the report if that is an HTML page; None otherwise."""
        return self.report if is_html(self.report) else None

    @property
    def json_report(self) -> Path | None:
        """File of the report if that is JSON; None otherwise."""
        return None if self.page else self.report


def require_json(report: Path | None, what: str) -> None:
    """Check that a report's path does not ask for an HTML page, for commands that write none.

    Args:
        report: path of the report; None if none is written.
        what: subject and verb of the error message, such as "a reproduction has".

    Raises:
        BadInput: the path ends in .html.
    """
    if is_html(report):
        raise BadInput(f"--report {report}: {what} no page to look at: end its name in .json")


def paragraphs(*texts: str) -> str:
    """Join paragraphs into one help text, with an empty line between two. It is wrapped when the help is printed."""
    return "\n\n".join(texts)


def read_prompt_file(file: Path) -> tuple[list[Prompt], int]:
    """Read a prompts file; return its prompts, and the exit code: 2 if malformed lines were skipped, else 0.

    Raises:
        BadInput: the file has no prompt.
    """
    from moesched.inputs.prompts import read_prompts

    reported: list[str] = []
    prompts = read_prompts(file, reported.append)
    for line in reported:
        tell(line)
    return prompts, BAD_INPUT if reported else 0
