"""Fig. 10 of MoE-Lightning: the best placement of weights, KV cache and attention for various links and CPUs.

As in the paper, the performance model of decode (Eqs. 12 to 14) is optimised; nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from moesched.analysis.hrm import Hierarchy, Level, Split, hierarchy_of, layer_time
from moesched.inputs.lookup import find_shape
from moesched.machines import load_machine
from moesched.machines.sustained import at_peak
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.operations import Operations
from moesched.reproduce.moe_lightning.paper import Paper
from moesched.reproduce.report import Claim, Section, Value, rounded

MODEL, MACHINE = "mixtral-8x7b", "a100-80gx2"
PROMPT, NEW_TOKENS = 512, 32
LINKS = (100e9, 200e9, 300e9, 400e9, 500e9)
RATIOS = (1, 2, 5, 10, 15, 20)
"""Factors of the base CPU's memory, bandwidth and FLOP/s; the paper's text does not give the factors of its figure."""
WEIGHTS = tuple(n / 25 for n in range(26))
CACHE = (0.0, 0.5, 0.75, 0.9, 1.0)
SPARE = 0.02
"""Share of the GPUs' memory for activations."""
AS_GOOD = 0.999


def policy_map(paper: Paper, on_progress: Callable[[str], None]) -> Section:
    """Make the section of Fig. 10: the best placement for each pair of a link (`LINKS`) and a CPU (`RATIOS`)."""
    machine = at_peak(load_machine(MACHINE))
    layout = weight_layout(find_shape(MODEL))
    base = hierarchy_of(machine, layout.dtype)
    fast = machine.accelerator_group.count * machine.memories[machine.accelerator.memory].nbytes
    slow = machine.memories[machine.host.memory].nbytes
    rows: list[dict[str, Value]] = []
    for ratio in RATIOS:
        for link in LINKS:
            on_progress(f"Fig. 10: link {link / 1e9:.0f} GB/s, CPU x {ratio}")
            lower = Level(base.lower.name, base.lower.peak * ratio, base.lower.bandwidth * ratio)
            found = _best(Hierarchy(base.upper, lower, link), layout, fast, slow * ratio)
            rows.append(_row(link, ratio, *found))
    return paper.section("policy-map", rows, _claims(paper, rows))


def _best(hierarchy: Hierarchy, layout: WeightLayout, fast: int, slow: int) -> tuple[float, Split]:
    """Return the largest throughput in tokens per second, and the split of work and weights with this throughput.

    Args:
        fast: bytes of memory of all GPUs.
        slow: bytes of the host's memory.
    """
    operations = Operations(layout.config, layout.dtype)
    context = PROMPT + NEW_TOKENS // 2
    rates = {}
    for split in _splits(layout, operations, fast, slow):
        layer = layer_time(hierarchy, operations, split, context, layout.dtype)
        rates[split] = split.batch_size / (layout.config.layers * layer.seconds)
    most = max(rates.values())
    as_good = [split for split, rate in rates.items() if rate >= AS_GOOD * most]
    best = max(as_good, key=lambda split: (split.kv_on_gpu, -split.weights_on_gpu))
    return rates[best], best


def _splits(layout: WeightLayout, operations: Operations, fast: int, slow: int) -> Iterator[Split]:
    """Yield all combinations of processors, shares of weights and shares of KV cache that fit in memory.

    Each split has as many requests as fit.

    Args:
        fast: bytes of memory of all GPUs.
        slow: bytes of the host's memory.
    """
    weights = sum(page.nbytes for page in layout.pages)
    layer = weights / layout.config.layers
    request = (PROMPT + NEW_TOKENS) * layout.config.layers * operations.kv_bytes
    dense = sum(page.nbytes for page in layout.pages if page.expert < 0)
    for attention_on_gpu, ffn_on_gpu in product((True, False), repeat=2):
        for kept in WEIGHTS if ffn_on_gpu else (0.0,):
            for cached in CACHE if attention_on_gpu else (0.0,):
                stays = kept * weights + 2 * (1 - kept) * layer if ffn_on_gpu else dense
                above = fast * (1 - SPARE) - stays - layout.globals_bytes
                below = slow - (1 - kept) * weights
                rooms = ((above, cached), (below, 1 - cached))
                requests = int(min(room / (share * request) for room, share in rooms if share))
                if requests > 0 and min(above, below) >= 0:
                    yield Split(
                        batch_size=requests,
                        micro_batch_size=requests,
                        attention_on_gpu=attention_on_gpu,
                        ffn_on_gpu=ffn_on_gpu,
                        weights_on_gpu=kept,
                        kv_on_gpu=cached,
                    )


def _row(link: float, ratio: int, tokens_per_second: float, split: Split) -> dict[str, Value]:
    return {
        "link_gb_per_second": round(link / 1e9),
        "cpu_ratio": ratio,
        "weights_on_cpu": round(1 - split.weights_on_gpu, 3),
        "kv_on_cpu": round(1 - split.kv_on_gpu, 3),
        "attention_on": "gpu" if split.attention_on_gpu else "cpu",
        "ffn_on": "gpu" if split.ffn_on_gpu else "cpu",
        "batch_size": split.batch_size,
        "tokens_per_second": rounded(tokens_per_second),
    }


def _claims(paper: Paper, rows: list[dict[str, Value]]) -> list[Claim]:
    base = [row for row in rows if row["cpu_ratio"] == RATIOS[0]]
    ends = float(base[0]["weights_on_cpu"] or 0), float(base[-1]["weights_on_cpu"] or 0)
    moved = [row["cpu_ratio"] for row in rows if row["attention_on"] == "cpu"]
    claims = paper.claims
    return [
        claims["faster_link_offloads"].beside(
            f"{ends[0]:.0%} at {LINKS[0] / 1e9:.0f} GB/s, {ends[1]:.0%} at {LINKS[-1] / 1e9:.0f}",
            ends[0] < ends[1],
        ),
        claims["kv_stays"].beside(f"{base[-1]['kv_on_cpu']:.0%} of it offloaded", base[-1]["kv_on_cpu"] == 0),
        claims["faster_cpu_attends"].beside(
            f"from {moved[0]} times the base CPU on" if moved else "at none of the ratios tried", bool(moved)
        ),
    ]
