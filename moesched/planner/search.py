"""The policy search of MoE-Lightning (section 4.2) as a mixed-integer programme, solved by HiGHS.

Maximise tokens over seconds, N G / (prefill + G decode), over µ, the number of micro-batches n (N = n µ) and the share
r of the weights that stays in the accelerator's memory. A layer takes the longest of its lanes (Eq. 12): the link, the
host, the accelerator; memories bound n and r. Each candidate µ has a binary variable and an n of its own, so that all
constraints are linear. The quotient is maximised by Dinkelbach's method: maximise tokens - λ seconds, and take the
quotient found as the next λ, until it stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import msgspec

from .traits import Setting, Shape, Traits

MOST_ROUNDS = 12
TOLERANCE = 1e-4
MB = 1e6
LANES = ("link", "host", "accelerator")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A solution: sizes, the share of the weights that stays, and what is expected of them.

    Attributes:
        lanes: seconds that a layer of a decode step keeps each lane busy.
    """

    micro_batch_size: int
    micro_batches: int
    kept: float
    throughput: float
    layer_seconds: float
    lanes: dict[str, float]


def best(setting: Setting, traits: Traits, shapes: Sequence[Shape]) -> Choice | None:
    """The best sizes among these shapes, or None where not even the smallest batch fits."""
    found: Choice | None = None
    for _ in range(MOST_ROUNDS):
        choice = _solve(setting, traits, shapes, found.throughput if found else 0.0)
        if choice is None or (found and choice.throughput <= found.throughput * (1 + TOLERANCE)):
            break
        found = choice
    return found


def least(setting: Setting, traits: Traits, shape: Shape) -> Choice:
    """One micro-batch of that shape, with no more weights kept than must be."""
    return _choice(setting, traits, shape, 1, 0.0 if traits.streams else traits.keeps)


def _solve(setting: Setting, traits: Traits, shapes: Sequence[Shape], rate: float) -> Choice | None:
    """The solution for one λ."""
    machine, config = setting.machine, setting.layout.config
    weights = sum(map(setting.slot_bytes or (lambda page: page.nbytes), setting.layout.pages))
    model = highspy.Highs()
    model.silent()
    taken = [model.addBinary() for _ in shapes]
    counts = [model.addIntegral(lb=0, ub=each.most) for each in shapes]
    kept = model.addVariable(lb=0.0 if traits.streams else traits.keeps, ub=traits.keeps)
    step, prefill = model.addVariable(lb=0.0), model.addVariable(lb=0.0)
    model.addConstr(model.qsum(taken) == 1)
    for one, count, each in zip(taken, counts, shapes, strict=True):
        model.addConstr(count - each.most * one <= 0)
        model.addConstr(count - one >= 0)
    fetching = traits.fetch - traits.fetch * kept
    for lane in LANES:
        computing = model.qsum(getattr(each, lane) * n for each, n in zip(shapes, counts, strict=True))
        model.addConstr(step - computing - (fetching if lane == "link" else 0) >= 0)
    model.addConstr(prefill - fetching >= 0)
    model.addConstr(
        prefill - model.qsum(each.prefill * n for each, n in zip(shapes, counts, strict=True)) >= 0
    )
    for memory in machine.memories:
        used = model.qsum(
            (each.each[memory] / MB) * n + ((each.fixed[memory] - each.each[memory]) / MB) * one
            for each, one, n in zip(shapes, taken, counts, strict=True)
        )
        if memory == machine.accelerator.memory:
            buffer = traits.buffer * weights / config.layers / MB
            used += (weights / traits.stages / MB - buffer) * kept + buffer
        model.addConstr(used <= setting.capacity(memory) / MB)
    tokens = model.qsum(setting.new_tokens * each.size * n for each, n in zip(shapes, counts, strict=True))
    seconds = config.layers * (prefill + setting.new_tokens * step)
    model.maximize(tokens - rate * seconds)
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    number = next(i for i, one in enumerate(taken) if model.val(one) > 0.5)
    return _choice(setting, traits, shapes[number], round(model.val(counts[number])), model.val(kept))


def _choice(setting: Setting, traits: Traits, shape: Shape, count: int, kept: float) -> Choice:
    layers = setting.layout.config.layers
    lanes = {lane: count * getattr(shape, lane) for lane in LANES}
    fetching = traits.fetch * (1 - kept)
    lanes["link"] += fetching
    step = max(lanes.values())
    seconds = layers * (max(fetching, count * shape.prefill) + setting.new_tokens * step)
    return Choice(
        micro_batch_size=shape.size,
        micro_batches=count,
        kept=kept,
        throughput=setting.new_tokens * shape.size * count / seconds,
        layer_seconds=step,
        lanes=lanes,
    )
