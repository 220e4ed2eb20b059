"""Routing profiles and traces: what they say, their files, and every way in which a file can be broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.shapes import SHAPES
from moesched.routing.checks import layers_without_experts, routed_layers
from moesched.routing.files import read_routing_file
from moesched.routing.profile import RoutingProfile, read_routing_profile, write_profile
from moesched.routing.recorder import RoutingRecorder
from moesched.routing.sources import find_choices, find_profile, profile_of
from moesched.routing.statistics import statistics_of
from moesched.routing.trace import RecordedChoices, RoutingTrace, write_routing_trace
from moesched.seams import TokenSpan
from routing_traces import (
    read_trace,
    records_of,
    refusal,
    routed,
    write_npy,
    write_npz,
    write_own,
    write_records,
    write_rows,
)
from small_models import SMALL
from small_shapes import small
from tables import table

PROFILE = RoutingProfile(
    model="small",
    layers=4,
    experts=4,
    top_k=2,
    tokens=10,
    counts=((5, 5, 5, 5), (10, 0, 4, 6), (1, 2, 8, 9), (4, 6, 3, 7)),
)
HEAD = "# model: small\n# layers: 1\n# experts: 2\n# top_k: 1\n# tokens: 3\nlayer,expert,count\n"
DBRX = SHAPES["dbrx"]


def written(folder: Path, text: str) -> Path:
    file = folder / "routing.csv"
    file.write_text(text)
    return file


# -- profiles


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "routing.csv")
    assert read_routing_profile(tmp_path / "routing.csv", SMALL) == PROFILE


def test_the_file_is_the_documented_csv(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "routing.csv")
    lines = (tmp_path / "routing.csv").read_text().splitlines()
    assert (
        lines[:6]
        == HEAD.replace("layers: 1", "layers: 4")
        .replace("experts: 2", "experts: 4")
        .replace("top_k: 1", "top_k: 2")
        .replace("tokens: 3", "tokens: 10")
        .splitlines()
    )
    assert lines[6:10] == ["0,0,5", "0,1,5", "0,2,5", "0,3,5"]
    assert len(lines) == 6 + 16


def test_rows_may_come_in_any_order_with_spaces_blank_lines_and_comments(tmp_path: Path) -> None:
    file = written(tmp_path, HEAD + "\n0, 1, 1\n# counted by hand\n0,0,2\n")
    assert read_routing_profile(file).counts == ((2, 1),)


@pytest.mark.parametrize(("text", "told"), table("broken_files.md", "Routing profiles"))
def test_a_broken_line_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BadInput, match=r"routing\.csv ?" + told):
        read_routing_profile(written(tmp_path, text))


def test_what_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "routing.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="it is not text: name a CSV file"):
        read_routing_profile(tmp_path / "routing.csv")


def test_a_counted_profile_is_what_choices_are_drawn_by(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "routing.csv")
    choices = find_choices(str(tmp_path / "routing.csv"), SMALL, {"locality": 0.2})
    assert choices is not None
    chosen = choices.of_tokens(1, np.repeat(np.arange(50), 100), np.tile(np.arange(100), 50))
    assert np.bincount(chosen.ravel(), minlength=4) / 5000 == pytest.approx([1, 0, 0.4, 0.6], abs=0.04)
    assert find_profile(str(tmp_path / "routing.csv"), SMALL) == PROFILE


# -- statistics


def test_the_statistics_are_those_of_the_normalised_counts() -> None:
    found = statistics_of(PROFILE, [0, 1, 8, 16])
    popularity = np.array(PROFILE.counts) / 10
    assert found.mean == pytest.approx(popularity.mean())
    assert found.deviation == pytest.approx(popularity.std())
    assert found.minimum == 0
    assert found.median == pytest.approx(np.median(popularity))
    assert [found.lower_quartile, found.upper_quartile] == pytest.approx([0.375, 0.625])
    rates = [(rate.best, rate.worst, rate.random) for rate in found.hit_rates]
    expected = [(0, 0, 0), (10 / 80, 0, 1 / 16), (56 / 80, 24 / 80, 1 / 2), (1, 1, 1)]
    for rate, values in zip(rates, expected, strict=True):
        assert rate == pytest.approx(values)


def test_hit_rates_are_of_the_papers_shares_where_nothing_is_asked() -> None:
    profile = find_profile("popularity", SHAPES["mixtral-8x7b"])
    assert [rate.gpu_experts for rate in statistics_of(profile).hit_rates] == [56, 125]
    assert [rate.gpu_experts for rate in statistics_of(PROFILE).hit_rates] == [4, 8]


# -- traces


def recorded() -> RoutingTrace:
    """Two requests of 3 and 2 tokens; the experts of a token tell where it stands."""
    chosen = np.array([[[0, 1 + t % 3], [t % 3, 3]] for t in range(5)], np.uint8).repeat(2, axis=1)
    return RoutingTrace("small", 4, chosen, np.array([3, 2]), np.array([2, 2]))


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_routing_trace(recorded(), tmp_path / "routing.npz")
    found = read_routing_file(tmp_path / "routing.npz", SMALL)
    assert isinstance(found, RoutingTrace)
    assert (found.model, found.experts) == ("small", 4)
    for mine, given in zip(found[2:], recorded()[2:], strict=True):
        assert (mine == given).all()
        assert mine.dtype == given.dtype


def test_a_trace_with_integers_of_another_type_is_read_as_the_same(tmp_path: Path) -> None:
    given = recorded()
    wide = {
        name: getattr(given, name).astype(np.uint64) for name in ("chosen", "request_tokens", "prompt_tokens")
    }
    write_routing_trace(given._replace(**wide), tmp_path / "routing.npz")
    found = read_routing_file(tmp_path / "routing.npz", SMALL)
    assert isinstance(found, RoutingTrace)
    assert found.chosen.dtype == np.uint8
    assert found.profile() == given.profile()
    choices = find_choices(str(tmp_path / "routing.npz"), SMALL)
    assert choices is not None
    assert (choices.of_tokens(2, np.array([1]), np.array([1])) == given.chosen[4, 2]).all()


def test_the_same_trace_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_routing_trace(recorded(), tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_replayed_token_has_the_experts_that_were_recorded_and_past_the_end_the_first_ones_again() -> None:
    trace = recorded()
    choices = RecordedChoices(trace)
    requests, positions = np.array([0, 0, 1, 0, 2, 3]), np.array([0, 2, 1, 3, 1, 0])
    rows = [0, 2, 4, 0, 1, 3]
    assert (choices.of_tokens(2, requests, positions) == trace.chosen[rows, 2]).all()


def test_a_traces_profile_counts_its_choices() -> None:
    profile = recorded().profile()
    assert (profile.tokens, profile.layers, profile.top_k) == (5, 4, 2)
    assert profile.counts[0] == (5, 2, 2, 1)
    assert profile.counts[3] == (2, 2, 1, 5)


@pytest.mark.parametrize(("name", "shown"), [("small", "small"), ("a\nb" + "c" * 1000, "a bc{97}")])
def test_a_trace_of_another_model_is_refused_in_one_line(tmp_path: Path, name: str, shown: str) -> None:
    write_routing_trace(recorded()._replace(model=name), tmp_path / "routing.npz")
    with pytest.raises(BadInput, match=f"is of {shown}, 4 layers of 4 experts, top 2, but dbrx has 40"):
        find_profile(str(tmp_path / "routing.npz"), DBRX)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"chosen": np.zeros((5, 4, 2))}, r"has shape \(5, 4, 2\) of 'float64': write an array of integers"),
        ({"chosen": np.zeros((5, 2), np.uint8)}, r"is damaged: chosen has shape \(5, 2\) of uint8"),
        (
            {"chosen": np.full((5, 4, 2), [0, 9], np.uint8)},
            r", token 0, layer 0 is damaged: \[0, 9\] are not ascending experts from 0 to 3",
        ),
        ({"chosen": np.ones((5, 4, 2), np.uint8)}, r"\[1, 1\] are not ascending experts from 0 to 3"),
        ({"request_tokens": np.array([3, 1])}, "do not add up to its 5 tokens"),
        ({"request_tokens": np.array([5, 0])}, "do not add up to its 5 tokens"),
        (
            {"request_tokens": np.array([2**62, 2**62, 2**62, 2**62 + 5]), "prompt_tokens": np.zeros(4, np.int64)},
            "do not add up to its 5 tokens",
        ),
        ({"prompt_tokens": np.array([3])}, "do not add up to its 5 tokens"),
        ({"model": 3}, r"model has shape \(\) of int64"),
    ],
)  # fmt: skip
def test_a_trace_that_is_not_whole_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    write_routing_trace(recorded()._replace(**changes), tmp_path / "routing.npz")
    with pytest.raises(BadInput, match=rf"routing\.npz.*{told}"):
        read_routing_file(tmp_path / "routing.npz", SMALL)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("cut", lambda whole: whole[: len(whole) // 2], "is not a whole .npz file: it was cut off or damaged"),
        (
            "text",
            lambda whole: b"not numpy's",
            'is not a profile or trace of routing, as it begins with "not numpy\'s"',
        ),
        ("empty", lambda whole: b"", "is not a profile or trace of routing, as it begins with ''"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, content: Any, told: str) -> None:
    file = tmp_path / f"{name}.npz"
    write_routing_trace(recorded(), file)
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(BadInput, match=rf"{name}\.npz {told}"):
        read_routing_file(file, SMALL)


# -- recording


def test_a_recorder_puts_choices_in_their_places_whatever_the_order() -> None:
    recorder = RoutingRecorder(SMALL)
    trace = recorded()
    for layer in (2, 0, 3, 1):
        recorder.routed(layer, [TokenSpan(1, 0, 2), TokenSpan(0, 0, 2)], trace.chosen[[3, 4, 0, 1], layer])
    for layer in range(4):
        recorder.routed(layer, [TokenSpan(0, 2, 1)], trace.chosen[2:3, layer])
    found = recorder.trace([3, 2], [2, 2])
    assert (found.chosen == trace.chosen).all()
    assert found.request_tokens.tolist() == [3, 2]
    assert found.prompt_tokens.tolist() == [2, 2]


def test_tokens_after_the_end_of_a_request_and_layers_cut_off_are_left_out() -> None:
    recorder = RoutingRecorder(SMALL)
    chosen = np.zeros((3, 2), np.int64)
    for layer in range(4):
        recorder.routed(layer, [TokenSpan(0, 0, 3)], chosen)
    for layer in range(2):
        recorder.routed(layer, [TokenSpan(0, 3, 1), TokenSpan(1, 0, 2)], chosen)
    assert recorder.trace([9, 9], [2, 2]).request_tokens.tolist() == [3]
    assert recorder.trace([2, 9], [2, 2]).request_tokens.tolist() == [2]


def test_progress_is_told_in_choices() -> None:
    told: list[tuple[int, int]] = []
    recorder = RoutingRecorder(SMALL, lambda done, most: told.append((done, most)), most=12)
    for layer in range(2):
        recorder.routed(layer, [TokenSpan(0, 0, 3)], np.zeros((3, 2), np.int64))
    assert told == [(3, 12), (6, 12)]


# -- layers without experts --------------------------------------------------------------------------------------------


Write = Callable[[RoutingTrace, Path], Path]
DENSE_FIRST = small("deepseek-v2-lite", 3)
INTERLEAVED = small("llama-4-maverick", 4)


def of_model(config: ModelConfig, tokens: int = 5) -> RoutingTrace:
    """A trace with zeros in the layers without experts."""
    trace = routed([tokens], layers=config.layers, experts=config.routed.experts, top_k=config.routed.top_k)
    chosen = trace.chosen.copy()
    chosen[:, layers_without_experts(config)] = 0
    return trace._replace(chosen=chosen)


def only_routed(trace: RoutingTrace, config: ModelConfig) -> RoutingTrace:
    """The layers with experts alone."""
    return trace._replace(chosen=trace.chosen[:, routed_layers(config)])


def rows_without_dense(trace: RoutingTrace, folder: Path, config: ModelConfig) -> Path:
    file = write_rows(trace, folder)
    header, *rows = file.read_text().splitlines()
    dense = layers_without_experts(config)
    file.write_text("\n".join([header, *(row for row in rows if int(row.split(",")[1]) not in dense)]))
    return file


def megatron_without_dense(trace: RoutingTrace, folder: Path, config: ModelConfig) -> Path:
    dense = layers_without_experts(config)
    return write_records([each for each in records_of(trace) if each["layer"] not in dense], folder)


@pytest.mark.parametrize("config", [DENSE_FIRST, INTERLEAVED], ids=["dense first", "interleaved"])
@pytest.mark.parametrize("write", [write_npy, write_npz, write_rows, write_own])
def test_a_trace_may_have_all_layers_or_those_with_experts(
    tmp_path: Path, write: Write, config: ModelConfig
) -> None:
    trace = of_model(config)
    assert layers_without_experts(config)
    assert (read_trace(write(trace, tmp_path), config).chosen == trace.chosen).all()
    if write is not write_own:
        assert (read_trace(write(only_routed(trace, config), tmp_path), config).chosen == trace.chosen).all()


@pytest.mark.parametrize("config", [DENSE_FIRST, INTERLEAVED], ids=["dense first", "interleaved"])
@pytest.mark.parametrize("write", [rows_without_dense, megatron_without_dense])
def test_numbers_of_layers_may_have_gaps_where_there_are_no_experts(
    tmp_path: Path, write: Callable[[RoutingTrace, Path, ModelConfig], Path], config: ModelConfig
) -> None:
    trace = of_model(config)
    assert (read_trace(write(trace, tmp_path, config), config).chosen == trace.chosen).all()


@pytest.mark.parametrize("write", [write_npy, write_rows])
def test_experts_in_a_layer_that_has_none_are_refused(tmp_path: Path, write: Write) -> None:
    chosen = of_model(DENSE_FIRST).chosen.copy()
    chosen[2, 0] = range(DENSE_FIRST.routed.top_k)
    file = write(of_model(DENSE_FIRST)._replace(chosen=chosen), tmp_path)
    assert f"{DENSE_FIRST.name} has no experts in" in refusal(file, DENSE_FIRST)


def test_rows_of_layers_without_experts_only_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("layer,token,experts\n2,0,0\n")
    assert "rows of layers without experts only: write those of layers [1, 3]" in refusal(file, INTERLEAVED)


@pytest.mark.parametrize("config", [DENSE_FIRST, INTERLEAVED], ids=["dense first", "interleaved, top 1"])
def test_nothing_is_counted_in_layers_without_experts(config: ModelConfig) -> None:
    counts = profile_of(of_model(config), config, seed=0).counts
    assert [layer for layer, row in enumerate(counts) if not any(row)] == layers_without_experts(config)


def test_layers_without_experts_do_not_count_as_unpopular(tmp_path: Path) -> None:
    trace = of_model(DENSE_FIRST, tokens=300)
    assert set(trace.profile().counts[0]) == {0}
    assert statistics_of(trace.profile()).minimum > 0
    write_profile(trace.profile(), tmp_path / "counts.csv")
    choices = find_choices(str(tmp_path / "counts.csv"), DENSE_FIRST)
    assert choices is not None
    assert len(choices.of_tokens(1, np.array([0]), np.array([3]))[0]) == DENSE_FIRST.routed.top_k
