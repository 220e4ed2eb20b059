"""Beam search: what Hugging Face's finds, under every policy, with a KV cache wherever it lies."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import moesched
from benchmarks.exact._beams import hugging_face_beams, searched
from benchmarks.shared.random_models import mixtral, olmoe, prompts_of, qwen
from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.kv_blocks import cached_tokens_of_beams
from moesched.requests.batch import Batch
from moesched.requests.beams import BeamSearch
from moesched.requests.sampling import Sampling
from small_models import small_model

STOP_TOKENS = [3, 14, 15, 92, 65]
POLICIES = [
    "layer_streaming", "cgopipe", "expert_streaming", "fastdecode", "flexgen", "flexgen_cpu", "adversarial",
]  # fmt: skip


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("make", [mixtral, qwen, olmoe])
@pytest.mark.parametrize(
    ("beams", "length_penalty", "early_stopping"),
    [(2, 1.0, False), (4, 0.0, False), (4, 2.0, True), (8, -1.0, True), (16, 1.0, False), (12, 0.7, True)],
)
def test_sequences_and_scores_are_those_of_hugging_face(
    tmp_path: Path, make: Any, beams: int, length_penalty: float, early_stopping: bool
) -> None:
    torch.manual_seed(beams)
    model = make(initializer_range=0.15, eos_token_id=STOP_TOKENS)
    model.save_pretrained(tmp_path)
    sampling = Sampling(beams=beams, length_penalty=length_penalty, early_stopping=early_stopping)
    prompts = prompts_of(97, [13, 4])
    tokens, scores = searched(tmp_path, prompts, sampling, new_tokens=10)
    for prompt, found, score in zip(prompts, tokens, scores, strict=True):
        expected, expected_score = hugging_face_beams(model, prompt, sampling, STOP_TOKENS, 10)
        assert found == expected
        assert score == pytest.approx(expected_score, abs=1e-4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("models") / "mixtral"
    mixtral(
        hidden_size=64, num_hidden_layers=4, initializer_range=0.15, eos_token_id=STOP_TOKENS
    ).save_pretrained(path)
    return path


PROMPTS = prompts_of(97, [12, 17, 16, 3])
WIDE = Sampling(beams=4, length_penalty=0.5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("machine", [ONE_MEMORY, TWO_MEMORIES], ids=lambda machine: machine.name)
def test_every_policy_finds_the_same_to_the_bit(directory: Path, policy: str, machine: Machine) -> None:
    expected = searched(directory, PROMPTS, WIDE, new_tokens=12)
    assert (
        searched(directory, PROMPTS, WIDE, new_tokens=12, policy=policy, machine=machine, weights=0.8)
        == expected
    )


def test_one_request_of_a_micro_batch_may_be_done_before_the_others(directory: Path) -> None:
    together = searched(directory, PROMPTS, WIDE, new_tokens=12)
    assert len({len(tokens) for tokens in together[0]}) > 1, "all requests ended at the same length"
    for number, prompt in enumerate(PROMPTS):
        tokens, (score,) = searched(directory, [prompt], WIDE, new_tokens=12)
        assert tokens == [together[0][number]]
        assert score == pytest.approx(together[1][number], abs=1e-5)


# ---------------------------------------------------------------- the search alone


def search(
    logits: Sequence[Sequence[float]], sampling: Sampling, stop_tokens: Sequence[int], most: int
) -> Any:
    """A search over a model whose next token depends on the last one alone; the first row is for the start."""
    found = BeamSearch(sampling, stop_tokens, most)
    rows = [0]
    while not found.standing.done:
        moves = found.advance(np.array([logits[row] for row in rows], dtype=np.float32))
        rows = moves.tokens
    return found.standing


def test_a_search_finds_likely_ends_stops_early_and_prefers_long_sequences_by_its_penalty() -> None:
    # Token 1 is likelier at first, but what follows token 2 is certain.
    logits = [[-9.0, 1.0, 0.9, -9.0], [0.0] * 4, [-30.0, -30.0, -30.0, 30.0], [0.0] * 4]
    assert search(logits, Sampling(beams=2), [], 2).tokens == (2, 3)
    # As many sequences as beams have ended.
    logits = [[0.0, 0.1, 0.2, 5.0], [0.0] * 4, [0.0] * 4, [0.0, 0.1, 5.0, 0.0]]
    assert len(search(logits, Sampling(beams=2, early_stopping=True), [1, 2], 9).tokens) <= 3
    # After every token, token 0 ends the sequence and token 1 goes on, a little less likely.
    logits = [[0.1, 0.0, -9.0, -9.0]] * 4
    short, long = (Sampling(beams=2, length_penalty=penalty) for penalty in (-2.0, 4.0))
    assert len(search(logits, short, [0], 6).tokens) < len(search(logits, long, [0], 6).tokens)


def test_the_standing_before_anything_has_ended_is_the_likeliest_beam() -> None:
    found = BeamSearch(Sampling(beams=2), [], 5)
    found.advance(np.array([[0.0, 3.0, 1.0, 0.0]], dtype=np.float32))
    assert found.standing.tokens == (1,)
    assert not found.standing.done


# ---------------------------------------------------------------- memory


def test_beams_share_the_full_blocks_of_a_prompt() -> None:
    assert cached_tokens_of_beams(40, 10, 1) == 64
    assert cached_tokens_of_beams(40, 10, 4) == 32 + 4 * 32
    batch = Batch((40, 8), 10, ((0,), (1,)), beams=4)
    assert batch.cache_tokens == (32 + 4 * 32) + 4 * 32
    assert batch.unshared_at_end([0, 1]) == [4 * 64, 4 * 32]


def test_a_width_that_memory_does_not_reach_is_told_with_one_that_fits(tmp_path: Path) -> None:
    directory = small_model(tmp_path / "m", layers=2)

    def refusal(beams: int) -> str:
        with pytest.raises(BadInput) as error:
            moesched.run_model(
                directory,
                [list(range(1, 50))],
                sampling=Sampling(beams=beams),
                max_new_tokens=2000,
                batch_size=1,
                budgets={"host": 40_000_000},
            )
        return str(error.value)

    told = re.search(r"does not fit: .* or use --beams (\d+), which fits$", refusal(120))
    assert told is not None
    width = int(told[1])
    assert 1 < width < 120
    assert refusal(width + 1).endswith(f"or use --beams {width}, which fits")
    assert re.search(r"--beams 200 compares 400 continuations, .* use --beams 128", refusal(200))


# ---------------------------------------------------------------- commands


def test_the_command_prints_the_best_sequence_and_its_score(command: Any, directory: Path) -> None:
    ids = ";".join(",".join(map(str, prompt)) for prompt in PROMPTS[:2])
    options = ["--beams", 4, "--length-penalty", 0.5, "--max-new-tokens", 12, "--policy", "resident"]
    said = command("run", directory, *options, "--prompt-ids", ids, "--micro-batch-size", 2, "--json")
    assert said.code == 0, said.err
    printed = msgspec.json.decode(said.out)
    tokens, scores = searched(directory, PROMPTS[:2], WIDE, new_tokens=12)
    assert printed["plan"]["beams"] == 4
    assert printed["tokens"] == tokens
    assert printed["scores"] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("policy", ["cgopipe", "expert_streaming"])
def test_a_simulation_with_beams_does_the_work_of_all_of_them(policy: str) -> None:
    def simulated(beams: int) -> moesched.JobReport:
        return moesched.simulate_model(
            "mixtral-8x7b",
            machine="t4",
            policy=policy,
            workload=moesched.given_lengths([64] * 4, 4),
            batch_size=4,
            micro_batch_size=2,
            beams=beams,
            band=False,
        )

    one, four = simulated(1), simulated(4)
    assert four.prefill_seconds == pytest.approx(one.prefill_seconds, rel=0.02)
    assert four.lanes["accelerator"].busy_seconds > one.lanes["accelerator"].busy_seconds
    assert {kind.kind for kind in four.kinds} - {kind.kind for kind in one.kinds} == {"reorder"}


def test_random_searches_keep_the_books_of_the_cache(tmp_path: Path) -> None:
    chosen = random.Random(3)
    directory = small_model(tmp_path / "m", layers=2)
    for _ in range(4):
        prompts = [[chosen.randrange(256) for _ in range(chosen.randint(1, 40))] for _ in range(3)]
        sampling = Sampling(beams=chosen.randint(2, 9))
        tokens, _ = searched(directory, prompts, sampling, new_tokens=chosen.randint(1, 30))
        assert len({len(each) for each in tokens}) == 1
