"""The policy search of MoE-Lightning (section 4.2) as a mixed-integer programme, solved by HiGHS.

The programme maximises tokens over seconds, N G / (prefill + G decode), for N requests with G tokens each to generate.
It has four variables: the number µ of requests in a micro-batch; the number n of micro-batches (N = n µ); the number of
micro-batches whose KV cache is on the accelerator (r_c n); and the share r_w of the weights that stays on the
accelerator. A layer takes the time of its slowest lane (Eq. 12): link, host or accelerator. Memories are constraints.
Each candidate µ has a binary variable and counts of its own, so that all constraints are linear. The quotient is
maximised by Dinkelbach's method: maximise tokens - λ seconds, and take the quotient found as the next λ, until the
quotient no longer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from moesched.planner.setting import Setting
from moesched.planner.traits import MicroBatchCost, SizeOption, Traits
from moesched.system.silence import STDOUT, silent

MOST_ROUNDS = 12
TOLERANCE = 1e-4
DIGITS = 6
"""Decimal places of a share in the programme, as the solver refuses numbers close to 0."""
HALF = 0.5
"""Largest difference between a share times all micro-batches and the whole number that it is rounded to."""
MB = 1e6
LEAST_SECONDS = 1e-9
"""Fewer seconds count as none in the programme, as the solver refuses numbers close to 0."""
LANES = ("link", "host", "accelerator")


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A solution of the search: sizes, the KV cache that stays on the accelerator, and the bound on throughput.

    Attributes:
        micro_batch_size: requests of a micro-batch.
        micro_batches: number of micro-batches.
        chunk: the largest number of tokens of a micro-batch that pass a layer together in prefill; None for no limit.
        resident: number of micro-batches whose KV cache stays on the accelerator; a fraction for a single micro-batch
            whose cache is split; 0 for a policy that does not split the cache.
        throughput: bound on generated tokens per second, prefill included.
    """

    micro_batch_size: int
    micro_batches: int
    chunk: int | None = None
    resident: float
    throughput: float


def best(
    setting: Setting, traits: Traits, options: Sequence[SizeOption], above: float = 0.0
) -> PolicyChoice | None:
    """Choose one of several sizes of micro-batches, and their number, with the highest bound on throughput.

    The result is None if no size fits, or none reaches `above` tokens per second.

    Args:
        options: the sizes, with the costs of a micro-batch of each.
    """
    programme = _Programme(setting, traits, options)
    found, rate = None, max(above, _reached(setting, traits, options) * (1 - 2 * TOLERANCE))
    for _ in range(MOST_ROUNDS):
        choice = programme.solve(rate)
        if choice is None or choice.throughput <= rate * (1 + TOLERANCE):
            break
        found, rate = choice, choice.throughput
    return found


def _reached(setting: Setting, traits: Traits, options: Sequence[SizeOption]) -> float:
    """Return the first λ of the search: a throughput, in tokens per second, that some of the sizes reach.

    The result is 0 if the setting fixes the share of the KV cache on the accelerator. Otherwise it is the highest bound
    over all sizes. A policy that splits the cache is tried twice: with all of the cache on the host, and with all of it
    on the accelerator. The higher the result is, the fewer iterations the search needs.
    """
    if setting.kv_on_gpu is not None:
        return 0.0
    shares = (0.0, 1.0) if setting.splits_kv else (0.0,)
    return max(most_of(setting, traits, option, share) for option in options for share in shares)


def most_of(setting: Setting, traits: Traits, option: SizeOption, resident: float) -> float:
    """Return the highest bound on throughput, in tokens per second, over all numbers of micro-batches of one size.

    The result is 0 if no number fits. Throughput rises with the number up to a single peak, which a binary search
    finds.

    Args:
        option: the size of micro-batches, with their costs.
        resident: share of the micro-batches whose KV cache stays on the accelerator, from 0 to 1.
    """

    def rate(count: int) -> float:
        found = filled(setting, traits, option, count, round(resident * count))
        return 0.0 if found is None else found.throughput

    low, high = 1, option.most
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if 0 < rate(middle) < rate(middle + 1) else (low, middle)
    return rate(low)


def least(setting: Setting, traits: Traits, option: SizeOption) -> PolicyChoice:
    """Choose one micro-batch of the option's size, with as few weights on the accelerator as the policy allows."""
    return _choice(setting, traits, option, 1, 0, 0.0 if traits.streams else traits.keeps)


