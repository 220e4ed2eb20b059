"""Workloads: prompt lengths with the published average and maximum, in a seeded order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import BadInput
from moesched.requests.workloads import (
    PromptLengths,
    Workload,
    given_lengths,
    load_workload,
    spread,
    workload_names,
)
from tables import table


@pytest.mark.parametrize(
    ("name", "average", "largest", "new_tokens"),
    [
        ("mtbench", 77, 418, (32, 64, 128, 256)),
        ("synthetic-reasoning", 242, 256, (50,)),
        ("summarization", 1693, 1984, (64,)),
    ],
)
def test_workloads_are_those_of_the_papers_table(
    name: str, average: int, largest: int, new_tokens: tuple[int, ...]
) -> None:
    workload = load_workload(name)
    assert workload.prompts is not None
    lengths = workload.lengths(workload.prompts.distinct, seed=7)
    assert sum(lengths) / len(lengths) == average
    assert max(lengths) == workload.longest == largest
    assert min(lengths) >= 1
    assert workload.new_tokens == new_tokens


def test_every_eighty_requests_of_mtbench_are_its_eighty_questions() -> None:
    lengths = load_workload("mtbench").lengths(240, seed=5)
    turns = [lengths[start : start + 80] for start in (0, 80, 160)]
    assert len({tuple(turn) for turn in turns}) == 3
    assert len({tuple(sorted(turn)) for turn in turns}) == 1


def test_a_seed_fixes_the_order_and_more_requests_begin_with_fewer() -> None:
    mtbench = load_workload("mtbench")
    assert mtbench.lengths(100, seed=3) == mtbench.lengths(200, seed=3)[:100]
    assert mtbench.lengths(100, seed=3) != mtbench.lengths(100, seed=4)


def test_uniform_prompts_have_one_length() -> None:
    assert set(load_workload("uniform").lengths(50, seed=9)) == {128}


def test_given_lengths_come_in_their_order_and_again_from_the_start() -> None:
    given = given_lengths([5, 7, 2], new_tokens=4)
    assert given.lengths(5) == [5, 7, 2, 5, 7]
    assert given.longest == 7


@given(distinct=st.integers(2, 200), largest=st.integers(2, 5000), share=st.floats(0, 1))
def test_any_possible_average_is_met_to_the_token(distinct: int, largest: int, share: float) -> None:
    least, most = distinct - 1 + largest, distinct * largest
    average = (least + share * (most - least)) / distinct
    lengths = spread(PromptLengths(average=average, largest=largest, distinct=distinct))
    assert len(lengths) == distinct
    assert sum(lengths) == round(average * distinct)
    assert list(lengths) == sorted(lengths)
    assert lengths[0] >= 1
    assert lengths[-1] == largest


def test_a_workload_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nnew_tokens = [8]\nprompt_tokens = [3, 4]\n')
    assert load_workload(str(file)) == Workload(name="mine", new_tokens=(8,), prompt_tokens=(3, 4))


@pytest.mark.parametrize(
    ("text", "said"),
    table("broken_files.md", "Workloads"),
)
def test_a_file_that_is_no_workload_is_told_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=f"mine.toml: .*{said}"):
        load_workload(str(file))


def test_an_unknown_workload_is_told_with_the_choices() -> None:
    with pytest.raises(
        BadInput, match=r"no workload 'mtbenhc': did you mean mtbench\? Otherwise name a TOML file"
    ):
        load_workload("mtbenhc")
    assert workload_names() == ["mtbench", "summarization", "synthetic-reasoning", "uniform"]
