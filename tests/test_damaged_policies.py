"""Policies with one wrong verb call: they are refused at their own line, or do no harm. None gives wrong tokens."""

from __future__ import annotations

import re

import pytest

from benchmarks.robustness._damage import Damage, Damaged, Kind
from benchmarks.robustness.damaged_policies import Bench
from moesched.plugins import make_policy


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("real", [True, False], ids=["real threads", "virtual clock"])
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_a_damaged_policy_is_refused_or_does_no_harm(bench: Bench, real: bool, first: int) -> None:
    for seed in range(first, first + 10):
        name, damaged, end = bench.end(seed, real=real)
        assert end.well, f"{name}, {damaged.damage} of {damaged.struck}: {end}"


REFUSED: list[tuple[str, Kind, str, str]] = [
    ("cgopipe", "drop", "fetch", "fetch it before the kernel that reads it"),
    ("cgopipe", "repeat", "fetch", "fetch it once, or evict it first"),
    ("cgopipe", "repeat", "copy_to_pinned", "fetch it once, or evict it first"),
    ("cgopipe", "drop", "copy_to_pinned", "bring it there first"),
    ("cgopipe", "drop", "offload_kv", "its keys and values not saved: offload_kv them"),
    ("cgopipe", "repeat", "offload_kv", "has no keys and values to save"),
    ("cgopipe", "exchange", "cpu_attention", "needs mb1 at step 1 L0 qkv on the host"),
    ("cgopipe", "drop", "load_hidden", "post_attention.* at step 1 L0 attended on the host"),
    ("flexgen", "drop", "load_kv", "load_kv before, or use cpu_attention"),
    ("flexgen", "repeat", "load_kv", "load_kv: .* were loaded already"),
    ("flexgen", "drop", "offload_kv", "its keys and values not saved: offload_kv them"),
    ("twiddler", "drop", "offload_routed", "is not on the host: call offload_routed before"),
    ("twiddler", "drop", "load_routed", "on the host: call load_routed first"),
    ("prefetch_gate", "drop", "fetch", "bring it there first|fetch it before the kernel"),
    ("resident", "repeat", "pre_attention", "pre_attention.* but it is at step 0 L0 qkv"),
    ("resident", "drop", "sample", "ended before mb0 was sampled"),
    ("adversarial", "drop", "run_expert", "was routed to E[0-9]+, which did not run"),
    ("adversarial", "repeat", "run_expert", "or it has run already"),
    ("adversarial", "repeat", "evict", "evict: page .* is not in pool adversary"),
    ("adversarial", "drop", "route", "run_expert|combine"),
    ("adversarial", "repeat", "combine", "combine"),
]


@pytest.mark.parametrize(
    ("name", "kind", "verb", "says"), REFUSED, ids=[f"{k} {v} of {n}" for n, k, v, _ in REFUSED]
)
def test_the_refusal_says_what_is_wrong(bench: Bench, name: str, kind: Kind, verb: str, says: str) -> None:
    calls = bench.calls(name, {}, 1, real=False)
    damaged = Damaged(make_policy(name), Damage(kind, calls.index(verb)))
    end = bench.run(damaged, 1, real=False)
    assert end.how in ("raised", "raised at the end")
    assert damaged.struck == verb
    assert re.search(says, end.what), end.what
