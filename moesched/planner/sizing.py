"""Default sizes: those with which a policy generates the most tokens per second, by the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.inputs.options import SizeOptions
from moesched.planner.candidate import Candidate
from moesched.planner.schedules import Seen, resident_of
from moesched.planner.setting import Setting
from moesched.planner.trial_run import trial_run
from moesched.requests.batch import KV_BLOCK_TOKENS, Batch, cached_tokens_of_beams
from moesched.requests.batching import BatchSizes, batches_of
from moesched.steps.plan import Plan
from moesched.steps.roles import KV_ROLES

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of micro-batches that a batch of a given size may be cut into."""
MOST_AT_ONCE = 8
"""All requests are tried as one batch if they fill at most this number of the planner's batches."""
AS_FAST = 1.02
"""Factor by which several batches must beat a single one."""
BETTER = 1.001
"""Factor by which smaller micro-batches must beat larger ones."""
MOST_WORSE = 2
"""The search ends after this number of counts in a row without an improvement."""


SMALLEST_CHUNK = 64
"""Least number of tokens of an automatic chunk."""


def choose_sizes(
    setting: Setting, wanted: SizeOptions | None = None, *, successive: bool = True
) -> BatchSizes:
    """Fill in sizes that are None with the planner's best.

    Prompts that do not fit as a whole pass a layer in chunks, of as many tokens as fit.

    Args:
        setting: its lengths are those of all requests, in order of arrival.
        successive: whether all requests run, in successive batches; else only the first batch must fit.

    Raises:
        BadInput: a wanted size is below 1, or not even one request fits; the message names the memory and the missing
            bytes.
    """
    wanted = wanted or SizeOptions()
    wanted.require_sensible()
    batch_size, micro_batch_size = wanted.batch_size, wanted.micro_batch_size
    chunks: list[int | None] = [setting.prefill_chunk]
    if setting.prefill_chunk is None:
        chunks += _smaller_chunks(max(setting.lengths) * (micro_batch_size or 1))
    for number, chunk in enumerate(chunks):
        cut = replace(setting, prefill_chunk=chunk)
        try:
            sizes = _sizes(cut, batch_size, micro_batch_size, successive)
            if len(chunks) > 1:
                cut.plan(next(batches_of(cut.lengths, cut.new_tokens, sizes)))
        except BadInput:
            if number + 1 == len(chunks):
                raise
        else:
            return sizes
    raise AssertionError("the last one was returned or raised")


def _smaller_chunks(tokens: int) -> list[int]:
    """Powers of two below that number of tokens, the largest first."""
    return [
        1 << power for power in range(tokens.bit_length(), 5, -1) if SMALLEST_CHUNK <= 1 << power < tokens
    ]


def _sizes(
    setting: Setting, batch_size: int | None, micro_batch_size: int | None, successive: bool
) -> BatchSizes:
    """Choose sizes for the setting's chunks."""
    count = len(setting.lengths)
    if batch_size is None and count > 1:
        found = _search(setting, micro_batch_size, successive)
        found = found._replace(beams=setting.beams, prefill_chunk=setting.prefill_chunk)
        return _fit_all(setting, found) if successive else found
    batch_size = min(batch_size or 1, count)
    size = min(micro_batch_size or _best_micro_batch(setting, batch_size), batch_size)
    return BatchSizes(batch_size, size, beams=setting.beams, prefill_chunk=setting.prefill_chunk)


