"""One expert of Mixtral 8x7B's shape in bfloat16, alone: our kernel beside a peer's, beside the row's limit.

Each call takes another expert; together they are larger than the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from _limits import Buffer, Limit, limit_of, measured_flops, read_limit

from moesched.system.cores import usable_cores
from peers.environment import Peer
from peers.protocol import Answer, Message
from peers.rounds import Field, Results, spread, turned, undisturbed, wait_for_quiet

HIDDEN, WIDTH = 4096, 14336
WEIGHTS = 3 * HIDDEN * WIDTH
NBYTES = 2 * WEIGHTS
EXPERTS = 6
CALLS = 12
ROWS = (1, 2, 4, 8, 16)
MOST_ERROR = 0.02

Expert = list[torch.Tensor]


def experts() -> list[Expert]:
    """Gate, up and down of each expert: random, and the same for everybody; equal numbers, but memory of their own."""
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    generator = torch.Generator().manual_seed(1)
    first = [(torch.randn(shape, generator=generator) * 0.02).bfloat16() for shape in shapes]
    return [[matrix.clone() for matrix in first] for _ in range(EXPERTS)]


def answers(expert: Expert, call: Callable[[int, torch.Tensor], torch.Tensor]) -> Answer:
    """Times calls of an expert by its number, and compares one result for each number of rows with float64."""
    errors: dict[int, float] = {}

    def answer(request: Message) -> Message:
        generator = torch.Generator().manual_seed(request["rows"])
        x_nD = torch.randn(request["rows"], HIDDEN, generator=generator).bfloat16()
        seconds = []
        for number in range(CALLS):
            started = perf_counter()
            call(number % EXPERTS, x_nD)
            seconds.append(perf_counter() - started)
        if len(x_nD) not in errors:
            error = errors[len(x_nD)] = relative_error(expert, x_nD, call(0, x_nD))
            if error > MOST_ERROR:
                raise ArithmeticError(f"the result is wrong by {error:.0%}")
        return {"seconds": median(seconds), "error": errors[len(x_nD)]}

    return answer


def relative_error(expert: Expert, x_nD: torch.Tensor, y_nD: torch.Tensor) -> float:
    """The largest difference from the product in float64, over the largest value."""
    gate, up, down = (matrix.double() for matrix in expert)
    x = x_nD.double()
    exact = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return float((y_nD.double() - exact).abs().max() / exact.abs().max())


def compare(peers: Sequence[Peer], rounds: int, patience: float) -> dict[str, Any]:
    """Everybody's rate by number of rows, beside the limit of the same rounds."""
    cores, buffer, results = usable_cores(), Buffer(EXPERTS * NBYTES), Results()
    limits: dict[int, list[Limit]] = {rows: [] for rows in ROWS}
    with Field(peers, patience=patience) as field:
        contestants = field.contestants()
        for number in range(rounds):
            for rows in ROWS:
                wait_for_quiet(patience)
                before = read_limit([buffer.next(NBYTES)], cores)
                results.run(field, turned(contestants, number), str(rows), {"rows": rows})
                read = max(before, read_limit([buffer.next(NBYTES)], cores))
                limits[rows].append(limit_of(NBYTES, 2 * rows * WEIGHTS, read, measured_flops(cores)))
        found: dict[str, Any] = {"peers": field.about, "rows": {}}
    for rows in ROWS:
        found["rows"][str(rows)] = {
            "limit": median(limit.rate for limit in limits[rows]),
            "bound_by": limits[rows][-1].bound_by,
            "contestants": {
                contestant.name: row_of(results.answers(str(rows), contestant), limits[rows])
                for contestant in contestants
            },
            "failed": results.reasons(str(rows)),
        }
    return found


def row_of(each: Sequence[Message], limits: Sequence[Limit]) -> dict[str, Any]:
    """A contestant's rates, and shares of the limits of the same rounds."""
    if not each:
        return {}
    kept = undisturbed(each)
    rates = [NBYTES / each[n]["seconds"] for n in kept]
    shares = [limits[n].fraction(NBYTES, each[n]["seconds"]) for n in kept]
    return {
        "bytes_per_second": spread(rates),
        "fraction_of_limit": spread(shares),
        "error": each[0]["error"],
        "other_cores": [one["other_cores"] for one in each],
    }
