"""Fig. 7 of MoE-Lightning: the throughput of every system on MTBench at several generation lengths.

The figure's values are not in the text, but section 5.2 gives ratios of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from moesched.errors import BadInput
from moesched.planner.candidate import Candidate
from moesched.planner.setting import Setting
from moesched.reproduce.moe_lightning.paper import Paper
from moesched.reproduce.moe_lightning.rate_factors import RateFactors
from moesched.reproduce.moe_lightning.systems import SYSTEMS, Predicted, predict, setting_of
from moesched.reproduce.report import Claim, Section, Value, rounded

GENERATIONS = (32, 64, 128, 256)
WORKLOAD = "mtbench"
SETTINGS = ("S1", "S2")
MOE_LIGHTNING = {"S1": (14, 36)}
"""Number and size of the micro-batches that MoE-Lightning chose itself, by setting (Table 5); not printed for S2."""
FLEXGEN_MICRO_BATCH = {"S1": 8, "S2": 16}
"""Micro-batch size that FlexGen chose itself, by setting: S1 from Table 5, S2 assumed twice as large, as in Table 4."""
FLEXGEN_TOKENS = 1112 * (418 + 128)
"""Tokens that FlexGen's own batch holds at the end (Table 5); its batches in Table 4 hold 0.93 to 1.06 times that."""
LEAST_FALL = 0.001
PLANNER, ITS_OWN, ONE = "our planner", "its own search", "one micro-batch"
BY_OUR_PLANNER = "S1 and S2, our planner's sizes for it"
COMPARED = (
    ("MoE-Lightning", PLANNER),
    ("MoE-Lightning(p)", PLANNER),
    ("MoE-Lightning(p)", ITS_OWN),
    ("FlexGen", ITS_OWN),
    ("FlexGen", PLANNER),
    ("FlexGen(c)", ITS_OWN),
    ("FlexGen(c)", PLANNER),
    ("DeepSpeed", ONE),
)
"""Pairs of a system and the source of its batch sizes."""

Rows = list[dict[str, Value]]


def speedups(paper: Paper, factors: RateFactors, on_progress: Callable[[str], None]) -> Section:
    """Make the section of Fig. 7: throughput of every system on S1 and S2, and MoE-Lightning's speedups."""
    rows: Rows = []
    for name in SETTINGS:
        for new_tokens in GENERATIONS:
            for system, sizes_by in COMPARED:
                if (system, sizes_by) == ("MoE-Lightning(p)", ITS_OWN) and name not in MOE_LIGHTNING:
                    continue
                on_progress(f"Fig. 7: {system}, {new_tokens} tokens on {name}")
                setting = setting_of(SYSTEMS[system], paper.settings[name], WORKLOAD, new_tokens, factors)
                found = _sized(setting, name, system, sizes_by)
                rows.append(row_of(name, new_tokens, system, sizes_by, found))
    claims = []
    for claim, system, sizes_by in (
        ("over_flexgen", "FlexGen", ITS_OWN),
        ("over_flexgen_c", "FlexGen(c)", ITS_OWN),
        ("over_deepspeed", "DeepSpeed", ONE),
    ):
        slower = system, sizes_by
        printed = _most_over(rows, ("MoE-Lightning(p)", ITS_OWN), slower, tuple(MOE_LIGHTNING))
        ours = _most_over(rows, ("MoE-Lightning(p)", PLANNER), slower, SETTINGS)
        claims.append(paper.claims[claim].ratio([printed], "S1, its own sizes"))
        claims.append(paper.claims[claim].ratio([ours], BY_OUR_PLANNER))
    unpadded = _most_over(rows, ("MoE-Lightning", PLANNER), ("FlexGen", ITS_OWN), SETTINGS)
    claims.append(paper.claims["unpadded"].ratio([unpadded], BY_OUR_PLANNER))
    fair = [
        _most_over(rows, ("MoE-Lightning(p)", PLANNER), (system, PLANNER), SETTINGS)
        for system in ("FlexGen", "FlexGen(c)")
    ]
    note = (
        "With our planner's sizes for all systems, MoE-Lightning(p) is at most "
        f"{fair[0]:.2f}x as fast as FlexGen and {fair[1]:.2f}x as fast as FlexGen(c)."
    )
    return paper.section("speedups", rows, [*claims, *generation_claims(paper, rows, "S1", ITS_OWN)], [note])


