"""Computes MoE-Lightning's Hierarchical Roofline Model (section 3): bounds on FLOP/s if data is in a lower memory.

Symbols, as in the paper: i is the upper level (an accelerator and its memory), j the lower level (the host and its
memory, or a disk, where nothing computes); P is the peak FLOP/s of a level's processor, B the bytes/s from its memory,
and B^{j,i} the bytes/s of the link from j to i. I^i and I^j are a computation's operational intensities: its FLOPs over
the bytes that it accesses in the memory of that level (Definition 3.1), in FLOP/byte. N requests are a batch, µ of them
a micro-batch.

FLOPs and bytes are counted by `moesched.models.operations`, as in simulations: they include activations, which the
paper omits, and only the experts that a small batch reaches.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.operations import Amount, Operations

KV_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes per element of the KV cache by dtype, without scales of quantised caches."""

LARGEST_BATCH = 1 << 40


class Level(msgspec.Struct, frozen=True):
    """A memory and the processor beside it.

    Attributes:
        name: name of the memory.
        peak: P, FLOP/s; 0 where nothing computes.
        bandwidth: B, bytes per second.
    """

    name: str
    peak: float
    bandwidth: float


class Hierarchy(msgspec.Struct, frozen=True):
    """Two memory levels, and the bandwidth B^{j,i} of the link from the lower to the upper one, in bytes per second."""

    upper: Level
    lower: Level
    link: float

    @property
    def link_name(self) -> str:
        """Name of the link: "lower->upper", with the names of the memories."""
        return f"{self.lower.name}->{self.upper.name}"


class Intensity(msgspec.Struct, frozen=True):
    """FLOPs of a computation per byte that it accesses in each level's memory: I^i and I^j (Definition 3.1)."""

    upper: float
    lower: float


class Bound(msgspec.Struct, frozen=True, order=True):
    """The attainable FLOP/s of a computation, and the name of the limiting roof, such as "gpu memory"."""

    performance: float
    by: str


# -- roofs and points (section 3.2) ------------------------------------------------------------------------------------


def ridge(level: Level) -> float:
    """Return a level's ridge: the FLOP/byte above which the processor, not the memory, limits a computation (Eq. 3)."""
    return level.peak / level.bandwidth


def in_place(level: Level, intensity: float) -> Bound:
    """Bound the FLOP/s of a computation of `intensity` FLOP/byte on the level whose memory holds its data (Eq. 8)."""
    return min(
        Bound(level.peak, f"{level.name} compute"),
        Bound(level.bandwidth * intensity, f"{level.name} memory"),
    )


def fetched(hierarchy: Hierarchy, intensity: Intensity) -> Bound:
    """Bound the FLOP/s of a computation on the upper level with data fetched from the lower level (Eqs. 6 and 7)."""
    return min(
        Bound(hierarchy.link * intensity.lower, hierarchy.link_name),
        in_place(hierarchy.upper, intensity.upper),
    )


def first_turning_point(hierarchy: Hierarchy) -> float:
    """Return P1 (Eq. 9): the intensity I^j, in FLOP per byte of the lower memory, up to which fetching never pays.

    P1 is where the roof of the link, B^{j,i} I, meets the roof of the lower level, min(P^j, B^j I). If the link is
    slower than the lower memory, the two meet at the lower level's peak, P^j. Otherwise the link's roof is nowhere
    below the roof of the lower level, and P1 is 0.
    """
    if hierarchy.link >= hierarchy.lower.bandwidth:
        return 0.0
    return hierarchy.lower.peak / hierarchy.link


def second_turning_point(hierarchy: Hierarchy, upper_intensity: float) -> float:
    """Return P2 (Eq. 10): the intensity I^j, in FLOP per byte of the lower memory, above which the link limits nothing.

    If the link is slower than the lower memory, and the upper level attains fewer FLOP/s at intensity I^i than the
    lower level's peak, then P2 is below P1 (`first_turning_point`), and fetching never pays.

    Args:
        upper_intensity: I^i, the computation's FLOPs per byte of the upper memory.
    """
    return in_place(hierarchy.upper, upper_intensity).performance / hierarchy.link


