"""Finds default sizes of batches, micro-batches and chunks: the sizes with the most tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.inputs.options import SizeOptions
from moesched.models.kv_blocks import KV_BLOCK_TOKENS, cached_tokens_of_beams
from moesched.planner.candidate import MOST_CHUNKS, Candidate
from moesched.planner.chunks import CHUNK, chunks_to_try, smaller_chunks
from moesched.planner.schedules import Schedule, SchedulePoint, Schedules, resident_of, with_chunk
from moesched.planner.setting import Setting
from moesched.requests.batching import BatchSizes, batches_of
from moesched.steps.plan import Plan
from moesched.steps.roles import KV_ROLES

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of micro-batches that a batch of a given size may be cut into."""
MOST_AT_ONCE = 8
"""All requests are tried as one batch if they fill at most this number of the planner's batches."""
FASTER = 1.05
"""Factor by which other batches must be faster, over all requests, to replace those with the highest throughput."""
AS_FAST = 1.02
"""Several batches must be faster than a single one by more than this factor."""
BETTER = 1.001
"""Smaller micro-batches must be faster than larger ones by more than this factor."""
MOST_WORSE = 2
"""The search ends after this number of micro-batch sizes in a row without an improvement."""


def choose_sizes(
    setting: Setting, wanted: SizeOptions | None = None, *, successive: bool = True
) -> BatchSizes:
    """Choose the sizes with which a policy is fastest; sizes that the user gave are kept.

    Prompts that are too long to fit are prefilled in chunks of as many tokens as fit.

    Args:
        setting: the policy's setting, with the prompt lengths of all requests in order of arrival.
        wanted: the sizes that the user gave; None if the user gave none.
        successive: True if successive batches run all requests, and must all fit; False if only the first must fit.

    Raises:
        BadInput: a wanted size is below 1, or not even one request fits; the message names the memory and the missing
            bytes.
    """
    wanted = wanted or SizeOptions()
    batch_size, micro_batch_size = wanted.batch_size, wanted.micro_batch_size
    _require_few_chunks(setting, batch_size or 1)
    chunks = [setting.prefill_chunk, *smaller_chunks(setting, micro_batch_size or 1)]
    for number, chunk in enumerate(chunks):
        try:
            return _sizes(with_chunk(setting, chunk), batch_size, micro_batch_size, successive)
        except BadInput:
            if number + 1 == len(chunks):
                raise
    raise AssertionError("the last one was returned or raised")


