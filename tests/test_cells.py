"""Values as notebooks show them: one short line as text, and HTML with figures, the bottleneck and a timeline."""

from __future__ import annotations

from html.parser import HTMLParser
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

import moesched
from moesched.analysis.comparison import Comparison
from moesched.analysis.timeline import Window, timeline_of
from moesched.planner import Proposal, plan_model
from moesched.plugins import make_policy
from moesched.report.timeline_drawing import timeline_drawing
from moesched.steps.plan import Plan
from moesched.trace import About, Recording
from moesched.trace.chrome_reader import Trace
from runs import FORTY_PERCENT, make_plan, virtual_run


class Values(NamedTuple):
    """One of each kind, of small runs."""

    report: moesched.JobReport
    trace: Trace
    recording: Recording
    comparison: Comparison
    proposal: Proposal
    plan: Plan


class Page(HTMLParser):
    """The text and the elements of HTML; every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Values:
    folder = tmp_path_factory.mktemp("traces")
    traces = [folder / "a.json", folder / "b.json"]
    report, _ = (
        moesched.simulate_model(
            "mixtral-0.8b", machine="t4", policy=policy, workload=[[1]] * 2, gen=2, trace=trace
        )
        for policy, trace in zip(("cgopipe", "expert_streaming"), traces, strict=True)
    )
    trace = moesched.read_trace(traces[0])
    return Values(
        report=report,
        trace=trace,
        recording=trace.recording,
        comparison=moesched.compare_runs(traces),
        proposal=plan_model("mixtral-0.8b", machine="t4", gen=2, policy="resident", objective="latency"),
        plan=make_plan(make_policy("cgopipe"), budgets=FORTY_PERCENT),
    )


def test_every_value_is_a_short_line_as_text(values: Values) -> None:
    for name, value in values._asdict().items():
        assert repr(value).startswith("<"), name
        assert len(repr(value)) < 200, name
        assert "\n" not in repr(value), name


def test_the_line_of_a_report_has_its_rate_and_what_the_figures_are(values: Values) -> None:
    assert f"{values.report.throughput_tokens_per_second:,.1f} tokens/s" in repr(values.report)
    assert "cgopipe on mixtral-0.8b, predicted on t4" in repr(values.report)


def test_a_report_shows_its_figures_and_its_busiest_lane(values: Values) -> None:
    report = replace(values.report, trace=None)
    page = Page(report._repr_html_())
    busiest = max(report.lanes, key=lambda name: report.lanes[name].busy_seconds)
    assert f"{report.decode_tokens_per_second:,.1f} tokens/s" in page.text
    assert f"Busiest lane: {busiest}, " in page.text
    assert "measured" not in page.text


def test_a_report_with_a_trace_shows_its_bottleneck_and_a_timeline(values: Values) -> None:
    page = Page(values.report._repr_html_())
    assert "Bottleneck: " in page.text
    assert "svg" in page.elements


def test_a_report_whose_trace_is_gone_shows_its_figures(values: Values) -> None:
    gone = replace(values.report, trace="gone.json")
    assert "Busiest lane: " in Page(gone._repr_html_()).text


def test_a_trace_shows_its_bottleneck_and_a_timeline_of_all_lanes_that_ran(values: Values) -> None:
    page = Page(values.trace._repr_html_())
    assert "Bottleneck: " in page.text
    assert "svg" in page.elements
    for lane in {each.lane.name for each in values.trace.recording.slices if each.step == 1}:
        assert lane in page.text


def test_a_trace_without_tasks_says_so(values: Values) -> None:
    nothing = Trace(Recording([], [], [], []), values.trace.about)
    assert "No task ran." in Page(nothing._repr_html_()).text


def test_a_plan_shows_its_memories_and_pools(values: Values) -> None:
    page = Page(values.plan._repr_html_())
    for memory in values.plan.memories:
        assert memory in page.text
    for pool in values.plan.weights.pools:
        assert pool.name in page.text


def test_a_proposal_shows_its_ranking(values: Values) -> None:
    assert "resident" in Page(values.proposal._repr_html_()).text


def test_a_comparison_shows_its_reasons(values: Values) -> None:
    page = Page(values.comparison._repr_html_())
    assert values.comparison.reasons()[0] in page.text


def test_a_long_timeline_stays_small() -> None:
    recording = virtual_run("cgopipe", requests=64).recording
    whole = timeline_of(recording, Window(0, recording.end))
    assert len(recording.slices) > 2_000
    assert len(timeline_drawing(whole)) < 100_000


def test_names_cannot_add_elements(values: Values) -> None:
    about = About(driver="virtual", policy="<script>alert(1)</script>")
    page = Page(Trace(values.trace.recording, about)._repr_html_())
    assert "script" not in page.elements
    assert "<script>" in page.text


def test_the_version_is_that_of_the_package() -> None:
    assert moesched.__version__ == version("moesched")
