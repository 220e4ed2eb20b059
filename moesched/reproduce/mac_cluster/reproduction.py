"""`moesched reproduce mac-cluster`: makes the sections that compare the paper's tables with our simulated Macs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

from moesched.dispatch.node_placement import best_placement, expected_load
from moesched.machines import load_machine
from moesched.machines.sustained import at_peak
from moesched.reproduce.mac_cluster.balanced import HELD, balanced
from moesched.reproduce.mac_cluster.bound import figure_8, table_6
from moesched.reproduce.mac_cluster.paper import MacPaper, mac_paper
from moesched.reproduce.mac_cluster.tables import Tables
from moesched.reproduce.mac_cluster.wired_memory import packing, wired_memory
from moesched.reproduce.printed import Made
from moesched.reproduce.report import Section, Value


@contextmanager
def mac_cluster_made(on_progress: Callable[[str], None]) -> Iterator[Made]:
    """Yield functions that make the paper's sections; a table row that several sections need is simulated once.

    Args:
        on_progress: called with a description of each simulation.
    """
    paper = mac_paper()
    tables = Tables(paper, on_progress)
    beside = cache(partial(balanced, paper, on_progress))

    def simulated() -> dict[int, float]:
        return {system.nodes: found.token.total for system, found in tables.rows("Table 4")}

    yield Made(
        {
            "goals": lambda: goals(paper, tables, beside()),
            "table-3": lambda: tables.breakdown("Table 3"),
            "table-4": lambda: tables.breakdown("Table 4"),
            "prompts": tables.prompts,
            "table-5": tables.cost,
            "table-6": lambda: table_6(paper),
            "figure-8": lambda: figure_8(paper, simulated()),
            "balanced": beside,
            "packing": lambda: packing(paper),
            "wiring": lambda: wired_memory(tables),
        },
        lambda: _calibration(paper),
    )


def goals(paper: MacPaper, tables: Tables, beside: Section) -> Section:
    """Make the section of this project's goals for this reproduction: each goal, our result, and whether it is met.

    Args:
        beside: the section that `balanced` makes.
    """
    both = [row for table in ("Table 3", "Table 4") for row in tables.breakdown(table).rows]
    cells = [row for row in both if not row["fitted"]]
    errors = {
        part: max(abs(float(row["error"] or 0)) for row in cells if row["part"] == part)
        for part in ("time", "moe", "comm", "misc")
    }
    whole = errors.pop("time")
    parts = max(errors.values())
    wrong = [f"{row['nodes']} nodes, {row['cell']}" for row in table_6(paper).rows if not row["agrees"]]
    loads = {nodes: expected_load(best_placement(16, 4, nodes, HELD), 4).experts for nodes in (3, 4)}
    rows: list[dict[str, Value]] = [
        _goal(
            "Tables 3 and 4: time of a token, where not fitted",
            "within 15 %",
            f"{whole:.1%} off at most",
            whole <= 0.15,
        ),
        _goal(
            "Tables 3 and 4: its parts, where not fitted",
            "within 25 %",
            f"{parts:.1%} off at most",
            parts <= 0.25,
        ),
        _goal("Table 6, printed", "all but one", f"all but: {'; '.join(wrong)}", len(wrong) <= 1),
        _goal("placement, 4 nodes of 8", "<= 1.1605", f"{loads[4]:.4f}", loads[4] <= 1.1605),
        _goal("placement, 3 nodes of 8", "<= 2.02", f"{loads[3]:.4f}", loads[3] <= 2.02),
    ]
    for machine in dict.fromkeys(row["machine"] for row in beside.rows):
        ratios = {row["nodes"]: float(row["ratio"] or 0) for row in beside.rows if row["machine"] == machine}
        least, four = min(ratios.values()), ratios[4]
        rows += [
            _goal(f"ep_balanced over P-LR-D, 2 to 8 {machine}", ">= 1x", f"{least:.4g}x", least >= 1),
            _goal(f"ep_balanced over P-LR-D, 4 {machine}", ">= 1.10x", f"{four:.4g}x", four >= 1.1),
        ]
    return paper.section("goals", rows)


def _goal(goal: str, bar: str, ours: str, met: bool) -> dict[str, Value]:
    return {"goal": goal, "bar": bar, "ours": ours, "met": met}


def _calibration(paper: MacPaper) -> list[dict[str, Value]]:
    """Return a row for each rate of the simulated Macs that was fitted to a figure of the paper."""
    machine, latency = at_peak(load_machine(paper.machine)), paper.latency
    wired_memory = machine.wired_memory
    assert wired_memory is not None
    values = {
        "reading": (machine.accelerator.expert_bandwidth or 0) / 1e9,
        "handover": machine.accelerator.handover_seconds * 1e3,
        "centralised": latency.centralised * 1e3,
        "decentralised": latency.decentralised * 1e3,
        "further": latency.each_further_node * 1e3,
        "again": wired_memory.again_bandwidth / 1e9,
        "first": wired_memory.first_bandwidth / 1e9,
        "idle": wired_memory.idle_seconds * 1e3,
    }
    return [
        {"rate": each.rate, "value": each.value.format(**values), "set_by": each.set_by}
        for each in paper.calibration
    ]