def _require_few_chunks(setting: Setting, batch_size: int) -> None:
    """Refuse prefill chunks so small that a batch of the longest prompts would take minutes to plan.

    Raises:
        BadInput: the setting's chunks are that small; the message names the smallest size to give.
    """
    if setting.prefill_chunk is None:
        return
    tokens = sum(sorted(setting.lengths, reverse=True)[:batch_size])
    least = -(-tokens // MOST_CHUNKS)
    if setting.prefill_chunk < least:
        raise BadInput(
            f"--prefill-chunk is {setting.prefill_chunk:,}, and the batch has up to {tokens:,} prompt tokens: give "
            f"{1 << (least - 1).bit_length():,} or more, or omit it"
        )


def _sizes(
    setting: Setting, batch_size: int | None, micro_batch_size: int | None, successive: bool
) -> BatchSizes:
    """Choose the sizes that are None; prefill chunks in the setting are kept.

    Args:
        batch_size, micro_batch_size: numbers of requests.
        successive: True if successive batches run all requests, and must all fit; False if only the first must fit.
    """
    count = len(setting.lengths)
    if batch_size is None and count > 1:
        return _search(setting, micro_batch_size, successive)
    return _of_batch(setting, min(batch_size or 1, count), micro_batch_size)


def _search(setting: Setting, given: int | None, successive: bool) -> BatchSizes:
    """Search for the sizes with the highest throughput.

    Args:
        given: number of requests of a micro-batch; fewer are taken if that many do not fit. None to choose the number.
        successive: True if successive batches run all requests, and must all fit; False if only the first must fit.
    """
    asked = setting
    if given is not None:
        given = min(given, len(setting.lengths))
        if not setting.fits(setting.batch(1, given)):
            size = _largest(given, lambda size: setting.fits(setting.batch(1, size)))
            setting.plan(setting.batch(1, size))  # if not even this one fits, the caller tries smaller chunks
            sizes = BatchSizes(size, size, beams=setting.beams, prefill_chunk=setting.prefill_chunk)
            return _fit_all(setting, sizes) if successive else sizes
    if successive:  # the first batches tell about the others
        setting = replace(setting, lengths=tuple(Random(0).sample(setting.lengths, len(setting.lengths))))
    candidate = Candidate("that was asked for", setting, [given] if given else None)
    schedule = candidate.search()
    if successive and schedule.batch_size < len(setting.lengths) <= MOST_AT_ONCE * schedule.batch_size:
        schedule = _rather_all(setting, candidate, schedule)
    sizes = sizes_of(setting, schedule)
    takes_chunks = any(each.chunk for each in candidate.schedules.best_first)
    return _fit_all(asked, sizes, CHUNK if takes_chunks else None) if successive else sizes


def sizes_of(setting: Setting, schedule: Schedule) -> BatchSizes:
    """Convert a simulated schedule's sizes to the `BatchSizes` that make the policy's batches run in the same way."""
    share = schedule.kv_on_gpu if setting.splits_kv else None
    cut = with_chunk(setting, schedule.chunk)
    plan, _ = cut.plan(cut.batch(schedule.point.micro_batches, schedule.micro_batch_size), kv_on_gpu=share)
    return BatchSizes(
        schedule.batch_size,
        schedule.micro_batch_size,
        _cache_tokens(plan, setting),
        share,
        setting.beams,
        schedule.chunk,
    )


def _rather_all(setting: Setting, candidate: Candidate, schedule: Schedule) -> Schedule:
    """Return the schedule that takes the least time for all requests, in one batch or in several successive batches.

    A single batch is preferred: its throughput is multiplied by `AS_FAST` in the comparison. The last of several
    batches is assumed to take as long as a full one, even if it has fewer requests.

    Args:
        schedule: the schedule with the highest throughput; it is returned unless another takes less time for all
            requests by more than a factor of `FASTER`.
    """
    requests = len(setting.lengths)
    count = -(-requests // schedule.micro_batch_size)
    share = schedule.point.resident / schedule.point.micro_batches
    candidate.schedules.at(
        schedule.point._replace(micro_batches=count, resident=resident_of(share, count)), deep=schedule.whole
    )

    def rate(schedule: Schedule) -> float:
        batches = -(-requests // schedule.batch_size)
        filled = requests / (batches * schedule.batch_size)
        return schedule.throughput * filled * (AS_FAST if batches == 1 else 1.0)

    best = max(candidate.schedules.best_first, key=rate)
    return best if rate(best) > FASTER * rate(schedule) else schedule


def _cache_tokens(plan: Plan, setting: Setting) -> int:
    """Return the most tokens that each micro-batch may have in the KV cache at the end of its generation.

    In each memory, the micro-batches whose cache is there get equal shares of the bytes that are free or reserved for
    caches. The result is the number of tokens in the smallest share. It is never less than the plan's largest
    micro-batch, or the longest request, has at the end of its generation.
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


def _fit_all(setting: Setting, sizes: BatchSizes, chunk: int | None = None) -> BatchSizes:
    """Reduce sizes until every batch, with its own prompt lengths, fits.

    If not all fit, prompts are first cut into chunks. If some still do not fit, batches are made smaller.

    Args:
        sizes: the sizes to begin with; a size of prefill chunks in them is kept.
        chunk: largest number of tokens of a chunk; None if the policy takes no chunks.
    """

    def fit(sizes: BatchSizes) -> bool:
        batches = batches_of(setting.lengths, setting.new_tokens, sizes)
        return all(setting.fits(batch, sizes.kv_on_gpu) for batch in batches)

    if sizes.prefill_chunk is None and chunk is not None and not fit(sizes):
        sizes = sizes._replace(prefill_chunk=chunk)
    while sizes.batch_size > 1 and not fit(sizes):
        batch_size = sizes.batch_size - -(-sizes.batch_size // 16)
        sizes = sizes._replace(
            batch_size=batch_size, micro_batch_size=min(sizes.micro_batch_size, batch_size)
        )
    return sizes


def _of_batch(setting: Setting, batch_size: int, given: int | None) -> BatchSizes:
    """Choose the sizes with which a batch of the longest requests fits and runs fastest.

    Args:
        batch_size: number of requests.
        given: requests of a micro-batch; None to choose them.

    Raises:
        BadInput: no such batch fits.
    """
    longest = tuple(sorted(setting.lengths, reverse=True)[:batch_size])
    setting = replace(setting, lengths=longest)
    schedules = Schedules(setting)
    sizes = [min(given, batch_size)] if given else list(_even_sizes(batch_size))
    best: Schedule | None = None
    fitting: SchedulePoint | None = None
    worse = 0
    for size in sizes:
        lines = [line for chunk in chunks_to_try(setting, size) if (line := _shares(setting, size, chunk))]
        fitting = fitting or next((line[0] for line in lines), None)
        if len(sizes) == len(lines) == 1 and len(lines[0]) == 1:
            return _batch_sizes(setting, lines[0][0])
        found = []
        for line in lines:
            with suppress(BadInput):  # a policy may take no chunks
                found.append(_fastest(schedules, line))
        better = [
            schedule for schedule in found if best is None or schedule.throughput > best.throughput * BETTER
        ]
        if better:
            best, worse = max(better, key=lambda schedule: schedule.throughput), 0
        elif best is not None and (worse := worse + 1) == MOST_WORSE:
            break
    if fitting is None:
        setting.plan(setting.batch(-(-batch_size // sizes[-1]), sizes[-1]))
        raise AssertionError("its plan was refused before")
    return _batch_sizes(setting, fitting if best is None else best.point)


def first_schedule(setting: Setting, size: int) -> Schedule | None:
    """Simulate all requests in micro-batches of `size` requests; returns the schedule, None if they do not fit.

    Prompts pass in chunks if the policy takes chunks. If the share of the KV cache on the accelerator is not given, the
    share with the highest throughput is taken.
    """
    schedules = Schedules(setting)
    for chunk in reversed(chunks_to_try(setting, size)):
        if line := _shares(setting, size, chunk):
            with suppress(BadInput):  # a policy may take no chunks
                return _fastest(schedules, line)
    return None


def _batch_sizes(setting: Setting, point: SchedulePoint) -> BatchSizes:
    """Return the sizes of a batch of all requests, with the micro-batches, chunks and KV cache share of `point`."""
    share = point.resident / point.micro_batches if setting.searches_shares else None
    return BatchSizes(len(setting.lengths), point.size, None, share, setting.beams, point.chunk)


def _shares(setting: Setting, size: int, chunk: int | None) -> list[SchedulePoint]:
    """Return sizes for all requests in micro-batches of `size`, prefilled in chunks of `chunk` tokens (None: whole).

    The list has one point for each share of the KV cache on the accelerator that fits: each tenth, or the setting's
    fixed share.
    """
    cut, count = with_chunk(setting, chunk), -(-len(setting.lengths) // size)
    batch = cut.batch(count, size)
    if not setting.searches_shares:
        share = setting.kv_on_gpu or 0.0
        return [SchedulePoint(size, count, resident_of(share, count), chunk)] if cut.fits(batch) else []
    parts = setting.layout.config.layers if count == 1 else count
    numbers = sorted({round(parts * tenth / 10) for tenth in range(11)})
    shares = [number / parts for number in numbers if cut.fits(batch, number / parts)]
    return [SchedulePoint(size, count, resident_of(share, count), chunk) for share in shares]


def _fastest(schedules: Schedules, line: Sequence[SchedulePoint]) -> Schedule:
    """Return the fastest schedule with sizes in `line`.

    The sizes differ in one number only, and are in ascending order of that number. The search begins with the faster of
    the first and the last sizes, and goes on towards the other end until a schedule is slower.

    Raises:
        BadInput: some sizes do not fit, or the policy takes no chunks.
    """
    ahead = list(line)
    if schedules.at(line[-1]).throughput > schedules.at(line[0]).throughput:
        ahead.reverse()
    found = schedules.at(ahead[0])
    for point in ahead[1:]:
        schedule = schedules.at(point)
        if schedule.throughput < found.throughput:
            break
        found = schedule
    return found


def _even_sizes(batch_size: int) -> Iterator[int]:
    """Yield sizes of micro-batches that divide a batch of `batch_size` requests evenly, the largest first."""
    yield from dict.fromkeys(-(-batch_size // count) for count in COUNTS)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `limit` - 1 for which `fits` is true; 1 if it is true for none.

    Below a number that fits, all numbers must fit.
    """
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
