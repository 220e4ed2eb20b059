"""Cost of wiring on the device model of a Mac: the paper's packing benchmark (Algorithms 1 and 2), and tokens."""

from __future__ import annotations

from msgspec.structs import replace

from moesched.drivers.wired_memory import Array, WiredPages
from moesched.machines import Machine, WiredMemory, load_machine
from moesched.machines.sustained import at_peak
from moesched.planner import plan_cluster
from moesched.reproduce.mac_cluster.runs import run_system
from moesched.reproduce.mac_cluster.tables import Tables
from moesched.reproduce.report import Claim, Section, Value, agrees, rounded

LAYERS, MATRICES, SIDE = 40, 3, 8192
SAMPLES = 5
MATRIX_BYTES = SIDE * SIDE * 2
IDLE_TIME = "by construction: the idle time is set by both findings"
WAITS_MS = (0, *(2**power for power in range(12)))
BANDWIDTH = 800e9
"""Bytes per second at which products of one row read their matrices: the memory bandwidth (Table 2)."""


def sample_seconds(wired_memory: WiredMemory, wait: float, *, prestacked: bool) -> float:
    """Seconds of one sample, less its waits: 40 layers of three products, all warm at first, a wait after each layer.

    If `prestacked`, all matrices are one array; otherwise each is its own.
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


def packing(machine: Machine) -> Section:
    """Fig. 4 from the model, and the two findings."""
    wired_memory = machine.wired_memory
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
    claims = [
        Claim(
            where=where,
            what=f"longest wait at which {weights} weights stay wired",
            paper=f"{paper_ms} ms",
            ours=f"{last_steady(f'{weights}_ms')} ms",
            agrees=last_steady(f"{weights}_ms") == paper_ms,
            because=IDLE_TIME,
        )
        for where, weights, paper_ms in (("Finding 1", "unstacked", 8), ("Finding 2", "prestacked", 512))
    ]
    claims += [
        Claim(
            where="Finding 2",
            what="first wiring of the benchmark's data",
            paper="400 ms",
            ours=f"{first * 1e3:.0f} ms",
            agrees=agrees((0.4, 0.4), (first, first)),
            because="by construction: the rate of the first wiring is set by it",
        ),
    ]
    return Section(
        name="packing",
        title="Fig. 4: a sample of the packing benchmark, by the wait after each layer",
        how=(
            "Algorithm 2 on the device model: 40 layers of three products of one row with 8192 x 8192 matrices in 16 "
            "bits, read at 800 GB/s, all wired before the first sample. A wait of 8 ms after each of 40 layers leaves "
            "a matrix idle for 0.34 s, one of 16 ms for 0.66 s; an array of all of them is idle for a single wait. So "
            "one idle time between 512 and 660 ms gives both findings."
        ),
        rows=rows,
        claims=claims,
    )


def wired_memory(tables: Tables) -> Section:
    """Times of a token with weights that stay wired and with weights that do not."""
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
    return Section(
        name="wiring",
        title="What wiring costs on two nodes",
        how=(
            "Section 4.2: with prestacking alone the experts, which are used at separate times, lie idle while "
            "others are wired, and are unwired in turn. This follows from the schedule: an expert's weights of all "
            "layers are wired again for a single layer's use."
        ),
        rows=rows,
        claims=[
            Claim(
                where="section 4.2",
                what="prestacking alone is an inescapable loop of wiring",
                paper="yes",
                ours=f"{seconds:.3g} s a token",
                agrees=seconds > tables.run(naive).token.total,
            )
        ],
    )
