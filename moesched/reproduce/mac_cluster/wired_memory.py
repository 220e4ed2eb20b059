"""Cost of wiring memory (pinning it for the GPU) on a simulated Mac: the packing benchmark, and the time per token."""

from __future__ import annotations

from msgspec.structs import replace

from moesched.drivers.wired_memory import Array, WiredPages
from moesched.machines import WiredMemory, load_machine
from moesched.machines.sustained import at_peak
from moesched.planner.cluster import plan_cluster
from moesched.reproduce.mac_cluster.paper import MacPaper
from moesched.reproduce.mac_cluster.runs import run_system
from moesched.reproduce.mac_cluster.tables import Tables
from moesched.reproduce.report import Section, Value, agrees, rounded

LAYERS, MATRICES, SIDE = 40, 3, 8192
SAMPLES = 5
MATRIX_BYTES = SIDE * SIDE * 2
WAITS_MS = (0, *(2**power for power in range(12)))
BANDWIDTH = 800e9
"""Bytes per second at which a product of a matrix with one row reads the matrix: the memory bandwidth in Table 2."""


def sample_seconds(wired_memory: WiredMemory, wait: float, *, prestacked: bool) -> float:
    """Simulate the paper's packing benchmark, and return the mean seconds of a sample, not counting the waits.

    A sample has 40 layers of three matrix products, with a wait after each layer.

    Args:
        wired_memory: rates at which arrays are wired.
        wait: seconds of each wait.
        prestacked: True if all matrices are parts of one array, False if each matrix is an array.
    """
    memory = WiredPages(wired_memory)
    product = round(MATRIX_BYTES / BANDWIDTH * 1e9)
    array_bytes = LAYERS * MATRICES * MATRIX_BYTES if prestacked else MATRIX_BYTES
    pause = round(wait * 1e9)
    now = waited = started = 0
    for sample in range(-1, SAMPLES):
        if sample == 0:
            started = now
        for layer in range(LAYERS):
            for matrix in range(MATRICES):
                array: Array = () if prestacked else (layer, matrix)
                now += memory.wire(array, array_bytes, now) + product
                memory.use(array, now)
            if sample >= 0:
                now += pause
                waited += pause
    return (now - started - waited) / SAMPLES / 1e9


def packing(paper: MacPaper) -> Section:
    """Make the section of Fig. 4: the packing benchmark, simulated with our model of wired memory.

    The section also has the paper's claims about this benchmark, with our results beside them.
    """
    wired_memory = at_peak(load_machine(paper.machine)).wired_memory
    assert wired_memory is not None
    rows: list[dict[str, Value]] = []
    for wait in WAITS_MS:
        unstacked, stacked = (
            sample_seconds(wired_memory, wait / 1e3, prestacked=prestacked) for prestacked in (False, True)
        )
        rows.append(
            {
                "wait_ms": wait,
                "unstacked_ms": rounded(unstacked * 1e3),
                "prestacked_ms": rounded(stacked * 1e3),
            }
        )
    alone = float(rows[0]["unstacked_ms"] or 0)

    def last_steady(column: str) -> int:
        return max(int(row["wait_ms"] or 0) for row in rows if float(row[column] or 0) < 1.1 * alone)

    first = LAYERS * MATRICES * MATRIX_BYTES / wired_memory.first_bandwidth
    claims = []
    for weights, paper_ms in (("unstacked", 8), ("prestacked", 512)):
        steady = last_steady(f"{weights}_ms")
        claims.append(paper.claims[weights].beside(f"{steady} ms", steady == paper_ms))
    near = agrees((0.4, 0.4), (first, first))
    claims.append(paper.claims["first_wiring"].beside(f"{first * 1e3:.0f} ms", near))
    return paper.section("packing", rows, claims)


def wired_memory(tables: Tables) -> Section:
    """Make the section that compares the time of a token with weights that stay wired and with weights that do not."""
    naive, busy, aided = range(3)
    alone = replace(tables.paper.systems[naive], prestacked=True)
    tables.on_progress("prestacking alone")
    seconds = run_system(tables.paper, alone, 16, 12).token.total
    machine = at_peak(load_machine(tables.paper.machine))
    assert machine.wired_memory is not None
    proposal = plan_cluster(tables.paper.model, machine=machine, nodes=2, network=tables.paper.network)
    nbytes = next(way.bytes_per_node for way in proposal.ways if way.policy == "ep_router_aided")
    rows: list[dict[str, Value]] = [
        {
            "what": "wiring all weights of a node of two at start-up, once, with standby",
            "seconds": rounded(nbytes / machine.wired_memory.first_bandwidth),
        },
        {"what": "a token, naive, unstacked", "seconds": rounded(tables.run(naive).token.total)},
        {"what": "a token, naive, prestacked", "seconds": rounded(seconds)},
        {"what": "a token, P-LB", "seconds": rounded(tables.run(busy).token.total)},
        {"what": "a token, P-LR-D", "seconds": rounded(tables.run(aided).token.total)},
    ]
    loops = seconds > tables.run(naive).token.total
    claim = tables.paper.claims["inescapable"].beside(f"{seconds:.3g} s a token", loops)
    return tables.paper.section("wiring", rows, [claim])
