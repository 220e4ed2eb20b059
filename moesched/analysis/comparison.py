"""Holds a comparison of runs, and makes its tables and sentences as the command line shows them."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import Literal

import msgspec

from moesched.analysis.compared_runs import BETWEEN_TOKENS, TO_FIRST_TOKEN, Section, Unit
from moesched.analysis.difference import Cause, Difference
from moesched.analysis.published import PUBLISHED_PREFILLS
from moesched.system.cells import html_of
from moesched.units import format_bytes, format_flops, format_number, format_seconds

MOST_WAITS = 5
"""Largest number of rows of `Comparison.waits`, each for the tasks of one kind on one lane."""

_WITHOUT_KIND = {"tasks": "other tasks", "between tasks": "between tasks", "graph": "order and spread"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of all compared runs, such as the busy time of a lane; None for runs that lack this figure.

    Attributes:
        ratios: for each run, its figure divided by that of the first run; None if one is missing, or the first is 0.
        error_percents: for each run, compared with the first run, the error of the predicted figure in percent of the
            measured one; None if both runs are predicted or both measured, if one of the figures is missing, or if
            only the measured one is 0.
    """

    section: Section
    name: str
    what: str
    unit: Unit
    values: list[float | None]
    ratios: list[float | None]
    error_percents: list[float | None]


