"""Sizes of prefill chunks that the planner tries."""

from __future__ import annotations

from moesched.planner.schedules import with_chunk
from moesched.planner.setting import Setting

CHUNK = 4096
"""Tokens of a chunk of prefill: about the fewest that keep the kernels of most experts busy."""
SMALLEST_CHUNK = 64
"""Smallest number of tokens of a chunk whose size the planner chooses."""


def chunks_to_try(setting: Setting, size: int) -> list[int | None]:
    """Return the sizes of prefill chunks to try, in tokens, for micro-batches of `size` requests.

    If the setting has a chunk size, only that size is tried. Otherwise the list has None, for whole prompts, and also
    `CHUNK` if a micro-batch may have more tokens than that.
    """
    if setting.prefill_chunk is not None or size * max(setting.lengths) <= CHUNK:
        return [setting.prefill_chunk]
    return [None, CHUNK]


def smaller_chunks(setting: Setting, size: int) -> list[int]:
    """Return the sizes of chunks to try where none of `chunks_to_try` fits, in tokens, the largest first.

    The sizes are a half, a quarter and so on of `CHUNK`, as far as they are below `size` times the longest prompt's
    length. The list is empty if the setting has a chunk size.
    """
    if setting.prefill_chunk is not None:
        return []
    halvings = range(1, (CHUNK // SMALLEST_CHUNK).bit_length())
    return [CHUNK >> each for each in halvings if CHUNK >> each < size * max(setting.lengths)]


def with_room(setting: Setting) -> Setting:
    """Return the setting, with smaller prefill chunks if not even one request fits otherwise.

    The chunks are then the largest of `smaller_chunks` with which one request fits.

    Raises:
        BadInput: not even one request fits, whatever the size of chunks; the message names the memory and the missing
            bytes.
    """

    def fits(chunk: int | None) -> bool:
        cut = with_chunk(setting, chunk)
        return cut.fits(cut.batch(1, 1))

    if fits(chunks_to_try(setting, 1)[-1]):
        return setting
    smaller = smaller_chunks(setting, 1)
    if smaller and fits(smaller[-1]):
        return with_chunk(setting, next(filter(fits, smaller)))
    setting.plan(setting.batch(1, 1))  # a policy may take no chunks, and whole prompts only
    return setting
