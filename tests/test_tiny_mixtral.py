"""The small trained model that ships: its size, its text, and how unevenly its experts are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tiny_corpus import Corpus, is_held_out, read_corpus
from tiny_evaluation import Sample, bits_per_byte, expert_shares, load, windows, words_share, write_samples
from tiny_page import readme
from tiny_training import Recipe, rate_at
from train_tiny_mixtral import missed_bars, size_of

from moesched.models.checkpoint import open_checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = EXAMPLES / "tiny-mixtral"


@pytest.fixture(scope="module")
def corpus() -> Any:
    """The docstrings of the Python that runs the tests, which need not be the one that trained the model."""
    found = read_corpus()
    if len(found.held_out) < 50:
        pytest.skip("this Python has no readable standard library beside it (a zip, or only .pyc files)")
    return found


@pytest.fixture(scope="module")
def loaded() -> Any:
    """The model and its tokenizer, loaded by transformers."""
    return load(MODEL)


@pytest.fixture(scope="module")
def figures() -> Any:
    """Figures that the script measured when it trained the model."""
    return json.loads((MODEL / "training.json").read_text())


def test_the_whole_directory_has_at_most_16_megabytes() -> None:
    files = {file.name: file.stat().st_size for file in MODEL.iterdir()}
    assert sum(files.values()) <= 16_000_000
    assert files.keys() >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


def test_the_weights_have_the_names_of_published_checkpoints() -> None:
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
    assert "model.layers.0.block_sparse_moe.experts.7.w2.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_moesched_reads_its_shape_and_stop_token() -> None:
    config = open_checkpoint(MODEL).config
    assert (config.layers, config.routed.experts, config.routed.top_k) == (4, 8, 2)
    assert config.attention.kv_heads < config.attention.heads
    assert config.stop_tokens == (1,)
    assert config.dtype == "bfloat16"


def test_any_prompt_survives_the_tokenizer(loaded: Any) -> None:
    _, tokenizer = loaded
    prompt = "Return naïve 日本語 😀\n\n    \x00 <s>"
    ids = tokenizer(prompt)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == prompt


def test_every_bar_was_reached_when_it_was_trained(figures: Any) -> None:
    assert not missed_bars(figures, size_of(MODEL), figures["total_minutes_with_measuring"])


def test_its_page_states_the_measured_figures(figures: Any) -> None:
    recipe = Recipe(**figures["recipe"])
    assert (MODEL / "README.md").read_text(encoding="utf-8") == readme(recipe, figures)


def test_the_words_it_writes_are_words_of_its_training_text(loaded: Any, corpus: Any) -> None:
    samples = write_samples(loaded[0], loaded[1], corpus.held_out, count=12, seed=7)
    assert sum(len(sample.words()) for sample in samples) > 100
    assert words_share(samples, corpus.words()) >= 0.8


def test_every_expert_is_used_and_none_alike(loaded: Any, corpus: Any) -> None:
    for shares in expert_shares(loaded[0], loaded[1], corpus.held_out[::6]):
        assert min(shares) >= 0.02
        assert max(shares) >= 1.5 * min(shares)


def test_held_out_text_is_predicted_about_as_well_as_stated(loaded: Any, corpus: Any, figures: Any) -> None:
    measured = bits_per_byte(loaded[0], loaded[1], corpus.held_out[::6])
    assert measured == pytest.approx(figures["held_out_bits_per_byte"], rel=0.15)


def test_a_word_that_the_length_limit_cut_off_does_not_count() -> None:
    cut = Sample(prompt="Return the na", written="me of the fil", ended=False)
    assert cut.words() == ["name", "of", "the"]
    whole = Sample(prompt="Return the", written=" name of the file", ended=True)
    assert whole.words() == ["name", "of", "the", "file"]


def test_docstrings_are_kept_once_and_split_by_module(tmp_path: Path) -> None:
    modules = {f"module_{number}.py": f'"""Module {number}."""' for number in range(100)}
    for name, source in modules.items():
        (tmp_path / name).write_text(source + '\ndef same():\n    """The same everywhere."""\n')
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_it.py").write_text('"""Left out."""')

    found = read_corpus(tmp_path)

    together = found.training + found.held_out
    assert len(set(together)) == len(together) == 101
    assert found.held_out == tuple(
        f"Module {number}." for number in sorted(range(100), key=str) if is_held_out(f"module_{number}.py")
    )
    assert Corpus(("The name, the Name",), ()).words() == {"the", "name"}


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    recipe = Recipe(peak_rate=1.0, warmup=0.1)
    rates = [rate_at(progress, recipe) for progress in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


def test_long_documents_are_measured_once_per_token() -> None:
    document = list(range(1_000))
    for context in (8, 100, 999, 1_000, 4_000):
        counted = [token for tokens, first in windows(document, context) for token in tokens[first:]]
        assert counted == document[1:]