class Title(msgspec.Struct, frozen=True, kw_only=True):
    """A compared run at the head of its column: title, policy, model and machine.

    Attributes:
        figures: whether the run is predicted or measured.
        replayed: whether the run is a replay of the durations of another run.
        costs_measured: for a prediction, whether it rests on costs that `moesched calibrate` measured.
    """

    title: str
    figures: Literal["predicted", "measured"]
    policy: str
    model: str
    machine: str
    replayed: bool = False
    costs_measured: bool = False


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of several runs, relative to the first run.

    `difference` explains the difference in time between two runs; None unless just two runs with traces are compared.
    """

    runs: list[Title]
    rows: list[Row]
    difference: Difference | None = None

    def __repr__(self) -> str:
        return f"<Comparison of {' and '.join(run.title for run in self.runs)}: {len(self.rows)} figures>"

    def _repr_html_(self) -> str:
        return html_of(self)

    def header(self) -> list[str]:
        """Return the column titles of `table`."""
        columns = ["", "", *(f"{run.title} ({run.figures})" for run in self.runs)]
        for number in range(1, len(self.runs)):
            columns += [f"{letters_of(number)}/A", *(["error"] if self._foretells(number) else [])]
        return columns

    def _foretells(self, number: int) -> bool:
        """Test whether exactly one of the first run and the run at index `number` is a prediction."""
        return self.runs[number].figures != self.runs[0].figures

    def answer(self) -> str:
        """Describe which run was the fastest, how much slower the others were, and the busiest lane of each.

        The fastest run took the least time or, if the runs generated different numbers of tokens, had the most tokens a
        second. If requests arrive over time, the text compares the medians of their times to the first token and
        between tokens.

        The text is empty if models differ, if only some runs are predicted, or if one is a replay. It is also empty if
        requests arrive over time only in some runs, or if a figure of a run is missing.
        """
        alike = len({(run.model, run.figures) for run in self.runs}) == 1
        if not alike or any(run.replayed for run in self.runs):
            return ""
        if any(self._figure("request", TO_FIRST_TOKEN, "p50")):
            return " ".join(filter(None, map(self._by_median, (TO_FIRST_TOKEN, BETWEEN_TOKENS))))
        whole, load = (self._figure("total", name, "time") for name in ("run", "load"))
        took = {
            place: seconds - (loading or 0.0)
            for place, (seconds, loading) in enumerate(zip(whole, load, strict=True))
            if seconds and seconds > (loading or 0.0)
        }
        if len(took) < len(self.runs):
            return ""
        rates = self._figure("total", "throughput", "rate")
        tokens = [rate * took[place] for place, rate in enumerate(rates) if rate]
        if len(tokens) == len(took) and max(tokens) - min(tokens) > 0.5:
            told = self._by_rate({place: rate for place, rate in enumerate(rates) if rate})
        else:
            if self.difference is not None:  # as the sentences that follow, it counts from the first task
                took = dict(zip(self.difference.places, self.difference.run_seconds, strict=True))
            told = self._by_time(took, "Least time without loading")
        return " ".join(f"{words}, {self._busiest(place)}." for place, words in told.items())

    def _by_median(self, name: str) -> str:
        """Return a sentence for each run about the median of a latency of its requests; empty unless all runs have it.

        Args:
            name: name of the latency, such as `TO_FIRST_TOKEN`.
        """
        medians = {place: time for place, time in enumerate(self._figure("request", name, "p50")) if time}
        if len(medians) < len(self.runs):
            return ""
        return " ".join(f"{words}." for words in self._by_time(medians, f"Least median time {name}").values())

    def _by_time(self, took: Mapping[int, float], best_of: str) -> dict[int, str]:
        """Describe the time of each run in words, by the run's index; the fastest run is first.

        Args:
            took: seconds of each run, by the run's index.
            best_of: words with which the description of the fastest run begins, such as "Least time without loading".
        """
        first, *others = sorted(took, key=took.__getitem__)
        best = f"{best_of}: {self._who(first)} with {format_seconds(took[first])}"
        return {first: best} | {
            each: f"{self._who(each)} took {took[each] / took[first]:.2f} times as long" for each in others
        }

    def _by_rate(self, rates: Mapping[int, float]) -> dict[int, str]:
        """Describe the tokens a second of each run in words, by the run's index; the fastest run is first.

        Args:
            rates: tokens a second of each run, by the run's index.
        """
        first, *others = sorted(rates, key=rates.__getitem__, reverse=True)
        best = f"Most tokens a second without loading: {self._who(first)} with {format_number(rates[first])}"
        return {first: best} | {
            each: f"{self._who(each)} had {rates[each] / rates[first]:.2f} times as many" for each in others
        }

    def _who(self, place: int) -> str:
        return f"{self.runs[place].policy} ({self.runs[place].title})"

    def _busiest(self, place: int) -> str:
        """Describe the busiest lane of the run at index `place`: its name, and the share of time that it is busy."""
        lanes = ((row.values[place] or 0.0, row.name) for row in self.rows if row.what == "use")
        share, lane = max(lanes, default=(0.0, "no lane"))
        return f"{lane} busy {share:.0%}"

    def _figure(self, section: Section, name: str, what: str) -> list[float | None]:
        """Return each run's figure with this section, name and quantity (`what`); None for runs without the figure."""
        key = (section, name, what)
        found = (row.values for row in self.rows if (row.section, row.name, row.what) == key)
        return next(found, [None] * len(self.runs))

    def reasons(self) -> list[str]:
        """Describe `difference` in sentences; empty if `difference` is None."""
        difference = self.difference
        if difference is None:
            return []
        first, second = (
            f"{self.runs[place].title} ({self.runs[place].figures})" for place in difference.places
        )
        took, replayed = difference.run_seconds, difference.replayed_seconds
        percent = f" ({100 * difference.seconds / took[0]:+.1f} %)" if took[0] else ""
        lines = []
        models = [self.runs[place].model for place in difference.places]
        if models[0] != models[1]:
            lines.append(f"The models differ: {first} ran {models[0]}, and {second} {models[1]}.")
        lines.append(
            f"Without loading, {second} took {format_seconds(took[1])} and {first} {format_seconds(took[0])}: "
            f"{_signed(difference.seconds)}{percent}."
        )
        titles = [self.runs[place].title for place in difference.places]
        lines += [each.sentence(*titles) for each in difference.works]
        if took[1]:
            explained = 100 * replayed[1] / took[1]
            lines.append(
                f"Graph and durations of {second} explain {format_seconds(replayed[1])} of its time ({explained:.2f} %)"
                "; the rest passed between tasks, in dispatching them and in waiting for the host."
            )
        return lines

    def causes(self) -> tuple[list[str], list[list[str]]]:
        """Return a table of the causes of the difference in time: (column titles, rows), the largest cause first."""
        difference = self.difference
        assert difference is not None, "there is a difference where there are reasons"
        titles = [self.runs[place].title for place in difference.places]
        header = [
            "",
            "lane",
            "phase",
            "tasks",
            *(f"mean, {title}" for title in titles),
            "part of the gap",
            "share",
        ]
        alike = difference.same_tasks and not difference.works
        names = _WITHOUT_KIND if alike else _WITHOUT_KIND | {"graph": "other tasks and their order"}
        return header, [_cause(cause, names) for cause in difference.causes if abs(cause.seconds) >= 5e-10]

    def lane_causes(self) -> tuple[list[str], list[list[str]]]:
        """Return a table of the seconds by which each lane makes the second run longer: (column titles, rows)."""
        difference = self.difference
        assert difference is not None, "there is a difference where there are reasons"
        titles = [self.runs[place].title for place in difference.places]
        header = ["lane", *(f"busy, {title}" for title in titles), "part of the gap", "share"]
        rows = [
            [each.lane, *map(format_seconds, each.busy_seconds), _signed(each.seconds), _percent(each.share)]
            for each in difference.lanes
        ]
        return header, rows

    def waits(self) -> tuple[list[str], list[list[str]]]:
        """Return a table of the waits on the second run's critical path: (column titles, rows), the longest first."""
        difference = self.difference
        assert difference is not None, "there is a difference where there are reasons"
        header = ["before", "on lane", "times", "waited"]
        rows = [
            [each.kind, each.lane, f"{each.times:,}", format_seconds(each.seconds)]
            for each in difference.waits[:MOST_WAITS]
        ]
        return header, rows

    def table(self) -> list[list[str]]:
        """Return `rows` as formatted cells, in order of section; `header` has the column titles."""
        lines = []
        for row in self.rows:
            cells = [row.name, row.what, *(_text(value, row.unit) for value in row.values)]
            for number in range(1, len(self.runs)):
                ratio, error = row.ratios[number], row.error_percents[number]
                cells.append("–" if ratio is None else f"{ratio:.3f}")
                if self._foretells(number):
                    cells.append("–" if error is None else f"{error:+,.1f} %")
            lines.append(cells)
            if (row.section, row.name) == ("total", "prefill"):
                lines += self._published_prefills(row, len(cells))
        return lines

    def _published_prefills(self, prefills: Row, columns: int) -> list[list[str]]:
        """Return a table row of `columns` cells: how far predicted prefill times usually are from published ones.

        The first cell has the row's name. The cell of each run whose prefill was predicted from the machine's stated
        rates has the usual error of such predictions. All other cells are empty. Without any such run there is no row.
        """
        name, usual = PUBLISHED_PREFILLS
        errors = [
            usual if _rests_on_rates(run) and seconds is not None else ""
            for run, seconds in zip(self.runs, prefills.values, strict=True)
        ]
        return [[name, "", *errors, *[""] * (columns - 2 - len(errors))]] if any(errors) else []


def letters_of(number: int) -> str:
    """Return the letters for the run at index `number`, as spreadsheets name columns: A to Z, then AA, AB, ..."""
    before, last = divmod(number, len(ascii_uppercase))
    return (letters_of(before - 1) if before else "") + ascii_uppercase[last]


def _rests_on_rates(run: Title) -> bool:
    """Test whether a run is predicted from the machine's stated rates, and not from measured costs or durations."""
    return run.figures == "predicted" and not run.replayed and not run.costs_measured


def _text(value: float | None, unit: Unit) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "tasks":
        return f"{value:,.0f}"
    if unit == "GB/s":
        return f"{format_bytes(1e9 * value)}/s"
    if unit == "GFLOP/s":
        return format_flops(1e9 * value)
    return f"{format_number(value)} {unit}"


def _cause(cause: Cause, names: Mapping[str, str]) -> list[str]:
    what = cause.kind or names[cause.what]
    means = ["–" if mean is None else format_seconds(mean) for mean in cause.means]
    tasks = f"{cause.tasks:,}" if cause.tasks else ""
    return [what, cause.lane, cause.phase, tasks, *means, _signed(cause.seconds), _percent(cause.share)]


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+z.0f} %"
