"""Writes HTML pages: of one run, and of several compared runs one below the other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from moesched.analysis.comparison import Comparison
from moesched.analysis.explanation import Explanation, explain
from moesched.analysis.explanation_tables import bottleneck_in_words, tables_of
from moesched.analysis.families import COLOURS, MEANINGS, family_of
from moesched.analysis.helps import Help
from moesched.analysis.what_if import DECISIONS_HELD
from moesched.machines.weights_home import WeightsHome
from moesched.report.columns import run_columns
from moesched.report.glossary import glossary
from moesched.report.markup import element, figures, paragraphs, table, text
from moesched.report.packing import Columns
from moesched.report.page import page
from moesched.report.roofline_drawing import roofline_section
from moesched.report.run_figures import (
    budgets_table,
    expectation_table,
    micro_batches_table,
    predictions_table,
    run_figures,
)
from moesched.system.whole_file import whole_file
from moesched.trace.chrome_writer import TitledRun, common_shifts
from moesched.trace.recording import About, Recording

_CONSTANT = re.compile(r"^(?:export )?const (\w+) = (\d+);", re.MULTILINE)


def write_run_page(
    path: Path | str,
    recording: Recording,
    about: About,
    *,
    report: Mapping[str, Any] | None = None,
    explanation: Explanation | None = None,
) -> None:
    """Write the HTML page of one run, which may have ended early.

    Args:
        report: the run's report as JSON values; None if there is none.
        explanation: the run's explanation; None to make it from the recording.

    Raises:
        BadInput: the file cannot be written; nothing is left of it.
    """
    if explanation is None and recording.slices:
        explanation = explain(recording, about)
    title = f"{about.policy or 'run'} on {about.model or 'a graph'}"
    known = report or {}
    head = [
        element("h1", text(title)),
        element("p", text(f"{about.figures} on {about.machine or 'this machine'}"), css="machine"),
        paragraphs(_endings(recording, known), css="warning"),
        figures(run_figures(recording, explanation, known)),
    ]
    tables = []
    if explanation is not None:
        head.append(_bottleneck(explanation))
        head.append(_helps(explanation.helps))
        tables += [table(name, *each) for name, each in tables_of(explanation).items()]
        if any(each.decisions_unchanged for each in explanation.what_if):
            tables.append(paragraphs([DECISIONS_HELD], css="note"))
    if known.get("no_expectation"):
        tables.append(paragraphs([f"Not compared with a prediction: {known['no_expectation']}"], css="note"))
    if known.get("weights_home"):
        tables.append(paragraphs([WeightsHome(**known["weights_home"]).words], css="note"))
    tables += [
        expectation_table(known),
        predictions_table(recording),
        roofline_section(recording, about.roofs),
        micro_batches_table(known),
        budgets_table(known),
    ]
    _write(
        Path(path),
        title,
        {"head": "".join(head), "tables": "".join(tables)},
        [TitledRun("", recording, about)],
    )


def write_comparison_page(path: Path | str, comparison: Comparison, runs: Sequence[TitledRun]) -> None:
    """Write the HTML page of a comparison, with the timelines of the runs one below the other.

    Args:
        comparison: the compared runs, with or without traces.
        runs: the recordings of the runs that have a trace.

    Raises:
        BadInput: the file cannot be written; nothing is left of it.
    """
    title = " and ".join(run.title for run in comparison.runs)
    head = [
        element("h1", text(title)),
        paragraphs(filter(None, [comparison.answer(), *comparison.reasons()]), css="reason"),
    ]
    shown = {run.title for run in runs}
    head.append(
        paragraphs(
            (
                f"{run.title} is a report without a trace: it has no timeline."
                for run in comparison.runs
                if run.title not in shown
            ),
            css="note",
        )
    )
    tables = []
    if comparison.difference is not None:
        parts = {
            "Causes of the difference": (*comparison.causes(), 5),
            "By lane": (*comparison.lane_causes(), 4),
            "Longest waits on the critical path": (*comparison.waits(), 2),
        }
        tables = [table(name, *each) for name, each in parts.items() if each[1]]
    header = comparison.header()
    tables.append(table("All figures", header, comparison.table(), len(header) - 2))
    _write(Path(path), title, {"head": "".join(head), "tables": "".join(tables)}, runs)


def _endings(recording: Recording, report: Mapping[str, Any]) -> list[str]:
    """Return sentences on why the page does not show a whole run; an empty list if it does."""
    sentences = []
    if report.get("failure"):
        sentences.append(f"The run failed: {report['failure']}")
    if report.get("interrupted"):
        sentences.append("The run was interrupted; this is what there was so far.")
    if recording.trimmed:
        sentences.append("The run was too long to record as a whole: these are its last steps.")
    return sentences


def _bottleneck(explanation: Explanation) -> str:
    if explanation.bottleneck is None:
        return ""
    said = bottleneck_in_words(explanation, explanation.bottleneck)
    return element("p", element("strong", "Bottleneck: "), text(said), css="bottleneck")


def _helps(helps: Sequence[Help]) -> str:
    """Return the HTML of the changes that would save the most time, each with its command; empty if there are none."""
    if not helps:
        return ""
    items = (
        element("li", text(f"{each.sentence}: "), element("code", text(f"moesched {each.command}")))
        for each in helps
    )
    held = [DECISIONS_HELD] if any(each.decisions_unchanged for each in helps) else []
    content = element("strong", "What would help"), element("ul", *items), paragraphs(held, css="note")
    return element("div", *content, css="helps")


def _legend(runs: Sequence[TitledRun]) -> str:
    """Return the HTML of the legend: the families of the tasks that ran, with places for their colours and hatches."""
    known = {id(each.task): each.task for run in runs for each in run.recording.slices}
    used = {family_of(task) for task in known.values()}
    items = [
        element("li", element("i", css="swatch", data_family=str(number)), text(MEANINGS[family]))
        for number, family in enumerate(COLOURS)
        if family in used
    ]
    if any(run.recording.cancelled for run in runs):
        items.append(element("li", text("× cancelled transfer")))
    return element("ul", *items, id="legend", aria_label="Colours and hatches")


def _write(path: Path, title: str, sections: Mapping[str, str], runs: Sequence[TitledRun]) -> None:
    columns = Columns()
    content = {
        "families": [{"name": name, "colour": colour} for name, colour in COLOURS.items()],
        "runs": [
            run_columns(
                columns, f"{run.title} ({run.about.figures})" if run.title else "", run.recording, shift
            )
            for run, shift in zip(runs, common_shifts(runs) if runs else [], strict=True)
        ],
    }
    drawn = any(run.recording.slices for run in runs)
    places = {
        **sections,
        "legend": _legend(runs),
        "glossary": glossary(),
        "without_timeline": "" if drawn else " hidden",
        "with_timeline": " hidden" if drawn else "",
    }
    made = page(text(title), places, reserved(runs), columns.pack(content))
    with whole_file(path, "report") as file:
        file.write(made.encode())


def reserved(runs: Sequence[TitledRun]) -> str:
    """Return the CSS rule by which the page reserves space for its timeline and curves.

    The rule sets two variables: `--lanes`, the height of the timeline, and `--curves`, the number of curves.
    """
    curves = sum(_curves(run.recording) for run in runs)
    return f":root {{ --lanes: {lanes_height(runs)}px; --curves: {curves}; }}\n"


def lanes_height(runs: Sequence[TitledRun]) -> int:
    """Return the height of all rows of the timeline, in pixels, as assets/js/rows.js lays the rows out."""
    sizes = _sizes()
    shown = [run for run in runs if run.recording.slices]
    lanes = sum(len(run.recording.lanes) for run in shown)
    tall = sizes["TALL_LANE" if lanes <= sizes["FEW_LANES"] else "LANE"]
    height = sizes["AXIS"] + sizes["BELOW"] + sizes["GAP"] * (len(shown) - 1)
    for run in shown:
        used = {each.lane for each in run.recording.slices}
        ranks = len({lane.rank for lane in run.recording.lanes})
        height += sizes["STEPS"] + sizes["PATH"]
        height += sizes["TITLE"] * bool(run.title) + sizes["RANK"] * ranks * (ranks > 1)
        height += sum(tall if lane in used else sizes["EMPTY_LANE"] for lane in run.recording.lanes)
    return height


def _curves(recording: Recording) -> int:
    memories = {(each.rank, each.memory) for each in recording.memory if each.reserved or each.pages}
    pools = {(each.rank, each.pool) for each in recording.pools if any(each.counted)}
    return (len(memories) + len(pools)) if recording.slices else 0


@cache
def _sizes() -> dict[str, int]:
    """Return the constants that assets/js/rows.js defines, by name."""
    script = resources.files("moesched.report") / "assets" / "js" / "rows.js"
    return {name: int(size) for name, size in _CONSTANT.findall(script.read_text(encoding="utf-8"))}
