"""The Hierarchical Roofline Model: values computed by hand, relations that always hold, and what the paper states."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.analysis.hrm import (
    KV_BYTES,
    Bound,
    Hierarchy,
    Intensity,
    LayerTime,
    Level,
    Split,
    attention_intensity,
    balance_point,
    batch_reaching,
    compute_seconds,
    fetched,
    ffn_intensity,
    first_turning_point,
    hierarchy_of,
    in_place,
    layer_time,
    pays_to_fetch,
    ridge,
    second_turning_point,
    touched_expert_bytes,
)
from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.machines.staging import staged
from moesched.models.operations import Operations
from moesched.models.shapes import SHAPES

# Round numbers instead of a machine: FLOP/s and bytes per second.
SMALL = Hierarchy(Level("gpu", 1000.0, 100.0), Level("host", 50.0, 20.0), link=5.0)
DISK = Hierarchy(Level("host", 1000.0, 100.0), Level("disk", 0.0, 5.0), link=5.0)

# 4 heads and 2 KV heads of 2: queries are 8 wide, keys 4. An expert has 3 x 4 x 8 weights, 192 bytes in bfloat16.
TINY = Operations(
    SHAPES["mixtral-0.8b"].varied(
        name="tiny", hidden=4, intermediate=8, heads=4, kv_heads=2, head_dim=2, experts=4, top_k=2
    ),
    "bfloat16",
)
MIXTRAL = Operations(SHAPES["mixtral-8x7b"], "bfloat16")
L4 = hierarchy_of(load_machine("l4"), "bfloat16")


# -- by hand


def test_computing_begins_to_bind_at_the_ridge_and_fetching_is_bound_by_the_lowest_of_three_roofs() -> None:
    assert ridge(SMALL.upper) == 10
    assert in_place(SMALL.upper, 9) == Bound(900, "gpu memory")
    assert in_place(SMALL.upper, 11) == Bound(1000, "gpu compute")
    assert fetched(SMALL, Intensity(4, 79)) == Bound(395, "host->gpu")
    assert fetched(SMALL, Intensity(4, 81)) == Bound(400, "gpu memory")
    assert fetched(SMALL, Intensity(20, 300)) == Bound(1000, "gpu compute")


def test_the_points_of_a_small_hierarchy() -> None:
    assert first_turning_point(SMALL) == 10
    assert second_turning_point(SMALL, 4) == balance_point(SMALL, 4) == 80
    assert second_turning_point(SMALL, 20) == balance_point(SMALL, 10) == 200
    assert balance_point(SMALL, 10.1) is None, "the processor binds first"
    assert first_turning_point(Hierarchy(SMALL.upper, SMALL.lower, link=20.0)) == 0, (
        "a link as fast as the host"
    )


def test_where_nothing_computes_fetching_always_pays_and_no_layer_is_computed() -> None:
    assert first_turning_point(DISK) == 0
    assert pays_to_fetch(DISK, Intensity(0.1, 0.1))
    with pytest.raises(BadInput, match="nothing computes on disk"):
        layer_time(DISK, TINY, Split(batch_size=2, micro_batch_size=1), 10, "bfloat16")


def test_attention_reads_the_cache_below_and_queries_and_outputs_too_above() -> None:
    flops, cache, around = 4 * 10 * 8, 10 * 16, (8 + 2 * 4 + 8) * 2
    assert attention_intensity(TINY, 10, "bfloat16") == Intensity(flops / (cache + around), flops / cache)
    assert attention_intensity(TINY, 10, "int4") == Intensity(flops / (cache / 4 + around), flops * 4 / cache)


def test_an_ffn_reads_touched_experts_once_for_a_batch_below_and_for_a_micro_batch_above() -> None:
    flops = 2 * 6 * 4 * 8  # of one token: two experts
    activations = 2 * (2 * 4 + 3 * 8) * 2
    assert touched_expert_bytes(TINY, 1) == 2 * 192
    assert touched_expert_bytes(TINY, 2) == 3 * 192
    assert ffn_intensity(TINY, 2, 1) == Intensity(flops / (2 * 192 + activations), 2 * flops / (3 * 192))
    assert ffn_intensity(TINY, 2, 128) == ffn_intensity(TINY, 2, 2), "no micro-batch is larger than its batch"


def test_a_layer_keeps_link_host_and_accelerator_busy() -> None:
    split = Split(batch_size=2, micro_batch_size=1)
    cache, qkv_and_output, experts = 2 * 10 * 16, 2 * 48, 2 * 192 + 128
    found = layer_time(SMALL, TINY, split, 10, "bfloat16")
    assert found == LayerTime(
        link=(3 * 192 + 2 * 16) / 5,  # three experts down, attention's outputs too
        lower=max((cache + qkv_and_output) / 20, 2 * 320 / 50),
        upper=2 * max(experts / 100, 384 / 1000),
    )
    assert found.seconds == max(found.link, found.lower, found.upper), "as long as what is busy longest"


def test_a_batch_may_have_as_many_requests_as_options_allow() -> None:
    one, most = (
        layer_time(SMALL, TINY, Split(batch_size=n, micro_batch_size=n), 10, "bfloat16") for n in (1, 1 << 40)
    )
    assert most.lower == pytest.approx(one.lower * (1 << 40), rel=0.5)


def test_what_stays_in_the_upper_memory_is_not_fetched() -> None:
    def link(**changes: float | bool) -> float:
        split = Split(batch_size=2, micro_batch_size=2, **changes)  # type: ignore[arg-type]  # names come by keyword
        return layer_time(SMALL, TINY, split, 10, "bfloat16").link

    assert link(weights_on_gpu=0.5) == (3 * 192 / 2 + 32) / 5
    assert link(attention_on_gpu=True, kv_on_gpu=0.25) == (3 * 192 + 0.75 * 320) / 5
    assert link(attention_on_gpu=True, kv_on_gpu=1.0, weights_on_gpu=1.0) == 0
    assert link(ffn_on_gpu=False) == (2 * 8 + 32) / 5


def test_the_last_micro_batch_may_be_smaller() -> None:
    whole = layer_time(SMALL, TINY, Split(batch_size=4, micro_batch_size=2), 10, "bfloat16")
    odd = layer_time(SMALL, TINY, Split(batch_size=5, micro_batch_size=2), 10, "bfloat16")
    assert odd.upper - whole.upper == pytest.approx(compute_seconds(SMALL.upper, TINY.experts(1)))


# -- of machines


def test_a_gpu_stands_above_its_host_and_unified_memory_above_the_disk_where_nothing_computes() -> None:
    l4 = hierarchy_of(load_machine("l4"), "bfloat16")
    assert l4 == Hierarchy(Level("gpu", 121e12, 300e9), Level("host", 1.6e12, 100e9), link=24e9)
    unified = hierarchy_of(load_machine("m2-ultra"), "bfloat16")
    assert unified == Hierarchy(Level("unified", 54e12, 800e9), Level("disk", 0.0, 7.4e9), link=7.4e9)


def test_four_gpus_have_four_times_the_rates_until_staging_is_too_slow() -> None:
    one, two, four = (hierarchy_of(load_machine(name), "bfloat16") for name in ("t4", "t4x2", "t4x4"))
    assert four.upper == Level("gpu", 4 * one.upper.peak, 4 * one.upper.bandwidth)
    assert (one.link, two.link, four.link) == (12e9, 24e9, 48e9)
    l4x4 = load_machine("l4x4")
    assert hierarchy_of(l4x4, "bfloat16").link == 96e9
    assert hierarchy_of(staged(l4x4, "32GB"), "bfloat16").link == 50e9


def test_a_machine_with_one_memory_has_no_hierarchy() -> None:
    machine = load_machine("cpu-nvme")
    roles = msgspec.structs.replace(machine.roles, weights="host")
    with pytest.raises(BadInput, match="cpu-nvme has nothing below its memory 'host'"):
        hierarchy_of(msgspec.structs.replace(machine, roles=roles), "bfloat16")


# -- always

rates = st.floats(min_value=1e-3, max_value=1e15)
intensities = st.floats(min_value=1e-3, max_value=1e6)
levels = st.builds(Level, st.just("level"), rates, rates)
hierarchies = st.builds(Hierarchy, levels, levels, rates)
shares = st.floats(min_value=1e-3, max_value=0.999)
factors = st.floats(min_value=1.001, max_value=1e3)


@st.composite
def slow_links(draw: st.DrawFn) -> Hierarchy:
    """Hierarchies whose link is slower than the lower memory, so that there is a P1."""
    lower = draw(levels)
    return Hierarchy(draw(levels), lower, draw(shares) * lower.bandwidth)


batches = st.integers(min_value=1, max_value=1 << 20)


@given(hierarchies, st.builds(Intensity, intensities, intensities))
def test_fetching_reaches_the_lowest_roof_and_no_more(hierarchy: Hierarchy, intensity: Intensity) -> None:
    roofs = (
        hierarchy.upper.peak,
        hierarchy.upper.bandwidth * intensity.upper,
        hierarchy.link * intensity.lower,
    )
    assert fetched(hierarchy, intensity).performance == min(roofs)


@given(slow_links(), intensities)
def test_p1_comes_before_p2_exactly_where_the_upper_level_reaches_the_lower_one_s_peak(
    hierarchy: Hierarchy, upper: float
) -> None:
    reaches = in_place(hierarchy.upper, upper).performance >= hierarchy.lower.peak
    assert (first_turning_point(hierarchy) <= second_turning_point(hierarchy, upper)) == reaches


@given(slow_links(), intensities, shares)
def test_below_p1_fetching_never_pays(hierarchy: Hierarchy, upper: float, share: float) -> None:
    below = share * first_turning_point(hierarchy)
    assert not pays_to_fetch(hierarchy, Intensity(upper, below))


@given(slow_links(), intensities, factors, factors, factors)
def test_above_p1_fetching_pays_where_the_upper_level_reaches_more_than_the_lower_one_s_peak(
    hierarchy: Hierarchy, upper: float, peak: float, bandwidth: float, above: float
) -> None:
    lower = hierarchy.lower
    level = Level("upper", peak * lower.peak, bandwidth * lower.peak / upper)
    hierarchy = Hierarchy(level, lower, hierarchy.link)
    assert pays_to_fetch(hierarchy, Intensity(upper, above * first_turning_point(hierarchy)))


@given(hierarchies, intensities)
def test_at_p2_the_link_gives_what_the_upper_level_attains(hierarchy: Hierarchy, upper: float) -> None:
    attained = in_place(hierarchy.upper, upper).performance
    assert hierarchy.link * second_turning_point(hierarchy, upper) == pytest.approx(attained)


@given(hierarchies, shares)
def test_at_the_balance_point_link_and_upper_memory_bind_equally(hierarchy: Hierarchy, share: float) -> None:
    upper = share * ridge(hierarchy.upper)
    balance = balance_point(hierarchy, upper)
    assert balance is not None
    assert hierarchy.link * balance == pytest.approx(hierarchy.upper.bandwidth * upper)
    assert balance == pytest.approx(second_turning_point(hierarchy, upper))


@given(batches, st.integers(min_value=1, max_value=1 << 20))
def test_a_larger_batch_never_has_a_lower_intensity(batch: int, more: int) -> None:
    assert ffn_intensity(MIXTRAL, batch + more, 1).lower >= ffn_intensity(MIXTRAL, batch, 1).lower


@given(st.floats(min_value=0, max_value=1e5))
def test_the_batch_that_reaches_an_intensity_is_the_smallest(intensity: float) -> None:
    batch = batch_reaching(MIXTRAL, intensity)
    assert batch is not None
    assert ffn_intensity(MIXTRAL, batch, 1).lower >= intensity
    assert batch == 1 or ffn_intensity(MIXTRAL, batch - 1, 1).lower < intensity
    assert batch_reaching(MIXTRAL, 1e30) is None


# -- what the paper states


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [*(("l4", each) for each in KV_BYTES), *((each, "float16") for each in ("t4", "t4x2", "t4x4"))],
)
def test_attention_is_left_of_p1_on_the_machines_of_table_2_in_every_dtype_of_the_cache(
    name: str, kv_dtype: str
) -> None:
    """Fig. 4, for float16 and int4 on the L4, and Section 4.2: better on the CPU."""
    hierarchy = hierarchy_of(load_machine(name), "bfloat16")
    intensity = attention_intensity(MIXTRAL, 512, kv_dtype)
    assert intensity.lower < first_turning_point(hierarchy)
    assert not pays_to_fetch(hierarchy, intensity)


def test_grouped_query_attention_reads_each_key_for_four_queries() -> None:
    """32 heads and 8 KV heads: 4 FLOP/byte in float16, four times as many in int4."""
    assert attention_intensity(MIXTRAL, 512, "float16").lower == 4
    assert attention_intensity(MIXTRAL, 512, "int4").lower == 16
    every_head = SHAPES["mixtral-8x7b"].varied(kv_heads=32)
    assert attention_intensity(Operations(every_head, "bfloat16"), 512, "float16").lower == 1


@pytest.mark.parametrize("context", [128, 512, 2048])
def test_cpu_attention_is_three_to_four_times_as_fast_as_moving_the_cache(context: int) -> None:
    """Section 6.2: about the ratio of the CPU's memory bandwidth to the link's."""
    intensity = attention_intensity(MIXTRAL, context, "float16")
    here, there = in_place(L4.lower, intensity.lower), fetched(L4, intensity)
    ratio = here.performance / there.performance
    assert ratio == pytest.approx(L4.lower.bandwidth / L4.link)
    assert 3 <= ratio <= 4.2


def test_with_micro_batches_of_128_the_ffn_has_both_turning_points_and_a_balance_point() -> None:
    """Fig. 5, and Section 3.3: one or two prompts are computed where the weights lie."""
    upper = ffn_intensity(MIXTRAL, 128, 128).upper
    assert first_turning_point(L4) < second_turning_point(L4, upper) == balance_point(L4, upper)
    link_bound = ffn_intensity(MIXTRAL, 512, 128)
    assert fetched(L4, link_bound).by == "host->gpu" and pays_to_fetch(L4, link_bound)
    assert fetched(L4, ffn_intensity(MIXTRAL, 4096, 128)).by == "gpu memory"
    assert not any(pays_to_fetch(L4, ffn_intensity(MIXTRAL, prompts, prompts)) for prompts in (1, 2))
    points = [balance_point(L4, ffn_intensity(MIXTRAL, 4096, size).upper) or 0.0 for size in (32, 64, 128)]
    assert points == sorted(points), "weights that stay leave room for smaller micro-batches only"


def test_the_ffn_s_latency_hardly_changes_with_the_micro_batch() -> None:
    """Fig. 9, micro-batches of 32 to 256: the kernel is bound by memory."""
    seconds = [compute_seconds(L4.upper, MIXTRAL.experts(size)) for size in (32, 64, 128, 256)]
    assert max(seconds) < 1.03 * min(seconds)


@pytest.mark.parametrize("context", [128, 512, 2048])
def test_cpu_attention_becomes_the_bottleneck_as_the_context_grows(context: int) -> None:
    """Section 6.2, for a micro-batch of 256."""
    attention = layer_time(L4, MIXTRAL, Split(batch_size=256, micro_batch_size=256), context, "float16")
    assert (attention.lower > attention.upper) == (context > 512)
