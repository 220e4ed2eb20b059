"""Answers that lm-eval logs: what a sample says, and how the answers of two differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.exact._lm_eval import LM_EVAL, Answer, answer, logged, python
from benchmarks.exact._lm_eval_tasks import CHOICES, SETTINGS, questions
from benchmarks.exact.lm_eval_answers import differences
from benchmarks.peers.environment import Peer
from benchmarks.peers.protocol import PeerFailed


def test_a_sample_says_its_likeliest_choice_a_sum_or_a_text() -> None:
    pairs = [["-9.5", "False"], ["-0.25", "True"]]
    assert answer("multiple_choice", pairs) == Answer([1, "False", "True"], [-9.5, -0.25])
    assert answer("loglikelihood_rolling", ["-3140.5"]) == Answer([], [-3140.5])
    assert answer("generate_until", ["12"]) == Answer(["12"], [])


def test_samples_are_read_in_the_order_of_the_questions(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    rows = [{"doc_id": number, "filtered_resps": [f"text {number}"]} for number in (10, 2)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [each.said for each in logged("generate_until", file)] == [["text 2"], ["text 10"]]


def test_answers_differ_by_what_they_say_and_log_likelihoods_by_how_far_they_are_apart() -> None:
    theirs = [Answer([0, "True"], [-0.5]), Answer([1, "False", "False"], [-200.0, -100.0])]
    ours = [Answer([0, "False"], [-0.75]), Answer([1, "False", "False"], [-201.0, -100.0])]
    assert differences(ours, theirs) == {
        "answers": 2,
        "greedy": 1,
        "differ": 1,
        "log_likelihoods": 3,
        "largest": 1.0,
        "largest_in_parts": 0.25,  # of -0.5, which counts as 1; -201 differs by 0.005
    }
    assert differences(theirs, theirs)["differ"] == 0
    assert differences([Answer(["a"], [])], [Answer(["b"], [])])["differ"] == 1


def test_an_answer_that_is_missing_is_no_answer() -> None:
    with pytest.raises(ValueError, match="longer"):
        differences([], [Answer(["a"], [])])


def test_each_kind_has_questions_and_the_right_choice_goes_on_as_the_text_does() -> None:
    asked = questions([f"text {number} " + "of some words " * 4 + f"ends {number}" for number in range(100)])
    assert asked.keys() == SETTINGS.keys()
    assert asked["loglikelihood_rolling"][1]["right"].startswith("text 10 of")
    for number, each in enumerate(asked["multiple_choice"]):
        assert each["begin"].startswith(f"text {number} of")
        assert len(each["choices"]) == CHOICES
        assert each["choices"][each["right"]].endswith(f"ends {number}")
    assert {each["right"] for each in asked["loglikelihood"]} == {" of"}


class NotInstalled(Peer):
    """A program that pip cannot install."""

    def python(self) -> Path:
        """No interpreter."""
        raise PeerFailed("not installed: no network")


def test_without_lm_eval_one_line_says_how_to_get_it() -> None:
    with pytest.raises(SystemExit) as ended:
        python(NotInstalled("lm-eval", module="", requirements=LM_EVAL.requirements))
    said = str(ended.value)
    assert said.startswith("lm-eval is not installed: no network; ")
    assert f"pip install '{LM_EVAL.requirements[0]}'" in said
    assert "\n" not in said