def balance_point(hierarchy: Hierarchy, upper_intensity: float) -> float | None:
    """Return the intensity I^j, in FLOP per byte of the lower memory, at which link and upper memory limit equally.

    This is the paper's Eq. 11. None if the upper level's processor limits before its memory does.

    Args:
        upper_intensity: I^i, the computation's FLOPs per byte of the upper memory.
    """
    intensity = hierarchy.upper.bandwidth * upper_intensity / hierarchy.link
    return intensity if upper_intensity <= ridge(hierarchy.upper) else None


def pays_to_fetch(hierarchy: Hierarchy, intensity: Intensity) -> bool:
    """Test whether fetching data to the upper level and computing there is faster than computing on the lower level."""
    return fetched(hierarchy, intensity).performance > in_place(hierarchy.lower, intensity.lower).performance


# -- computations (section 3.3) ----------------------------------------------------------------------------------------


def attention_intensity(operations: Operations, context: int, kv_dtype: str) -> Intensity:
    """Return the intensity of one new token's attention over `context` cached tokens, without projections (Fig. 4).

    The intensity does not depend on the batch, since every request has a cache of its own. The bytes of the upper level
    are those of the cache, the queries read and the outputs written; those of the lower level are the cache alone.
    """
    amount, cache = _attention(operations, 1, context, kv_dtype)
    return Intensity(amount.flops / amount.nbytes, amount.flops / cache)


def ffn_intensity(operations: Operations, batch_size: int, micro_batch_size: int) -> Intensity:
    """Return the intensity of all experts of a layer, in FLOP/byte, for one new token of each request (Fig. 5).

    The upper level reads weights and activations once per micro-batch. The weights are read from the lower level once
    for the whole batch. Both sizes are numbers of requests.
    """
    upper = operations.experts(min(micro_batch_size, batch_size))
    return Intensity(
        upper.flops / upper.nbytes,
        operations.experts(batch_size).flops / touched_expert_bytes(operations, batch_size),
    )


def touched_expert_bytes(operations: Operations, tokens: int) -> float:
    """Return the expected bytes of weights of those experts of a layer that at least one of `tokens` tokens chooses."""
    return sum(part.size * part.times for part in operations.experts(tokens).parts)


def batch_reaching(operations: Operations, lower_intensity: float) -> int | None:
    """Return the smallest number of requests whose FFN reaches an operational intensity; None if none does.

    Args:
        lower_intensity: the paper's I^j, in FLOP per byte of the lower level's memory (the host's).
    """

    def reached(batch: int) -> float:
        return ffn_intensity(operations, batch, 1).lower

    batch = bisect_left(range(1, LARGEST_BATCH), lower_intensity, key=reached) + 1
    return batch if batch < LARGEST_BATCH else None


