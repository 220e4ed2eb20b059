"""Writes the tables of verbs in docs/verbs.md and docs/policies.md: `python -m moesched.steps.verbs.page docs`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from moesched.steps.step import Step
from moesched.steps.verbs.table import VERBS, picture

_HEAD = """\
# The verbs

This page is written from the table in `moesched/steps/verbs/table.py`: `python -m moesched.steps.verbs.page docs`.
[policies.md](policies.md) explains how a step uses verbs.

A policy schedules a step with verbs. Each one checks the progress of its micro-batch and submits one task. In every
layer a micro-batch takes one of these paths:
"""
_VERBS = """\
A verb that does not change the progress may be called while the micro-batch has the progress that it needs. Call
`offload_kv` before the next layer's `pre_attention`. On a machine with one memory, the verbs that copy do nothing.
"""
_DATA = """\
The engine derives the edges between tasks from these blocks. `weights` are the pages of the layer or the expert,
`outputs` are those of all experts, and `activations` exists only if the plan limits the micro-batches within a layer.
Nodes without attention, in a centralised plan, have only the marked verbs.
"""

_MOVES = """\
These verbs move weights between memories, for all micro-batches.
"""

MOVES = {
    "fetch": "a link",
    "copy_to_pinned": "a link",
    "promote": "no task",
    "cancel": "no task",
    "evict": "no task",
}
"""The verbs that move weights, and where each runs."""

TABLE = re.compile(r"(?<=<!-- verbs -->\n).*?(?=<!-- end -->)", re.DOTALL)
"""The place of the table in docs/policies.md."""

_WHEN = {
    "exactly": "",
    "until": ", or earlier in the step",
    "earlier": "",
    "unsaved": ", or later, while keys and values are not saved",
}
"""Words that follow the progress that a verb needs, by `Verb.when`."""


def page() -> str:
    """Return the whole text of docs/verbs.md."""
    verbs = [
        (
            f"`{verb.name}`",
            purpose(verb.name),
            verb.progress_name(verb.needs) + _WHEN[verb.when],
            verb.progress_name(verb.leaves),
        )
        for verb in VERBS
    ]
    data = [
        (
            f"`{verb.name}`",
            verb.lane or "no task",
            ", ".join(verb.reads),
            ", ".join(verb.writes),
            "" if verb.elsewhere is None else "yes",
        )
        for verb in VERBS
    ]
    return "\n".join(
        [
            _HEAD,
            f"```text\n{picture()}\n```\n",
            _VERBS,
            *table(("verb", "purpose", "needs", "leaves"), verbs),
            "",
            _DATA,
            *table(("verb", "lane", "reads", "writes", "without attention"), data),
            "",
            _MOVES,
            *table(("verb", "lane", "purpose"), moves()),
            "",
        ]
    )


def overview() -> str:
    """Return the Markdown table of all verbs with their lanes and purposes, for docs/policies.md."""
    verbs = [(f"`{verb.name}`", verb.lane or "no task", purpose(verb.name)) for verb in VERBS]
    return "\n".join(["", *table(("verb", "lane", "purpose"), [*verbs, *moves()]), "", ""])


def moves() -> list[tuple[str, str, str]]:
    """Return the rows of the table for the verbs that move weights: name, lane, purpose."""
    return [(f"`{name}`", lane, purpose(name)) for name, lane in MOVES.items()]


def purpose(verb: str) -> str:
    """Return the first paragraph of a verb's docstring."""
    method = next(vars(kind)[verb] for kind in Step.__mro__ if verb in vars(kind))
    return " ".join(method.__doc__.split("\n\n")[0].split())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table with this head and these rows of cells."""
    head = list(head)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def write(folder: Path) -> None:
    """Write verbs.md, and the table in policies.md, in the folder with the documentation."""
    (folder / "verbs.md").write_text(page(), encoding="utf-8")
    guide = folder / "policies.md"
    guide.write_text(TABLE.sub(lambda _: overview(), guide.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