def _search(setting: Setting, given: int | None, successive: bool) -> BatchSizes:
    """The planner's sizes; if the size of micro-batches is given, only their number."""
    if given is not None:
        given = min(given, len(setting.lengths))
        if not _fits(setting, setting.batch(1, given)):
            size = _largest(given, lambda size: _fits(setting, setting.batch(1, size)))
            return BatchSizes(size, size)
    candidate = Candidate("that was asked for", setting, [given] if given else None)
    seen = candidate.look()
    if successive and seen.batch_size < len(setting.lengths) <= MOST_AT_ONCE * seen.batch_size:
        seen = _rather_all(setting, candidate, seen)
    batch_size, size = seen.batch_size, seen.micro_batch_size
    share = seen.kv_on_gpu if setting.splits_kv else None
    plan, _ = setting.plan(setting.batch(-(-batch_size // size), size), kv_on_gpu=share)
    return BatchSizes(batch_size, size, _cache_tokens(plan, setting), share)


def _rather_all(setting: Setting, candidate: Candidate, seen: Seen) -> Seen:
    """All requests in one batch, if they fit and one batch is about as fast as several."""
    requests, size = len(setting.lengths), seen.micro_batch_size
    count = -(-requests // size)
    at_once = candidate.schedules.see(size, count, resident_of(seen.kv_on_gpu, count))
    batches = -(-requests // seen.batch_size)
    in_turn = (
        seen.throughput * requests / (batches * seen.batch_size)
    )  # the last batch takes as long as a full one
    return at_once if at_once.throughput * AS_FAST >= in_turn else seen


def _cache_tokens(plan: Plan, setting: Setting) -> int:
    """Tokens that a micro-batch may have in the KV cache: its share of the reserved and the free bytes.

    It is at least what the plan's largest micro-batch has, and the longest request alone.
    """
    token = max(1, sum(each.kv_bytes for each in plan.operations.by_layer))
    at_end = list(map(plan.batch.tokens_at_end, plan.batch.micro_batches))
    shares = []
    for role in KV_ROLES:
        if cached := plan.kv.held_by(role):
            tokens = sum(at_end[number] for number in cached) + plan.free(role) // token
            shares.append(tokens // len(cached) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS)
    alone = cached_tokens_of_beams(max(setting.lengths), setting.new_tokens, setting.beams)
    return max(min(shares), *at_end, alone)


def _fit_all(setting: Setting, sizes: BatchSizes) -> BatchSizes:
    """The same sizes, or a smaller batch if later batches, whose lengths differ, would not fit."""
    while sizes.batch_size > 1 and not all(
        _fits(setting, batch, sizes.kv_on_gpu)
        for batch in batches_of(setting.lengths, setting.new_tokens, sizes)
    ):
        batch_size = sizes.batch_size - -(-sizes.batch_size // 16)
        sizes = sizes._replace(
            batch_size=batch_size, micro_batch_size=min(sizes.micro_batch_size, batch_size)
        )
    return sizes


def _best_micro_batch(setting: Setting, batch_size: int) -> int:
    """The micro-batches with which a batch of the longest requests runs fastest, of those that fit."""
    longest = tuple(sorted(setting.lengths, reverse=True)[:batch_size])
    setting = replace(setting, lengths=longest)
    if batch_size == 1:
        return 1
    best, most, worse = 0, 0.0, 0
    for size in _shares(batch_size):
        batch = setting.batch(-(-batch_size // size), size)
        try:
            plan, policy = setting.plan(batch)
        except BadInput:
            continue
        throughput = trial_run(plan, policy, setting.cost).tokens_per_second(batch)
        if throughput > most * BETTER:
            best, most, worse = size, throughput, 0
            continue
        worse += 1
        if worse == MOST_WORSE:
            break
    return best or _largest(
        batch_size, lambda size: _fits(setting, setting.batch(-(-batch_size // size), size))
    )


def _shares(batch_size: int) -> Iterator[int]:
    """Sizes that cut a batch evenly, the largest first."""
    yield from dict.fromkeys(-(-batch_size // count) for count in COUNTS)


def _fits(setting: Setting, batch: Batch, kv_on_gpu: float | None = None) -> bool:
    try:
        setting.plan(batch, kv_on_gpu=kv_on_gpu)
    except BadInput:
        return False
    return True


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `limit` that fits, at least 1; all numbers below one that fits must fit too."""
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