# -- time of a layer (section 4.2) -------------------------------------------------------------------------------------


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Division of a layer's decode work between the levels of a `Hierarchy`: the 6-tuple of the paper's section 4.2.

    Attributes:
        batch_size, micro_batch_size: N and µ, numbers of requests.
        attention_on_gpu, ffn_on_gpu: A_g and F_g, whether the upper level computes attention and FFN.
        weights_on_gpu, kv_on_gpu: r_w and r_c, the shares of the experts' weights and of the KV cache, from 0 to 1,
            that stay in the upper memory and are not fetched. r_w counts only if F_g is true, r_c only if A_g is.
    """

    batch_size: int
    micro_batch_size: int
    attention_on_gpu: bool = False
    ffn_on_gpu: bool = True
    weights_on_gpu: float = 0.0
    kv_on_gpu: float = 0.0


class LayerTime(msgspec.Struct, frozen=True):
    """Busy seconds of the link, the lower level and the upper level for one layer of a decode step."""

    link: float
    lower: float
    upper: float

    @property
    def seconds(self) -> float:
        """Seconds of the layer if link and both levels overlap (Eq. 12): the longest of the three."""
        return max(self.link, self.lower, self.upper)


def compute_seconds(level: Level, amount: Amount) -> float:
    """Return the seconds of a computation on a level, where reading memory and computing overlap (Eq. 14).

    Args:
        amount: FLOPs and bytes of the computation.

    Raises:
        BadInput: the level has no processor.
    """
    if not level.peak:
        raise BadInput(f"nothing computes on {level.name}: leave attention and FFN to the upper level")
    return max(amount.nbytes / level.bandwidth, amount.flops / level.peak)


def layer_time(
    hierarchy: Hierarchy, operations: Operations, split: Split, context: int, kv_dtype: str
) -> LayerTime:
    """Return the time of attention and FFN of one layer in a decode step (Eqs. 12 to 14).

    The link carries weights and KV cache that the upper level needs and does not hold, and outputs of the lower level.
    As in the paper, projections are omitted.

    Args:
        context: tokens in the cache of each request.
        kv_dtype: number format of the KV cache.

    Raises:
        BadInput: the split lets the lower level compute, but it has no processor.
    """
    batch = split.batch_size
    attention, cache = _attention(operations, batch, context, kv_dtype)
    seconds = {True: 0.0, False: 0.0}
    levels = {True: hierarchy.upper, False: hierarchy.lower}
    seconds[split.attention_on_gpu] += compute_seconds(levels[split.attention_on_gpu], attention)
    for count, size in _micro_batches(split):
        experts = operations.experts(size)
        seconds[split.ffn_on_gpu] += count * compute_seconds(levels[split.ffn_on_gpu], experts)
    weights = (1 - split.weights_on_gpu) * touched_expert_bytes(operations, batch)
    moved = weights if split.ffn_on_gpu else batch * operations.hidden_bytes
    moved += (1 - split.kv_on_gpu) * cache if split.attention_on_gpu else batch * operations.attention_bytes
    return LayerTime(moved / hierarchy.link, seconds[False], seconds[True])


# -- machines ----------------------------------------------------------------------------------------------------------


def hierarchy_of(machine: Machine, dtype: str) -> Hierarchy:
    """Return the two levels of a machine: the accelerator above the host.

    If accelerator and host share a memory, that memory is the upper level, and the memory that holds the weights is the
    lower one. Several equal accelerators count as one with the sum of their rates, as with tensor parallelism (section
    4.3). Each has its own link, but the links together are no faster than the lower memory or, if pages are staged in
    pinned memory, than copies into pinned memory.

    Raises:
        BadInput: the machine has no memory below the accelerator's, or lacks the link or a rate.
    """
    below = machine.roles.weights if machine.unified else machine.host.memory
    above = machine.accelerator.memory
    if below == above:
        raise BadInput(f"machine {machine.name} has nothing below its memory {above!r}: describe its disk")
    count = machine.accelerator_group.count
    lower_peak = 0.0 if machine.unified else machine.peak(machine.roles.host, dtype)
    return Hierarchy(
        Level(
            above,
            count * machine.peak(machine.roles.accelerator, dtype),
            count * machine.memories[above].bandwidth,
        ),
        Level(below, lower_peak, machine.memories[below].bandwidth),
        min(machine.memories[below].bandwidth, _fetching_bandwidth(machine, below, above)),
    )


def _fetching_bandwidth(machine: Machine, below: str, above: str) -> float:
    """Return the bytes per second from one memory into all accelerators together.

    If the machine has a pinned memory other than the memory that is read, pages are copied through the pinned one.

    Args:
        below, above: names of the memory that is read, and of the accelerator's memory.
    """
    count = machine.accelerator_group.count
    pinned = machine.roles.pinned
    if pinned is None or pinned == below:
        return count * machine.link(below, above).bandwidth
    return min(machine.link(below, pinned).bandwidth, count * machine.link(pinned, above).bandwidth)


def _attention(operations: Operations, requests: int, context: int, kv_dtype: str) -> tuple[Amount, float]:
    """Return the FLOPs and bytes of one layer's attention for one new token of each request.

    The second result is the part of these bytes that is the KV cache of all requests.

    Args:
        context: tokens in the cache of each request.
        kv_dtype: number format of the cache.
    """
    amount = operations.attention_step([context])
    around = operations.qkv_bytes + operations.attention_bytes
    cache = (amount.nbytes - around) * KV_BYTES[kv_dtype] / operations.element
    return Amount(requests * amount.flops, requests * (cache + around)), requests * cache


def _micro_batches(split: Split) -> list[tuple[int, int]]:
    """Return (number of micro-batches, requests in each) for each size of micro-batch in a batch."""
    whole, rest = divmod(split.batch_size, split.micro_batch_size)
    return [(count, size) for count, size in ((whole, split.micro_batch_size), (1, rest)) if count and size]
