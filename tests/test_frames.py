"""Frames on the wire: their bytes, and data that is not a frame."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moesched.errors import TransportError
from moesched.transports.frames import DTYPES, TEXT_BYTES, BadFrame, Frame, Kind, cut, pack, unpack


@given(
    st.sampled_from([Kind.ALL_REDUCE, Kind.BROADCAST, Kind.GATHER]),
    arrays.arrays(
        st.sampled_from(DTYPES), arrays.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=3)
    ),
    st.text(max_size=40),
    st.integers(0, 2**64 - 1),
)
def test_a_frame_comes_out_as_it_went_in(kind: Kind, array: Any, text: str, epoch: int) -> None:
    sent = Frame(kind, kind, 3, epoch, 7, 9, -1, 2, 1, shape=array.shape, text=text, values=array.reshape(-1))
    data = pack(sent)
    found = unpack(data)
    assert msgspec.structs.replace(found, values=None) == msgspec.structs.replace(sent, values=None)
    assert (found.values.dtype, found.values.tobytes()) == (array.dtype, array.tobytes())


def test_large_frames_are_put_together_alike() -> None:
    values = np.arange(100_000, dtype=np.float32)
    found = unpack(pack(Frame(Kind.GATHER, Kind.GATHER, 0, shape=(100, 1000), text="large", values=values)))
    assert (found.shape, found.text, found.values.tolist()) == ((100, 1000), "large", values.tolist())


def test_a_frame_lies_at_the_places_that_the_docs_say() -> None:
    data = pack(Frame(Kind.ALL_REDUCE, Kind.ALL_REDUCE, 258, shape=(2,), text="t", values=np.ones(2, "<f4")))
    assert (data[:4], data[4], data[6:8], len(data)) == (b"MoEx", 2, b"\x02\x01", 96 + 16 + 8)


def test_long_texts_are_cut_and_stay_different() -> None:
    one, other = cut("x" * 9000 + "1"), cut("x" * 9000 + "2")
    assert one != other
    assert len(one.encode()) <= TEXT_BYTES


@pytest.mark.parametrize("array", [np.array([object()]), np.ones((1,) * 9), np.array(["text"])])
def test_what_is_no_array_of_numbers_cannot_be_sent(array: Any) -> None:
    with pytest.raises(TransportError, match="cannot be sent"):
        pack(Frame(Kind.GATHER, Kind.GATHER, 0, shape=array.shape, values=array.reshape(-1)))


@pytest.mark.parametrize("dtype", ["<c8", "<f4"])
def test_lost_ranks_that_are_no_integers_are_refused(dtype: str) -> None:
    lost = np.full(1, np.nan, dtype)
    with pytest.raises(BadFrame, match="the ranks that were lost"):
        unpack(pack(Frame(Kind.ABANDON, Kind.GATHER, 1, shape=(1,), values=lost)))


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_refused_as_such(data: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(data)
