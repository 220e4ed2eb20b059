"""Counts of pools: pages fetched, hits, misses and fetches in vain; in reports and as counters of traces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from engine_script import WORK
from moesched import simulate_model
from moesched.cli.main import main
from moesched.dispatch import LeastStale
from moesched.drivers.capture import NotFixed
from moesched.jobs.report import merge_reports
from moesched.plugins import make_policy
from moesched.runs.outcome import PoolUse
from moesched.runs.simulation import simulate
from moesched.steps.memory import counts_of
from moesched.steps.plan import Plan
from moesched.steps.pool_counts import FETCHED, LOADED, SPECULATED, Counted
from moesched.steps.step import Step
from moesched.tasks import DONE, Task
from moesched.testing import Case, policy_cases, run_on_symbols
from moesched.testing.policy_checks import Clock
from moesched.trace import LastSteps, Recorder
from page_bench import PAGES, Bench
from runs import FORTY_PERCENT, Run, make_plan, virtual_run
from traces import kept

MODEL = Path(__file__).parent.parent / "examples" / "tiny-mixtral"
TIGHT = next(case for case in policy_cases() if case.name == "tight GPU")


def counted(bench: Bench) -> Counted:
    return counts_of(bench.pool).now()


# -- what counts -----------------------------------------------------------------------------------


def test_the_first_use_after_a_fetch_is_a_miss_and_one_use_in_each_further_step_is_a_hit() -> None:
    bench = Bench()
    bench.fetch(0)
    for step in (0, 0, 1, 1, 3):
        bench.read(0, step=step)
    assert counted(bench) == Counted(fetched=1, hits=2, misses=1, wasted=0, cancelled=0)


@pytest.mark.parametrize(("arrival", "fetched"), [(SPECULATED, 1), (LOADED, 0)])
def test_a_page_that_is_there_when_it_is_needed_is_a_hit(arrival: int, fetched: int) -> None:
    bench = Bench()
    bench.fetch(0, arrival=arrival)
    bench.read(0)
    assert counted(bench) == Counted(fetched, hits=1, misses=0, wasted=0, cancelled=0)


@pytest.mark.parametrize(("arrival", "wasted"), [(FETCHED, 1), (SPECULATED, 1), (LOADED, 0)])
@pytest.mark.parametrize("replaced", [False, True], ids=["evicted", "replaced"])
def test_a_fetched_page_that_leaves_unread_was_fetched_in_vain(
    arrival: int, wasted: int, replaced: bool
) -> None:
    bench = Bench(slots=1)
    bench.fetch(0, arrival=arrival)
    if replaced:
        bench.fetch(1)
    else:
        bench.evict(0)
    assert counted(bench).wasted == wasted


def test_a_page_whose_transfer_is_cancelled_was_fetched_in_vain_and_moved_nothing() -> None:
    bench = Bench(slots=3)
    bench.fetch(0)
    bench.fetch(1, arrival=SPECULATED)
    assert bench.pool.cancel([PAGES[1]], bench.engine)
    assert counted(bench) == Counted(fetched=2, hits=0, misses=0, wasted=1, cancelled=1)


def test_a_fetch_that_is_refused_counts_for_nothing() -> None:
    bench = Bench(slots=2, replacement="none")
    bench.fetch(0)
    with pytest.raises(Exception, match="already in gpu"):
        bench.fetch(1, 0)
    assert counted(bench) == Counted(fetched=1, hits=0, misses=0, wasted=0, cancelled=0)


def counts_on(clock: Clock, name: str) -> list[Counted]:
    """The counts of a policy's pools."""
    policy = make_policy(name)
    plan = TIGHT.plan(policy)
    run_on_symbols(policy, plan, clock)
    return [counts_of(pool).now() for pool in plan.weights.pools]


@pytest.mark.parametrize("name", ["cgopipe", "lru_offload"])
def test_real_and_virtual_runs_count_alike(name: str) -> None:
    virtual = counts_on("virtual", name)
    assert counts_on("real", name) == virtual
    assert any(counts.misses for counts in virtual)


def test_every_fetched_page_is_a_miss_a_use_of_a_forecast_wasted_or_still_there() -> None:
    policy = make_policy("prefetch_gate", {"offload_per_layer": 4})
    plan = Case(name="previews", machine=TIGHT.machine, experts=6, prompts=(1,), new_tokens=6).plan(policy)
    report = simulate(plan, policy, preview_accuracy=0.5)
    [pool] = report.pools
    assert pool.misses and pool.wasted and pool.hits
    assert pool.misses + pool.wasted < pool.fetched <= pool.misses + pool.wasted + pool.hits + pool.slots


# -- traces ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> Run:
    return virtual_run("cgopipe", budgets=FORTY_PERCENT, new_tokens=6)


