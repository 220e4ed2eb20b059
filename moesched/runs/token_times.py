"""Computes the times to the first token and between tokens, of each request and of each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean

import msgspec

from moesched.requests.batch import Batch


class RequestTimes(msgspec.Struct, frozen=True):
    """Times of each request, in seconds. Each list has one entry for each request.

    Attributes:
        first_token_seconds: from the end of loading to the first token; None for a request without tokens.
        between_tokens_seconds: mean time between successive tokens; None for a request with fewer than two tokens.
        longest_between_tokens_seconds: longest time between successive tokens; None as for the mean.
    """

    first_token_seconds: list[float | None]
    between_tokens_seconds: list[float | None]
    longest_between_tokens_seconds: list[float | None]


class MicroBatchTimes(msgspec.Struct, frozen=True):
    """Times of a micro-batch in seconds; None if none of its requests has such a time.

    Attributes:
        requests: indices of its requests among all requests of the run.
        first_token_seconds, between_tokens_seconds: means over its requests.
        longest_between_tokens_seconds: the longest time between two tokens of any of its requests.
    """

    requests: list[int]
    first_token_seconds: float | None
    between_tokens_seconds: float | None
    longest_between_tokens_seconds: float | None


def request_times(
    batch: Batch,
    loaded: int,
    first_tokens: Mapping[int, int],
    sampled: Sequence[Mapping[int, int]],
    tokens: Sequence[int],
) -> RequestTimes:
    """Compute the times of a batch's requests.

    Args:
        loaded: the end of loading; all times are nanoseconds.
        first_tokens: the time of each request's first token, by request.
        sampled: for each decode step, the time at which a micro-batch's tokens were sampled, by the micro-batch's
            number; micro-batches that took no part are left out.
        tokens: the number of tokens that each request generated.
    """
    found = RequestTimes(*(_unknown(len(batch.prompts)) for _ in range(3)))
    for number, requests in enumerate(batch.micro_batches):
        ends = [step[number] for step in sampled if number in step]
        longest = list(accumulate((after - before for before, after in pairwise(ends)), max, initial=0))
        for request in requests:
            first = first_tokens.get(request)
            if first is None:
                continue
            found.first_token_seconds[request] = (first - loaded) / 1e9
            later = min(tokens[request] - 1, len(ends))
            if later > 0:
                found.between_tokens_seconds[request] = (ends[later - 1] - first) / later / 1e9
                found.longest_between_tokens_seconds[request] = max(ends[0] - first, longest[later - 1]) / 1e9
    return found


def micro_batch_times(batch: Batch, times: RequestTimes) -> list[MicroBatchTimes]:
    """Compute the times of a batch's micro-batches from the times of the requests."""
    return [
        MicroBatchTimes(
            [batch.first_request + request for request in requests],
            mean_of_known([times.first_token_seconds[request] for request in requests]),
            mean_of_known([times.between_tokens_seconds[request] for request in requests]),
            max(known([times.longest_between_tokens_seconds[request] for request in requests]), default=None),
        )
        for requests in batch.micro_batches
    ]


def merged(times: Sequence[RequestTimes | None], requests: int) -> RequestTimes | None:
    """Join the times of successive batches; None if the times of a batch are not known.

    requests: number of requests in all batches; those that never ran get None.
    """
    if any(each is None for each in times):
        return None
    columns = zip(*(msgspec.structs.astuple(each) for each in times if each is not None), strict=True)
    joined = ([seconds for column in each for seconds in column] for each in columns)
    return RequestTimes(*(each + [None] * (requests - len(each)) for each in joined))


def known(seconds: Sequence[float | None]) -> list[float]:
    """Return the times that are not None."""
    return [each for each in seconds if each is not None]


def mean_of_known(seconds: Sequence[float | None]) -> float | None:
    """Return the mean of the times that are not None; None if all are."""
    found = known(seconds)
    return fmean(found) if found else None


def _unknown(count: int) -> list[float | None]:
    return [None] * count
