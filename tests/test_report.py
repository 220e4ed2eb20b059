"""Reports to look at: their data, their text, the commands that write them, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from commands import SIMULATE, refused
from moesched.analysis.compare import compare_runs, read_runs
from moesched.analysis.families import family_of
from moesched.errors import BadInput
from moesched.report import write_comparison_page, write_run_page
from moesched.report.page import MODULES
from moesched.report.roofline_drawing import kernel_points
from moesched.seams import Demand
from moesched.steps.pool_counts import Counted
from moesched.trace import About, Recorder, Recording, TitledRun, critical_path, read_trace, write_trace
from moesched.trace.recording import Roof
from moesched.units import format_seconds
from moesched.work import Work
from report_pages import PageElements, data_of
from runs import FORTY_PERCENT, Run, realtime_run, virtual_run
from traces import largest_file, ranks_that_meet

ABOUT = About(driver="virtual", policy="by hand")
HOSTILE = "</script><script>alert(1)</script><b title=\"'{{data}}\x1b"


@pytest.fixture(scope="module")
def run() -> Run:
    """A run with misses, transfers in two hops, and experts."""
    return virtual_run("cgopipe", budgets=FORTY_PERCENT)


def page_of(recording: Recording, about: About, folder: Path, **more: Any) -> str:
    write_run_page(folder / "report.html", recording, about, **more)
    return (folder / "report.html").read_text(encoding="utf-8")


RECORDINGS: dict[str, Callable[[], Recording]] = {
    "several memories and pools": lambda: virtual_run("cgopipe", budgets=FORTY_PERCENT).recording,
    "choices and cancelled transfers": lambda: with_cancelled(),
    "measured": lambda: realtime_run("layer_streaming", budgets=FORTY_PERCENT).recording,
    "several ranks": lambda: ranks_that_meet(10, 90),
}


def with_cancelled() -> Recording:
    """A run whose policy cancels transfers."""
    run = virtual_run("prefetch_gate", budgets=FORTY_PERCENT, requests=1, micro_batch_size=1)
    assert run.recording.cancelled
    return run.recording


@pytest.mark.parametrize("case", RECORDINGS)
def test_a_page_holds_every_slice_edge_and_sample(case: str, tmp_path: Path) -> None:
    recording = RECORDINGS[case]()
    [found] = data_of(page_of(recording, ABOUT, tmp_path))["runs"]
    slices, tasks = found["slices"], found["tasks"]
    for index, each in enumerate(recording.slices):
        task = slices["task"][index]
        assert recording.lanes[slices["lane"][index]] == each.lane
        assert (slices["id"][index], slices["step"][index]) == (each.id, each.step)
        assert (slices["start"][index], slices["duration"][index]) == (each.start, each.end - each.start)
        assert found["lines"][slices["line"][index]] == each.line
        assert found["states"][slices["state"][index]] == each.state
        assert tasks["label"][task] == each.task.label
        assert (tasks["bytes"][task], tasks["flops"][task]) == (each.task.nbytes, each.task.flops)
        assert (tasks["layer"][task], tasks["expert"][task]) == (each.task.layer, each.task.expert)
        assert (tasks["rows"][task], tasks["page_names"][task]) == (each.task.rows, each.task.page_names)
        chosen = dict(
            part.split(": ") for part in filter(None, found["choices"][slices["choice"][index]].split(", "))
        )
        assert chosen == {f"E{expert}": str(rows) for expert, rows in (each.experts or {}).items()}
    cancelled = found["cancelled"]
    assert [
        (time, recording.lanes[lane], tasks["label"][task])
        for time, lane, task in zip(cancelled["time"], cancelled["lane"], cancelled["task"], strict=True)
    ] == [(each.time, each.lane, each.task.label) for each in recording.cancelled]
    assert edges_of(found) == [list(producers) for producers in recording.producers]
    used = {(each.rank, each.memory) for each in recording.memory if each.reserved}
    assert samples_of(found["memory"], "reserved", "pages") == sorted(
        (each.rank, each.memory, each.time, each.reserved, each.pages)
        for each in recording.memory
        if (each.rank, each.memory) in used
    )
    assert samples_of(found["pools"], "hits", "misses", "wasted") == sorted(
        (each.rank, each.pool, each.time, each.counted.hits, each.counted.misses, each.counted.wasted)
        for each in recording.pools
    )


def edges_of(found: Any) -> list[list[int]]:
    """The producers of each slice."""
    back = iter(found["edges"]["back"])
    return [[index - next(back) for _ in range(count)] for index, count in enumerate(found["edges"]["count"])]


def samples_of(curves: Any, *names: str) -> list[tuple[Any, ...]]:
    """All samples of memories or of pools."""
    return sorted(
        (curve["rank"], curve["name"], *values)
        for curve in curves
        for values in zip(curve["time"], *(curve[name] for name in names), strict=True)
    )


def test_waits_lead_back_along_the_critical_path(run: Run, tmp_path: Path) -> None:
    [found] = data_of(page_of(run.recording, run.about, tmp_path))["runs"]
    slices = run.recording.slices
    index = max(range(len(slices)), key=lambda each: (slices[each].end, each))
    path = []
    while index >= 0:
        path.append(slices[index])
        index = found["waits"]["before"][index]
    assert path[::-1] == [hop.slice for hop in critical_path(run.recording)]


def test_colours_are_those_of_the_families(run: Run, tmp_path: Path) -> None:
    data = data_of(page_of(run.recording, run.about, tmp_path))
    [found] = data["runs"]
    for task, each in zip(found["slices"]["task"], run.recording.slices, strict=True):
        assert data["families"][found["tasks"]["family"][task]]["name"] == family_of(each.task)


def test_a_page_is_html_that_loads_nothing(run: Run, tmp_path: Path) -> None:
    page = page_of(run.recording, run.about, tmp_path)
    elements = PageElements(page)
    assert elements.open == []
    names = {name for name, _ in elements.elements}
    assert not names & {"img", "iframe", "object", "embed", "base", "form", "audio", "video"}
    assert [each["href"] for each in elements.find("link")] == ["data:,"]
    addresses = ("src", "srcset", "href", "action", "style")
    given = [each for name, each in elements.elements if name != "link"]
    assert not [each for each in given if any(key in addresses or key.startswith("on") for key in each)]
    [style] = elements.texts["style"]
    assert "@import" not in style
    assert "url(" not in style
    scripts = "".join(elements.texts["script"])
    assert "sourceMappingURL" not in page
    for words in ("fetch(", "XMLHttpRequest", "WebSocket", "importScripts", "import(", "sendBeacon"):
        assert words not in scripts
    assert "HTML" not in elements.texts["script"][-1], "our own scripts make no markup of texts"


def test_only_the_pages_own_scripts_and_style_are_allowed(run: Run, tmp_path: Path) -> None:
    elements = PageElements(page_of(run.recording, run.about, tmp_path))
    [policy] = [each["content"] for each in elements.find("meta") if "http-equiv" in each]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    _, library, script = elements.texts["script"]
    for text in (library, script, *elements.texts["style"]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_a_page_keeps_room_for_the_curves_that_it_draws(run: Run, tmp_path: Path) -> None:
    first = run.recording.pools[0]
    unused = first._replace(pool="unused", counted=Counted(0, 0, 0, 0, 0))
    text = page_of(replace(run.recording, pools=[*run.recording.pools, unused]), ABOUT, tmp_path)
    [found] = data_of(text)["runs"]
    assert f"--curves: {len(found['memory']) + len(found['pools'])};" in text


def test_hostile_names_stay_text(run: Run, tmp_path: Path) -> None:
    recording = Recording(run.recording.lanes, [], run.recording.producers, run.recording.memory)
    for each in run.recording.slices:
        task = replace(each.task, label=HOSTILE, verb=HOSTILE)
        recording.slices.append(replace(each, task=task, line=HOSTILE))
    about = About(driver="virtual", policy=HOSTILE, model=HOSTILE, machine=HOSTILE)
    plain = PageElements(page_of(run.recording, run.about, tmp_path))
    page = page_of(recording, about, tmp_path, report={"failure": HOSTILE})
    elements = PageElements(page)
    assert len(elements.find("script")) == len(plain.find("script"))
    assert not elements.find("b")
    assert "\x1b" not in page
    [heading] = elements.texts["h1"]
    assert heading.startswith("</script><script>alert(1)</script><b title=\"'{{data}}")
    [found] = data_of(page)["runs"]
    assert set(found["tasks"]["label"]) == set(found["tasks"]["verbs"]) == {HOSTILE}


def test_equal_runs_give_equal_pages(tmp_path: Path) -> None:
    one, other = (virtual_run("expert_cache", budgets=FORTY_PERCENT) for _ in range(2))
    assert page_of(one.recording, one.about, tmp_path) == page_of(other.recording, other.about, tmp_path)


def test_a_page_tells_the_bottleneck_before_all_tables(run: Run, tmp_path: Path) -> None:
    elements = PageElements(page_of(run.recording, run.about, tmp_path))
    assert "Bottleneck: " in elements.texts["strong"]
    titles = elements.texts["h2"]
    assert titles[:2] == ["Lanes", "Critical path"]
    assert "Roofline" in titles


def test_kernels_lie_at_their_flops_per_byte_and_under_their_roof(tmp_path: Path) -> None:
    run = virtual_run("layer_streaming", budgets=FORTY_PERCENT)
    roofs = {"gpu": Roof(flops=65e12, bandwidth=320e9)}
    points = kernel_points(run.recording, roofs)
    slices = [
        each
        for each in run.recording.slices
        if (each.task.verb, each.task.resource) == ("post_attention", "gpu") and each.step == 0
    ]
    [point] = [each for each in points if (each.verb, each.phase) == ("post_attention", "prefill")]
    flops, nbytes = (sum(getattr(each.task, name) for each in slices) for name in ("flops", "nbytes"))
    assert point.tasks == len(slices)
    assert point.intensity == pytest.approx(flops / nbytes)
    assert point.rate == pytest.approx(flops / sum(each.end - each.start for each in slices) * 1e9)
    assert point.attainable == pytest.approx(min(65e12, 320e9 * point.intensity))
    assert all(each.rate <= 1.001 * each.attainable for each in points if each.attainable)


def test_traces_carry_the_roofs(run: Run, tmp_path: Path) -> None:
    roofs = {"gpu": Roof(flops=65e12, bandwidth=320e9)}
    write_trace(tmp_path / "trace.json", run.recording, replace(run.about, roofs=roofs))
    assert read_trace(tmp_path / "trace.json").about.roofs == roofs


def test_predicted_times_stand_beside_measured_ones(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.cost = ThreeMicroseconds()
    run = realtime_run("resident", recorder)
    assert set(run.recording.predictions.values()) == {3e-6}
    write_trace(tmp_path / "trace.json", run.recording, run.about)
    texts = PageElements(page_of(*read_trace(tmp_path / "trace.json"), tmp_path)).texts
    assert "Measured beside expected, by kind of task" in texts["h2"]
    steps = [each for each in run.recording.slices if each.task.verb == "attention"]
    assert format_seconds(3e-6 * len(steps)) in texts["td"]
    assert (
        "Measured beside expected, by kind of task"
        not in PageElements(page_of(virtual_run("resident").recording, ABOUT, tmp_path)).texts["h2"]
    )


class ThreeMicroseconds:
    """A machine on which everything but loading takes 3 µs."""

    def work(self, work: Work) -> Demand:
        if "->" in work.resource:
            raise BadInput("no cost")
        return Demand(3e-6, ())


def test_a_run_without_tasks_has_a_page_that_says_why(tmp_path: Path) -> None:
    page = page_of(Recorder().recording(), ABOUT, tmp_path, report={"failure": "no weights"})
    assert "The run failed: no weights" in PageElements(page).texts["p"]
    assert data_of(page)["runs"][0]["slices"]["start"] == []


def test_a_number_that_no_run_has_is_refused(run: Run, tmp_path: Path) -> None:
    wrong = Recording(run.recording.lanes, [replace(run.recording.slices[0], step=1 << 40)], [()], [])
    with pytest.raises(BadInput, match="the trace has a number 1099511627776, which no run has"):
        page_of(wrong, ABOUT, tmp_path)


def test_runs_that_are_compared_stand_one_below_the_other(run: Run, tmp_path: Path) -> None:
    other = virtual_run("flexgen", budgets=FORTY_PERCENT)
    for name, each in {"a.json": run, "b.json": other}.items():
        write_trace(tmp_path / name, each.recording, each.about)
    sides = read_runs([tmp_path / "a.json", tmp_path / "b.json"])
    shown = [TitledRun(side.title, *side.trace) for side in sides if side.trace]
    write_comparison_page(tmp_path / "both.html", compare_runs(sides), shown)
    page = (tmp_path / "both.html").read_text()
    found = data_of(page)["runs"]
    assert [each["title"] for each in found] == ["a.json (predicted)", "b.json (predicted)"]
    begun = [
        next(step["start"] for step in each["steps"] if step["step"] == 1) + each["shift"] for each in found
    ]
    assert begun[0] == begun[1], "decoding starts at the same time"
    assert "All figures" in PageElements(page).texts["h2"]


# ---------------------------------------------------------------- commands


def test_every_command_writes_a_page_or_json(command: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    job = (*SIMULATE, "--policy", "cgopipe", "--batch-size", 2, "--gen", 2)
    said = command(*job, "--report", tmp_path / "simulate.html", "--trace", trace)
    assert f"report: {tmp_path / 'simulate.html'}" in said.out
    command(*job, "--report", tmp_path / "simulate.json")
    for name, given in {"explain": [trace], "compare": [trace, tmp_path / "simulate.json"]}.items():
        for suffix in ("html", "json"):
            assert command(name, *given, "--report", tmp_path / f"{name}.{suffix}").code == 0
    for name in ("simulate", "explain", "compare"):
        page = (tmp_path / f"{name}.html").read_text()
        [run] = data_of(page)["runs"]
        assert len(run["slices"]["start"]) == len(read_trace(trace).recording.slices)
        assert json.loads((tmp_path / f"{name}.json").read_text())
    for name, cell in (("simulate", "dt"), ("compare", "td")):
        texts = PageElements((tmp_path / f"{name}.html").read_text()).texts
        assert "prefill, usual error" in texts[cell], "the error stands where a predicted prefill does"
    assert "simulate.json is a report without a trace" in (tmp_path / "compare.html").read_text()
    words = PageElements((tmp_path / "explain.html").read_text()).texts["text"]
    assert any(each.startswith("gpu: ") for each in words), "the roofs come with the trace"


def test_each_batch_of_a_run_has_its_page(command: Any, no_text: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    said = command(
        "run", no_text, "--policy", "resident", "--prompt-ids", "1,2;3,4", "--batch-size", 1, "--max-new-tokens", 2,
        "--report", page, "--json",
    )  # fmt: skip
    assert said.json["tokens"]
    for name in ("report.html", "report.batch2.html"):
        texts = PageElements((tmp_path / name).read_text()).texts
        assert any(text.startswith("measured on ") for text in texts["p"])
        assert "Measured beside expected, by kind of task" not in texts["h2"], (
            "this machine is not calibrated"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.batch2.html", "report.html"]


def test_a_run_that_fails_has_a_page_with_the_reason(command: Any, no_text: Path, tmp_path: Path) -> None:
    policy = tmp_path / "late.py"
    policy.write_text(
        "from moesched.policies.resident import Resident\n\n\n"
        "class Late(Resident):\n"
        "    async def decode(self, step):\n"
        "        raise ValueError('too late')\n"
    )
    said = command(
        "run", no_text, "--prompt-ids", "1,2", "--policy", f"{policy}:Late", "--report", tmp_path / "late.html"
    )  # fmt: skip
    assert said.code == 1
    page = (tmp_path / "late.html").read_text()
    assert "too late" in "".join(PageElements(page).texts["p"])
    assert data_of(page)["runs"][0]["slices"]["start"]


def test_a_page_replaces_no_input_and_no_other_output(command: Any, tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.html", tmp_path / "page.html"
    job = (*SIMULATE, "--policy", "cgopipe", "--batch-size", 2, "--gen", 2)
    command(*job, "--trace", trace.with_suffix(".json"))
    trace.with_suffix(".json").rename(trace)
    before = trace.read_bytes()
    for arguments in (("explain", trace), ("compare", trace, trace)):
        refused(command(*arguments, "--report", trace), "trace.html, which this command reads")
    refused(command(*job, "--trace", page, "--report", page), "a trace is JSON: end its name in .json")
    assert trace.read_bytes() == before
    assert not page.exists()


def test_a_disk_that_fills_leaves_the_page_that_was_there(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("before")
    with largest_file(4096), pytest.raises(BadInput, match=r"cannot write report .*File too large"):
        write_run_page(page, run.recording, run.about)
    assert page.read_text() == "before"
    assert list(tmp_path.iterdir()) == [page]


# ---------------------------------------------------------------- scripts


def test_scripts_import_only_those_before_them_and_give_no_name_twice() -> None:
    folder = resources.files("moesched.report") / "assets" / "js"
    assert sorted(each.name for each in folder.iterdir()) == sorted(f"{name}.js" for name in MODULES)
    names: list[str] = []
    for number, module in enumerate(MODULES):
        text = (folder / f"{module}.js").read_text()
        imported = re.findall(r'^import \{[^}]*\} from "\./([a-z]+)\.js";$', text, re.MULTILINE)
        assert len(imported) == len(re.findall(r"^import ", text, re.MULTILINE))
        assert set(imported) <= set(MODULES[:number]), module
        names += re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.MULTILINE)
    assert sorted(names) == sorted(set(names))