def test_a_trace_has_the_counts_at_the_end_of_each_step(run: Run, tmp_path: Path) -> None:
    samples = [each for each in run.recording.pools if each.pool == "weights in gpu"]
    assert len(samples) == 6, "one for each step; the last is at the end"
    assert samples[-1].time == run.recording.end
    assert samples[-1].counted == counts_of(run.plan.weights.pools[0]).now()
    for before, after in pairwise(samples):
        assert before.time < after.time
        assert before.counted.misses < after.counted.misses
    events = kept(run.recording, run.about, tmp_path)
    counters = [each for each in events if each["name"] == "pool weights in gpu"]
    assert counters[-1]["args"] == samples[-1].counted._asdict()


def test_a_trace_of_the_last_steps_has_the_counts_from_before_the_first_one_on(run: Run) -> None:
    last = virtual_run("cgopipe", LastSteps(2), budgets=FORTY_PERCENT, new_tokens=6).recording
    name = "weights in gpu"
    kept = [each for each in last.pools if each.pool == name]
    assert kept == [each for each in run.recording.pools if each.pool == name][-3:]
    assert last.start <= kept[0].time


def test_counts_of_a_trace_never_fall_though_tasks_start_in_another_order() -> None:
    bench, recorder = Bench(), Recorder()
    recorder.watch(bench.engine, {}, [bench.pool])
    log = counts_of(bench.pool).log
    assert log is not None
    for number, start in enumerate((5, 3, 9)):
        lane = bench.script.lanes["link"]
        recorder.ended(Task(lane, WORK, "task", id=number, start=start, end=start + 1, state=DONE))
        log.append((number, Counted(number, 0, 0, 0, 0)))
    samples = [(each.time, each.counted.fetched) for each in recorder.recording().pools]
    assert samples == [(5, 1), (9, 2), (10, 2)]


# -- reports ---------------------------------------------------------------------------------------


class Ruled:
    """Layers that stream through a pool with a rule; awaits nothing."""

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        slots = 2 * len(plan.layout.layer(0))
        self.pool = plan.pool("accelerator", "weights", slots, plan.layout.pages, LeastStale())

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            missing = [page for page in step.pages(i) if page not in self.pool]
            if missing:
                step.fetch(missing, self.pool)
            for j in step.micro_batches:
                step.pre_attention(i, j)
                step.attention(i, j)
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill


def test_a_run_with_a_rule_is_not_replayed() -> None:
    policy = Ruled()
    plan = make_plan(policy)
    with pytest.raises(NotFixed):
        simulate(plan, policy, replay=True, sharing=False)


def test_reports_of_runs_and_simulations_have_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["--policy", "lru_offload", "--set", "offload_per_layer=5"]
    prompt = ["--prompt-ids", "5,6,7", "--max-new-tokens", "4"]
    assert main(["run", str(MODEL), *tight, *prompt, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    [pool] = measured["pools"]
    assert pool == {"name": "experts", "memory": "host", **pool}
    assert pool["fetched"] == pool["misses"] > 0
    simulation = ["simulate", "--model", str(MODEL), "--machine", "t4", "--workload", "uniform"]
    assert main([*simulation, *tight, "--gen", "4", "--batch-size", "2", "--json"]) == 0
    [pool] = json.loads(capsys.readouterr().out)["pools"]
    assert (pool["memory"], pool["wasted"], pool["cancelled"]) == ("gpu", 0, 0)
    assert pool["hits"] > 0
    assert main([*simulation, *tight, "--gen", "4", "--batch-size", "2"]) == 0
    shown = capsys.readouterr().out
    rate = pool["hits"] / (pool["hits"] + pool["misses"])
    assert f"{pool['slots']} " in shown
    assert "pool, in pages" in shown
    assert f"{rate:.1%}" in shown


def test_counts_of_successive_batches_add_up() -> None:
    report = simulate_model(MODEL, machine="t4", policy="resident", workload="uniform", gen=2, batch_size=1)
    batches = [
        [PoolUse("experts", "gpu", 8, 1, 2, 3, 4, 5)],
        [PoolUse("experts", "gpu", 6, 10, 20, 30, 40, 50), PoolUse("experts", "host", 1, 1, 1, 1, 1, 1)],
    ]
    reports = [msgspec.structs.replace(report, pools=pools) for pools in batches]
    assert merge_reports(reports, requests=2, batches=2).pools == [
        PoolUse("experts", "gpu", 8, 11, 22, 33, 44, 55),
        PoolUse("experts", "host", 1, 1, 1, 1, 1, 1),
    ]


def test_a_policy_without_pools_has_none_in_its_report() -> None:
    report = simulate_model(MODEL, machine="t4", policy="resident", workload="uniform", gen=2, batch_size=1)
    assert report.pools == []