def _sized(setting: Setting, name: str, system: str, sizes_by: str) -> Predicted:
    """Predict a system's throughput, with batch sizes from the source that `sizes_by` names.

    Args:
        setting: machine, model and requests.
        name: the paper's name of the setting.
        system: a name in `SYSTEMS`.
        sizes_by: `PLANNER` for our planner, `ONE` for the largest single micro-batch, otherwise the system's own
            search.
    """
    if sizes_by == PLANNER:
        return planned(setting, SYSTEMS[system].policy)
    if sizes_by == ONE:
        return one_micro_batch(setting)
    if system == "MoE-Lightning(p)":
        return predict(setting, *MOE_LIGHTNING[name])
    return as_flexgen(setting, FLEXGEN_MICRO_BATCH[name])


def generation_claims(paper: Paper, rows: Rows, setting: str, flexgen_sizes_by: str) -> list[Claim]:
    """Return two claims of section 5.2, each with our result beside it.

    The paper claims that FlexGen's throughput falls at the longest generation, and that the throughput of
    MoE-Lightning(p), which pads all prompts to the same length, does not.

    Args:
        rows: rows of predictions.
        setting: the paper's name of the setting.
        flexgen_sizes_by: source of FlexGen's sizes, as in the rows.
    """
    claims = []
    for system, sizes_by, claim in (
        ("FlexGen", flexgen_sizes_by, "falls"),
        ("MoE-Lightning(p)", PLANNER, "does_not_fall"),
    ):
        reached = [rate_of(rows, setting, length, system, sizes_by) for length in GENERATIONS]
        fall = 1 - reached[-1] / max(reached)
        agrees = (fall > LEAST_FALL) == (claim == "falls")
        where = {"system": system, "setting": setting, "length": GENERATIONS[-1]}
        claims.append(paper.claims[claim].beside(f"{fall:.1%}", agrees, **where))
    return claims


def planned(setting: Setting, policy: str) -> Predicted:
    """Predict a policy's throughput with the batch sizes that our planner finds."""
    schedule = Candidate(policy, setting).search()
    bound_by = max(schedule.trial_run.utilization, key=schedule.trial_run.utilization.__getitem__)
    return Predicted(
        tokens_per_second=schedule.throughput,
        batch_size=schedule.batch_size,
        micro_batch_size=schedule.micro_batch_size,
        prefill_seconds=schedule.trial_run.prefill_seconds,
        step_seconds=schedule.trial_run.step_seconds,
        bound_by=bound_by,
        busy=schedule.trial_run.utilization[bound_by],
        weights_on_gpu=schedule.weights_on_gpu,
        gpu_budget=1.0,
        host_bytes=schedule.peak_bytes[setting.machine.host.memory],
    )


def as_flexgen(setting: Setting, micro_batch_size: int) -> Predicted:
    """Predict the throughput with as many requests as FlexGen's own search chose, in micro-batches of a given size."""
    requests = FLEXGEN_TOKENS // (max(setting.lengths) + setting.new_tokens)
    return predict(setting, requests // micro_batch_size, micro_batch_size)


def one_micro_batch(setting: Setting) -> Predicted:
    """Predict the throughput with a single micro-batch, as large as fits in memory."""

    def too_many(requests: int) -> bool:
        try:
            setting.plan(setting.batch(1, requests))
        except BadInput:
            return True
        return False

    return predict(setting, 1, max(1, bisect_left(range(1, len(setting.lengths)), True, key=too_many)))


def rate_of(rows: Rows, setting: str, new_tokens: int, system: str, sizes_by: str) -> float:
    """Return the tokens per second of the row for a setting, generation length, system and source of sizes."""
    wanted = {"setting": setting, "new_tokens": new_tokens, "system": system, "sizes_by": sizes_by}
    found = next(row["tokens_per_second"] for row in rows if wanted.items() <= row.items())
    assert isinstance(found, float)
    return found


def _most_over(
    rows: Rows, faster: tuple[str, str], slower: tuple[str, str], settings: Sequence[str]
) -> float:
    """Return the largest ratio of two systems' throughputs, over all settings and generation lengths.

    Args:
        faster, slower: each a system's name and the source of its sizes, as in the rows.
    """
    return max(
        rate_of(rows, setting, new_tokens, *faster) / rate_of(rows, setting, new_tokens, *slower)
        for setting in settings
        for new_tokens in GENERATIONS
    )


def row_of(setting: str, new_tokens: int, system: str, sizes_by: str, found: Predicted) -> dict[str, Value]:
    """Make the row of one prediction: a system in a setting at one generation length.

    Args:
        setting: the paper's name of the setting.
        sizes_by: source of the batch sizes, as in `_sized`.
        found: the prediction.
    """
    return {
        "setting": setting,
        "new_tokens": new_tokens,
        "system": system,
        "sizes_by": sizes_by,
        "batch_size": found.batch_size,
        "micro_batch_size": found.micro_batch_size,
        "tokens_per_second": rounded(found.tokens_per_second),
        "bound_by": found.bound_by,
        "busy": round(found.busy, 3),
    }
