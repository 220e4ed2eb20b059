"""Fig. 1 of MoE-Lightning: the host memory that each system needs to come close to its largest possible throughput."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

from moesched.planner.setting import UNLIMITED
from moesched.reproduce.moe_lightning.paper import Paper
from moesched.reproduce.moe_lightning.rate_factors import RateFactors
from moesched.reproduce.moe_lightning.systems import SYSTEMS, Predicted, predict, setting_of
from moesched.reproduce.report import Section, Value, rounded

SETTING, WORKLOAD, NEW_TOKENS, MICRO_BATCH = "S1", "mtbench", 128, 36
MANY, MORE = 120, 150
MOST = 200
SHARES = (0.8, 0.9, 0.95)
CLAIMED = 0.9


def memory_section(paper: Paper, factors: RateFactors, on_progress: Callable[[str], None]) -> Section:
    """Make the section of Fig. 1: the host memory with which a system reaches `SHARES` of its largest throughput."""
    rows: list[dict[str, Value]] = []
    needed: dict[str, int] = {}
    for system in ("MoE-Lightning(p)", "FlexGen"):
        reached = _by_batch(paper, factors, system, on_progress)
        bound = _bound(reached(MANY), reached(MORE))
        for share in SHARES:
            found = _smallest(reached, share * bound)
            if share == CLAIMED:
                needed[system] = found.host_bytes
            rows.append(
                {
                    "system": system,
                    "share": share,
                    "bound": rounded(bound),
                    "tokens_per_second": rounded(found.tokens_per_second),
                    "batch_size": found.batch_size,
                    "host_gb": rounded(found.host_bytes / 1e9),
                }
            )
    ratio = needed["FlexGen"] / needed["MoE-Lightning(p)"]
    return paper.section("cpu-memory", rows, [paper.claims["cpu_memory"].ratio([ratio])])


def _by_batch(
    paper: Paper, factors: RateFactors, system: str, on_progress: Callable[[str], None]
) -> Callable[[int], Predicted]:
    """Return a function that takes a number of micro-batches, and predicts the system's throughput with them."""

    @cache
    def reached(micro_batches: int) -> Predicted:
        on_progress(f"Fig. 1: {system}, {micro_batches} micro-batches")
        requests = micro_batches * MICRO_BATCH
        where = paper.settings[SETTING]
        setting = setting_of(SYSTEMS[system], where, WORKLOAD, NEW_TOKENS, factors, requests=requests)
        setting.budgets[setting.machine.host.memory] = UNLIMITED
        return predict(setting, micro_batches, MICRO_BATCH)

    return reached


def _smallest(reached: Callable[[int], Predicted], tokens_per_second: float) -> Predicted:
    """Return the prediction with the fewest micro-batches that reaches `tokens_per_second`.

    Args:
        reached: function that predicts the throughput, given a number of micro-batches.
    """
    counts = range(1, MOST)
    place = bisect_left(counts, tokens_per_second, key=lambda count: reached(count).tokens_per_second)
    return reached(counts[place])


def _bound(many: Predicted, more: Predicted) -> float:
    """Return the throughput that a system approaches with growing batches, in tokens per second.

    The larger of two batches generates more tokens and takes more seconds: the result is the extra tokens divided by
    the extra seconds.

    Args:
        many, more: predictions of two large batches, of which that of `more` is the larger one.
    """
    requests = more.batch_size - many.batch_size
    seconds = _seconds(more) - _seconds(many)
    return requests * NEW_TOKENS / seconds


def _seconds(predicted: Predicted) -> float:
    return predicted.batch_size * NEW_TOKENS / predicted.tokens_per_second