def filled(
    setting: Setting, traits: Traits, option: SizeOption, count: int, resident: float
) -> PolicyChoice | None:
    """Choose `count` micro-batches with as many weights on the accelerator as fit; None if they do not fit.

    Args:
        resident: number of micro-batches whose KV cache is on the accelerator.
    """
    fast = setting.machine.accelerator.memory
    free = {
        memory: setting.capacity(memory) - used
        for memory, used in used_bytes(option, count, resident).items()
    }
    none, all_of_them = (weight_bytes(setting, traits, resident_share) for resident_share in (0.0, 1.0))
    if all_of_them > none:
        resident_share = min(traits.keeps, (free[fast] - none) / (all_of_them - none))
    else:  # the buffer is as large as the weights that would stream through it
        resident_share = traits.keeps if free[fast] >= all_of_them else -1.0
    if resident_share < (0.0 if traits.streams else traits.keeps) or min(free.values()) < 0:
        return None
    return _choice(setting, traits, option, count, resident, resident_share)


def used_bytes(option: SizeOption, count: int, resident: float) -> dict[str, float]:
    """Return the bytes that `count` micro-batches take of each memory, without weights.

    Args:
        resident: number of micro-batches whose KV cache is on the accelerator.
    """
    here = option.resident or option.each
    return {
        memory: shared + (count - resident) * option.each.nbytes[memory] + resident * here.nbytes[memory]
        for memory, shared in option.shared.items()
    }


def weight_bytes(setting: Setting, traits: Traits, resident_share: float) -> float:
    """Return the bytes of an accelerator's memory for weights that stay and for a buffer of streamed weights.

    Args:
        resident_share: share of the weights that stays in accelerators' memories, from 0 to 1.
    """
    buffer = traits.buffer * setting.weight_bytes / setting.layout.config.layers
    return resident_share * setting.weight_bytes / traits.stages + (1 - resident_share) * buffer


