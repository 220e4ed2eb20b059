"""A native call that joins MXFP4 codes and scales, which some files keep apart."""

from __future__ import annotations

from ..shared.mxfp4_rows import Bytes, Join, join_by_arrays
from .compiled import library, why_unusable


def fastest_join() -> Join:
    """Return the fastest function on this machine that joins MXFP4 codes and scales."""
    return join_by_arrays if why_unusable() else join_by_library


def join_by_library(codes: Bytes, scales_G: Bytes, joined_GB: Bytes) -> None:
    """Join MXFP4 codes and scales into `joined_GB` as `join_by_arrays` of `mxfp4_rows.py` does, eight times as fast."""
    addresses = (each.ctypes.data for each in (codes, scales_G, joined_GB))
    library().moesched_join_mxfp4(len(scales_G), *addresses)
