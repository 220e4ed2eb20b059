"""Fig. 1 of MoE-Lightning: how much host memory a system needs to come near the most that it can reach."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

from moesched.planner.traits import UNLIMITED

from .figures import Paper
from .rates import Rates
from .report import Section, Value, ratio_claim, rounded
from .systems import SYSTEMS, Predicted, predict, setting_of

SETTING, WORKLOAD, NEW_TOKENS, MICRO_BATCH = "S1", "mtbench", 128, 36
MANY, MORE = 120, 150
MOST = 400
SHARES = (0.8, 0.9, 0.95)
CLAIMED = 0.9

HOW = (
    "MTBench on S1, 128 new tokens, padded, µ = 36 as in Table 5, host memory without a limit. What the GPU's memory "
    f"allows at most with that µ is what {MORE - MANY} micro-batches more bring, from {MANY} to {MORE} of them: the "
    "weights' transfer no longer counts then. The host memory (weights and KV cache) is that of the smallest batch "
    f"that reaches a share of it; the figure's own share is not given, the claim is taken for {CLAIMED:.0%}."
)


def memory_section(paper: Paper, rates: Rates, on_progress: Callable[[str], None]) -> Section:
    """Host memory by system and share of the bound."""
    rows: list[dict[str, Value]] = []
    needed: dict[str, int] = {}
    for system in ("MoE-Lightning(p)", "FlexGen"):

        @cache
        def reached(micro_batches: int, system: str = system) -> Predicted:
            on_progress(f"Fig. 1: {system}, {micro_batches} micro-batches")
            setting = setting_of(
                SYSTEMS[system],
                paper.settings[SETTING],
                WORKLOAD,
                NEW_TOKENS,
                rates,
                requests=micro_batches * MICRO_BATCH,
            )
            setting.budgets[setting.machine.host.memory] = UNLIMITED
            return predict(setting, micro_batches, MICRO_BATCH)

        bound = _bound(reached(MANY), reached(MORE))
        for share in SHARES:
            enough = bisect_left(
                range(1, MOST),
                True,
                key=lambda count, least=share * bound: reached(count).tokens_per_second >= least,
            )
            found = reached(enough + 1)
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
    return Section(
        name="cpu-memory",
        title="Fig. 1: host memory and throughput",
        how=HOW,
        rows=rows,
        claims=[ratio_claim(paper.claims["cpu_memory"], [needed["FlexGen"] / needed["MoE-Lightning(p)"]])],
    )


def _bound(many: Predicted, more: Predicted) -> float:
    """Tokens per second of the requests that one batch has more than the other."""
    requests = more.batch_size - many.batch_size
    seconds = _seconds(more) - _seconds(many)
    return requests * NEW_TOKENS / seconds


def _seconds(predicted: Predicted) -> float:
    return predicted.batch_size * NEW_TOKENS / predicted.tokens_per_second