class _Programme:
    """The variables and constraints of the mixed-integer programme.

    Between the iterations of the search, only the rate λ changes, and with it the objective.
    """

    def __init__(self, setting: Setting, traits: Traits, options: Sequence[SizeOption]) -> None:
        import highspy  # here, since most commands search nothing

        self._optimal = highspy.HighsModelStatus.kOptimal
        self._setting, self._traits, self._options = setting, traits, options
        self._weights = tuple(weight_bytes(setting, traits, resident_share) for resident_share in (0.0, 1.0))
        with silent(STDOUT):  # newer versions greet before they can be silenced
            self._model = model = highspy.Highs()
        model.silent()
        model.setOptionValue("threads", 1)  # the programme is small, and sweeps run one on each core
        self._taken = [model.addBinary() for _ in options]
        self._resident_share = model.addVariable(lb=0.0 if traits.streams else traits.keeps, ub=traits.keeps)
        self._step, self._prefill = model.addVariable(lb=0.0), model.addVariable(lb=0.0)
        model.addConstr(model.qsum(self._taken) == 1)
        self._counts = [
            self._add_counts(option, one) for option, one in zip(options, self._taken, strict=True)
        ]
        self._add_lanes()
        self._add_memories()

    def solve(self, rate: float) -> PolicyChoice | None:
        """Return the solution of the programme for λ = `rate` tokens per second; None if no sizes fit."""
        setting, model = self._setting, self._model
        tokens = model.qsum(
            setting.new_tokens * option.size * count
            for option, counts in zip(self._options, self._counts, strict=True)
            for _, count in counts
        )
        seconds = setting.layout.config.layers * (self._prefill + setting.new_tokens * self._step)
        model.maximize(tokens - rate * seconds)
        if model.getModelStatus() != self._optimal:
            return None
        number = next(i for i, one in enumerate(self._taken) if model.val(one) > 0.5)
        each, *resident = (round(model.val(count)) for _, count in self._counts[number])
        here = sum(resident)
        option = self._options[number]
        return _choice(setting, self._traits, option, each + here, here, model.val(self._resident_share))

    def _add_counts(self, option: SizeOption, taken: Any) -> list[tuple[MicroBatchCost, Any]]:
        """Add integer variables for the numbers of micro-batches of an option's size.

        If the policy splits the KV cache, there are two: the number of micro-batches with their cache on the host, and
        the number with their cache on the accelerator. Otherwise there is one. All are 0 unless the binary variable
        `taken` is 1.

        Returns:
            Pairs of a micro-batch's cost and the variable for the number of micro-batches.
        """
        model, share = self._model, self._setting.kv_on_gpu
        costs = [option.each] if option.resident is None else [option.each, option.resident]
        limits = [min(option.most, self._room(option, cost)) for cost in costs]
        counts = [model.addIntegral(lb=0, ub=limit) for limit in limits]
        for count, limit in zip(counts, limits, strict=True):
            model.addConstr(count - limit * taken <= 0)
        model.addConstr(model.qsum(counts) - taken >= 0)
        if len(costs) > 1:
            model.addConstr(model.qsum(counts) <= option.most)
        if share is not None and option.resident is not None:
            short = round(share, DIGITS) * model.qsum(counts) - counts[1]
            model.addConstr(short <= HALF)
            model.addConstr(short >= -HALF)
        return list(zip(costs, counts, strict=True))

    def _room(self, option: SizeOption, cost: MicroBatchCost) -> int:
        """Return the largest number of micro-batches that fits in the memories, beside the option's shared bytes.

        Args:
            cost: the cost of each micro-batch, with the KV cache on the host or on the accelerator.
        """
        rooms = [
            (self._setting.capacity(memory) - option.shared[memory]) // nbytes
            for memory, nbytes in cost.nbytes.items()
            if nbytes
        ]
        return max(0, min(rooms))

    def _sum(self, cost: Callable[[MicroBatchCost], float]) -> Any:
        """Return the sum of a cost over all micro-batches, as a linear expression of the variables.

        Args:
            cost: a function from a micro-batch's costs to one of them.
        """
        return self._model.qsum(cost(each) * count for counts in self._counts for each, count in counts)

    def _seconds(self, lane: str) -> Any:
        """Return the seconds of a lane for all micro-batches in one layer, as a linear expression of the variables.

        Args:
            lane: "link", "host" or "accelerator" in a decode step; "prefill" for the accelerator in the prefill.
        """
        return self._sum(lambda each: _solvable(getattr(each, lane)))

    def _add_lanes(self) -> None:
        model, traits = self._model, self._traits
        fetch = _solvable(traits.fetch)
        fetching = fetch - fetch * self._resident_share
        for lane in LANES:
            computing = self._seconds(lane)
            model.addConstr(self._step - computing - (fetching if lane == "link" else 0) >= 0)
        model.addConstr(self._prefill - fetching >= 0)
        model.addConstr(self._prefill - self._seconds("prefill") >= 0)

    def _add_memories(self) -> None:
        setting, model = self._setting, self._model
        machine = setting.machine
        for memory in machine.memories:
            used = self._sum(partial(_megabytes, memory))
            used += model.qsum(
                option.shared[memory] / MB * one
                for option, one in zip(self._options, self._taken, strict=True)
            )
            if memory == machine.accelerator.memory:
                none, all_of_them = self._weights
                used += (all_of_them - none) / MB * self._resident_share + none / MB
            model.addConstr(used <= setting.capacity(memory) / MB)


def _solvable(seconds: float) -> float:
    return seconds if seconds >= LEAST_SECONDS else 0.0


def _megabytes(memory: str, cost: MicroBatchCost) -> float:
    return cost.nbytes[memory] / MB


def _choice(
    setting: Setting, traits: Traits, option: SizeOption, count: int, resident: float, resident_share: float
) -> PolicyChoice:
    layers = setting.layout.config.layers
    here = option.resident or option.each

    def busy(lane: str) -> float:
        on_host: float = getattr(option.each, lane)
        on_gpu: float = getattr(here, lane)
        return (count - resident) * on_host + resident * on_gpu

    fetching = traits.fetch * (1 - resident_share)
    step = max(busy(lane) + (fetching if lane == "link" else 0) for lane in LANES)
    seconds = layers * (max(fetching, busy("prefill")) + setting.new_tokens * step)
    return PolicyChoice(
        micro_batch_size=option.size,
        micro_batches=count,
        chunk=option.chunk,
        resident=resident,
        throughput=setting.new_tokens * option.size * count / seconds,
    )
