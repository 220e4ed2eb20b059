"""The KV cache on MLX: what tokens see in a window, and what stays where requests come and go."""

# ruff: noqa: E402  # what needs MLX is imported after the check that it is there

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.models.kv_blocks import window_tokens
from moesched.models.shapes import SHAPES

mx = pytest.importorskip("mlx.core", reason="there is no MLX for this platform")

from moesched.devices.mlx.kv_cache import RequestsKV


class Texts:
    """A cache of one layer, and what the tokens of each request have to be."""

    def __init__(self, window: int | None, slots: int) -> None:
        config = SHAPES["mixtral-0.8b"].varied(layers=1, kv_heads=1, head_dim=2, window=window)
        self.cache = RequestsKV(config, [0], slots, mx.float32)
        self.window = window
        self.marks: dict[int, list[float]] = {}

    def open(self, request: int, tokens: int) -> None:
        self.cache.open(request, tokens)
        self.marks[request] = []

    def close(self, request: int) -> None:
        self.cache.close(request)
        del self.marks[request]

    def extend(self, requests: Sequence[int], new: Sequence[int]) -> None:
        """Add tokens with random keys, and compare what they see."""
        step = self.cache.extend(requests, new)
        keys_TKd = mx.random.uniform(shape=(sum(new), 1, 2))
        marks = keys_TKd[:, 0, 0].tolist()
        views = self.cache.at(0).extended(step, keys_TKd, keys_TKd + 1)
        seen = [rows for view in views for rows in zip(view.keys_SLKd, view.values_SLKd, strict=True)]
        for request, tokens, (keys, values) in zip(requests, new, seen, strict=True):
            self.marks[request] += marks[:tokens]
            del marks[:tokens]
            first = 0 if self.window is None else -(self.window + tokens - 1)
            wanted = self.marks[request][first:]
            assert keys[-len(wanted) :, 0, 0].tolist() == wanted
            assert mx.array_equal(values, keys + 1)


@given(st.integers(1, 40), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_new_tokens_see_their_window_in_its_blocks_and_one_more(window: int, chosen: random.Random) -> None:
    slots = 2 * window_tokens(window)
    texts = Texts(window, slots)
    for number in (0, 1):
        texts.open(number, 1000)
    for _ in range(12):
        requests = chosen.sample([0, 1], chosen.randint(1, 2))
        decodes = chosen.random() < 0.7
        texts.extend(requests, [1 if decodes else chosen.randint(1, 90) for _ in requests])
    assert all(len(array) == slots for array in texts.cache.arrays(0))


@pytest.mark.parametrize("window", [None, 9])
def test_requests_that_move_together_for_another_keep_their_tokens(window: int | None) -> None:
    texts = Texts(window, 6 * 16)
    for number in range(6):
        texts.open(number, 16)
        texts.extend([number], [9 + number % 3])
    for number in (0, 2, 4):
        texts.close(number)
    texts.open(6, 3 * 16)
    texts.extend([1, 3, 5, 6], [1, 1, 1, 1])
    texts.extend([6, 5], [30, 1])
