"""Caches of windows: they give back the blocks that have left them, and nothing else changes."""

from __future__ import annotations

import random
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import moesched
from benchmarks.exact._beams import hugging_face_beams, searched
from benchmarks.shared.random_models import gpt_oss, prompts_of
from benchmarks.shared.small_runs import TWO_MEMORIES
from moesched.devices.torch.block_table import BlockTable
from moesched.devices.torch.compute import Compute
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.devices.torch.states import states_of
from moesched.models.kv_blocks import PROMPT_TILE, tokens_beside
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.steps.plan import Plan
from moesched.steps.roles import Role
from odd_models import GPT_OSS

BLOCK = 4
EMULATED: dict[str, Any] = {"device": "emulated", "machine": "t4", "device_settings": {"dilation": 1}}


class Marked:
    """A cache of a window whose keys say which token of which text they are of; values are one more."""

    def __init__(self, window: int, blocks: int) -> None:
        config = SHAPES["mixtral-0.8b"].varied(layers=1, kv_heads=1, head_dim=2, window=window)
        self.cache = BlockedKV(config, blocks, block_size=BLOCK)
        self.window = window
        self.marks = count()

    def extend(self, texts: dict[int, list[int]], counts: dict[int, int]) -> None:
        """Give sequences new tokens, and check what these see, and that the plan counts what is beside the cache."""
        most = (-(-(self.window - 1) // BLOCK) + 1) * BLOCK
        counted = tokens_beside([len(texts[each]) for each in counts], list(counts.values()), most)
        new = {sequence: list(islice(self.marks, tokens)) for sequence, tokens in counts.items()}
        step = self.cache.extend(list(new), list(counts.values()))
        marks_T = torch.tensor([mark for tokens in new.values() for mark in tokens])
        keys_TKd = marks_T[:, None, None].expand(-1, 1, 2).float().contiguous()
        views = self.cache.at(0).extended(step, keys_TKd, keys_TKd + 1)
        own = self.cache.slots, keys_TKd
        held = {
            keys.untyped_storage().data_ptr(): keys.untyped_storage().nbytes() // keys[0, 0].nbytes
            for keys in (view.keys_SLKd for view in views)
        }
        beside = sum(held.values()) - sum(held.get(each.untyped_storage().data_ptr(), 0) for each in own)
        assert beside <= counted or step.in_place
        rows = [rows for view in views for rows in zip(view.keys_SLKd, view.values_SLKd, strict=True)]
        for (sequence, tokens), (keys, values) in zip(new.items(), rows, strict=True):
            texts[sequence] = texts[sequence] + tokens
            seen = texts[sequence][-(self.window + len(tokens) - 1) :]
            assert keys[-len(seen) :, 0, 0].tolist() == seen
            assert (values - keys)[-len(seen) :].eq(1).all()
            before = len(texts[sequence]) - len(keys)
            assert step.in_place or before % PROMPT_TILE == 0, "tiles begin where they do without a window"


@settings(max_examples=40)
@given(st.integers(1, 13), st.integers(1, 4), st.randoms(use_true_random=False))
def test_new_tokens_see_their_window_in_its_blocks_and_one_more(
    window: int, sequences: int, chosen: random.Random
) -> None:
    most = -(-(window - 1) // BLOCK) + 1
    marked = Marked(window, sequences * most)
    texts: dict[int, list[int]] = {sequence: [] for sequence in range(sequences)}
    for sequence in texts:
        marked.cache.table.open(sequence, chosen.choice([0, 100]))
    for _ in range(12):
        in_step = chosen.sample(sorted(texts), chosen.randint(1, sequences))
        decodes = chosen.random() < 0.7
        marked.extend(texts, {each: 1 if decodes else chosen.randint(1, 30) for each in in_step})
    assert all(len(marked.cache.table[sequence].blocks) <= most for sequence in texts)


@settings(max_examples=40)
@given(st.integers(1, 13), st.randoms(use_true_random=False))
def test_beams_see_their_parents_windows_in_their_blocks_and_one_more_each(
    window: int, chosen: random.Random
) -> None:
    beams = 3
    marked = Marked(window, beams * (-(-(window - 1) // BLOCK) + 1))
    marked.cache.table.open(0)
    texts: dict[int, list[int]] = {0: []}
    marked.extend(texts, {0: chosen.randint(1, 30)})
    for _ in range(20):
        parents = [chosen.randrange(len(texts)) for _ in range(beams)]
        marked.cache.reorder(list(texts), parents, range(beams))
        texts = {heir: texts[parent] for heir, parent in enumerate(parents)}
        marked.extend(texts, dict.fromkeys(texts, 1))


def test_a_sequence_writes_where_its_own_tokens_left() -> None:
    """So nothing passes from one micro-batch to another while kernels of a GPU may still read it."""
    table = BlockTable(6, BLOCK, window=5)
    for sequence in (0, 1):
        table.open(sequence, 100)
    own = {sequence: set(table[sequence].blocks) for sequence in (0, 1)}
    for _ in range(50):
        table.grow([0, 1], [1, 1])
        assert {sequence: set(table[sequence].blocks) for sequence in (0, 1)} == own


@pytest.mark.parametrize("role", ["accelerator", "host"])
@pytest.mark.parametrize("beams", [1, 3])
def test_the_plan_counts_what_caches_take(role: Role, beams: int) -> None:
    layout = weight_layout(GPT_OSS, "float32")
    batch = replace(split_batch([70, 3], 20, 1), beams=beams)
    plan = Plan(TWO_MEMORIES, layout, batch)
    plan.place_kv(role)
    planned = sum(each.nbytes for each in plan.reservations.of(plan.declared) if each.content == "KV cache")
    with closing(Compute("cpu", layout, "torch", pin=False, threads=None)) as compute:
        states = states_of(plan, [[1] * 70, [2] * 3], compute)
    caches = {id(cache): cache for state in states for cache in state.caches}
    assert sum(cache.nbytes for cache in caches.values()) == planned


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A gpt-oss with a window of seven tokens in every other layer."""
    torch.manual_seed(7)
    made, path = gpt_oss(initializer_range=0.15, num_hidden_layers=3), tmp_path_factory.mktemp("models")
    made.save_pretrained(path)
    return made, path


@pytest.mark.parametrize("chunk", [None, 19])
@pytest.mark.parametrize(("policy", "machine"), [("resident", {}), ("cgopipe", EMULATED)], ids=str)
def test_prompts_and_texts_beyond_the_window_have_the_tokens_of_hugging_face(
    model: tuple[Any, Path], chunk: int | None, policy: str, machine: dict[str, Any]
) -> None:
    theirs, path = model
    prompts = prompts_of(97, [70, 9, 40])
    found = moesched.run_model(
        path, prompts, policy=policy, max_new_tokens=20, batch_size=3, prefill_chunk=chunk, **machine
    )
    for prompt, tokens in zip(prompts, found.tokens or [], strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_beams_beyond_the_window_are_those_of_hugging_face(model: tuple[Any, Path]) -> None:
    theirs, path = model
    sampling = Sampling(beams=3)
    (prompt,) = prompts_of(97, [40])
    (found,), (score,) = searched(path, [prompt], sampling, new_tokens=20)
    expected, expected_score = hugging_face_beams(theirs, prompt, sampling, [], 20)
    assert found == expected
    assert score == pytest.approx(expected_score, abs=1e-4)
