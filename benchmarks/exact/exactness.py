"""Check results against Hugging Face, and from policy to policy to the bit.

Against Hugging Face: the tiny Mixtral that ships and random models of every shape (Mixtral, DBRX, Qwen3-MoE with up
to 128 experts, OLMoE, MiniMax-M2, GLM-4.5, gpt-oss, Granite) generate greedily from prompts of mixed length in one
batch. Hugging Face is given the same text at once. In float32 a token counts as wrong where it is not the first choice
of Hugging Face, unless its first two logits are at most 1e-4 apart.

Two computations in float32 differ by the rounding of both. So our error and Hugging Face's own are also taken against
Hugging Face in float64; and those in bfloat16 against Hugging Face in float32 with the same (rounded) weights: over all
logits, in units of the spread of the model's logits, so that all models weigh the same. Now and then rounding sends a
token to another expert, on either side. That makes the errors of one model a matter of luck, so they are pooled over
all models.

Beam search: Hugging Face's `generate` and ours, on some of these models, with widths from 4 to 16, several length
penalties, with early stopping and without. The best sequence must be the same, and its score to 1e-4. Models whose
attention sees one token only are left out: Hugging Face's KV cache keeps all tokens there.

From policy to policy: models of odd sizes under every policy, with settings, and under the adversary with many seeds,
in every way that tests take in turn (`equal_bits.py`): the logits of every step must be those of `resident` on one
memory, to the bit.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.exact._beams import hugging_face_beams, searched
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, none_of
from benchmarks.record.results import ROOT
from benchmarks.shared.equal_bits import SCHEDULES, all_runs
from benchmarks.shared.random_models import (
    DECISIVE,
    load_model,
    prompts_of,
    random_dbrx,
    random_glm,
    random_gpt_oss,
    random_granite,
    random_minimax,
    random_mixtral,
    random_olmoe,
    random_qwen,
)
from benchmarks.shared.small_runs import ONE_MEMORY, Generated, generate
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.sampling import Sampling
from odd_models import Reference

Tensor = torch.Tensor

TINY = ROOT / "examples" / "tiny-mixtral"
NEW_TOKENS = 16
MICRO_BATCH = 3
ADVERSARIES = 20
"""Seeds of the policy `adversarial`."""
BEAM_WIDTHS = (4, 8, 12, 16)
LENGTH_PENALTIES = (1.0, 0.0, 2.0)
BEAM_MODELS = 6  # of each family
SAME_SCORE = 1e-4
MOST_ERROR = 2.0
MOST_DIFFERENCE = 1e-5

MAKERS: dict[str, Callable[[int], Any]] = {
    "mixtrals": random_mixtral,
    "dbrxs": random_dbrx,
    "qwens": random_qwen,
    "olmoes": random_olmoe,
    "minimaxes": random_minimax,
    "glms": random_glm,
    "gpt-oss": random_gpt_oss,
    "granites": random_granite,
}


def claims(result: Result) -> Iterator[Claim]:
    """Against Hugging Face, and from policy to policy."""
    float32, policies = result["float32"], result["policies"]
    counted = float32["positions"] - float32["left_out"]
    yield none_of("wrong greedy tokens in float32 against Hugging Face", float32["wrong_tokens"], counted)
    words = "float32 logits beside Hugging Face's, of the largest logit"
    yield at_most(words, float32["largest_difference"], MOST_DIFFERENCE, "{:.1e}")
    for dtype in ("float32", "bfloat16"):
        worst = max(each["ratio"] for each in result[f"{dtype}_errors"].values())
        yield at_most(f"error of {dtype} logits over Hugging Face's own", worst, MOST_ERROR, "{:.2f}")
    beams = result["beams"]
    words = "beam searches whose best sequence is not Hugging Face's"
    yield none_of(words, beams["other_sequences"], beams["searches"])
    words = "largest difference of their scores"
    yield at_most(words, beams["largest_difference_of_scores"], SAME_SCORE, "{:.0e}")
    words = "runs of policies whose logits differ in a bit"
    yield none_of(words, policies["runs_that_differ"], policies["runs"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=MAKERS,
    rounds=30,
    rounds_help="random models of each family",
    by_machine=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    models = [(family, seed) for family in options.only for seed in range(options.rounds)]
    started = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for Hugging Face: work this small is done sooner by one thread
    with tempfile.TemporaryDirectory() as folder:
        directories = [TINY, *write_models(Path(folder), models)]
        pairs = [compare(directory) for directory in track(directories, "against Hugging Face")]
        beams = compare_beams(directories[1:])
        torch.set_num_threads(threads)
    policies = compare_policies()
    figures: dict[str, Any] = {
        "seconds": round(time.perf_counter() - started, 1),
        "models": f"tiny-mixtral, and {options.rounds} random models of each family: {', '.join(options.only)}",
        "float32": float32_figures([pair.float32 for pair in pairs]),
        "float32_errors": error_figures([pair.float32_errors for pair in pairs]),
        "bfloat16_errors": error_figures([pair.bfloat16_errors for pair in pairs]),
        "beams": beams,
        "policies": policies,
    }
    return BENCHMARK.write(figures)


def write_models(folder: Path, models: Sequence[tuple[str, int]]) -> list[Path]:
    """Random models, by family and seed, as Hugging Face saves them."""
    directories = []
    for family, seed in track(models, "random models"):
        maker = MAKERS[family]
        directories.append(folder / f"{maker.__name__}-{seed}")
        maker(seed).save_pretrained(directories[-1])
    return directories


# ---------------------------------------------------------------- against Hugging Face


class Float32(NamedTuple):
    """A model's tokens in float32; differences of logits are relative to its largest logit."""

    positions: int
    decisive: int
    wrong: int
    largest_difference: float


Errors = tuple[Tensor, Tensor]
"""Our errors and Hugging Face's, of all logits, in spreads of the exact logits."""


class Pair(NamedTuple):
    """One model's comparison with Hugging Face."""

    float32: Float32
    float32_errors: Errors
    bfloat16_errors: Errors


def compare(directory: Path) -> Pair:
    """One model, in float32 and in bfloat16."""
    checkpoint = open_checkpoint(directory)
    prompts = prompts_of(checkpoint.config.vocabulary)
    return Pair(
        *compare_float32(directory, checkpoint, prompts), compare_bfloat16(directory, checkpoint, prompts)
    )


def compare_float32(
    directory: Path, checkpoint: Checkpoint, prompts: list[list[int]]
) -> tuple[Float32, Errors]:
    """Our greedy tokens and logits beside Hugging Face's for the same text, and both logits beside float64."""
    ours = ours_in("float32", checkpoint, prompts, MICRO_BATCH)
    texts = texts_of(prompts, ours)
    model = load_model(directory, torch.float32)
    expected_RSV = theirs_in(model, texts)
    exact_RSV = theirs_in(model.double(), texts)
    first, second = expected_RSV.topk(2, dim=-1).values.unbind(-1)
    decisive = first - second > DECISIVE
    wrong = (expected_RSV.argmax(-1) != torch.tensor(ours.tokens)) & decisive
    found = Float32(
        decisive.numel(),
        int(decisive.sum()),
        int(wrong.sum()),
        float((ours.logits_RSV - expected_RSV).abs().max() / expected_RSV.abs().max()),
    )
    return found, errors_beside(exact_RSV, ours.logits_RSV, expected_RSV)


def compare_bfloat16(directory: Path, checkpoint: Checkpoint, prompts: list[list[int]]) -> Errors:
    """Our bfloat16 logits and Hugging Face's beside float32 with the same rounded weights."""
    ours = ours_in("bfloat16", checkpoint, prompts, 1)
    texts = texts_of(prompts, ours)
    model = load_model(directory, torch.bfloat16)
    theirs_RSV = theirs_in(model, texts)
    exact = load_model(directory, torch.float32)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    exact_RSV = theirs_in(exact, texts)
    return errors_beside(exact_RSV, ours.logits_RSV, theirs_RSV)


def errors_beside(exact_RSV: Tensor, ours_RSV: Tensor, theirs_RSV: Tensor) -> Errors:
    """The errors of both, beside logits that are exact."""
    spread = exact_RSV.std()
    return ((ours_RSV - exact_RSV) / spread).flatten(), ((theirs_RSV - exact_RSV) / spread).flatten()


def ours_in(dtype: str, checkpoint: Checkpoint, prompts: list[list[int]], micro_batch_size: int) -> Generated:
    """Greedy generation by the policy that needs no transfers."""
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config, dtype), keep_logits=True)
    return generate(
        device,
        make_policy("resident"),
        ONE_MEMORY,
        prompts,
        new_tokens=NEW_TOKENS,
        micro_batch_size=micro_batch_size,
    )


def texts_of(prompts: Sequence[Sequence[int]], generated: Generated) -> list[list[int]]:
    """Each prompt with what was generated from it."""
    return [[*prompt, *tokens] for prompt, tokens in zip(prompts, generated.tokens, strict=True)]


@torch.inference_mode()
def theirs_in(model: Any, texts: list[list[int]]) -> Tensor:
    """Hugging Face's logits (R, S, V) of the generated positions."""
    return torch.stack([model(torch.tensor([text[:-1]])).logits[0, -NEW_TOKENS:] for text in texts])


def float32_figures(models: list[Float32]) -> dict[str, Any]:
    """All models together."""
    positions, decisive, wrong, _ = map(sum, zip(*models, strict=True))
    return {
        "positions": positions,
        "left_out": positions - decisive,
        "wrong_tokens": wrong,
        "largest_difference": max(model.largest_difference for model in models),
    }


def error_figures(models: list[Errors]) -> dict[str, Any]:
    """Our error, theirs, and the first over the second, over the logits of all models."""
    ours, theirs = (torch.cat(errors) for errors in zip(*models, strict=True))
    return {
        name: {
            "ours": float(f"{error(ours):.3g}"),
            "hugging_face": float(f"{error(theirs):.3g}"),
            "ratio": round(error(ours) / error(theirs), 3),
        }
        for name, error in ERRORS.items()
    }


def mean_absolute(errors: Tensor) -> float:
    """The mean of absolute errors."""
    return float(errors.abs().mean())


def root_mean_square(errors: Tensor) -> float:
    """The root of the mean square."""
    return float(errors.square().mean().sqrt())


ERRORS = {"mean_absolute": mean_absolute, "root_mean_square": root_mean_square}


# ---------------------------------------------------------------- beam search


def compare_beams(directories: Sequence[Path]) -> dict[str, Any]:
    """Our best sequences and their scores beside those that Hugging Face's `generate` finds."""
    chosen = [
        directory
        for directory in directories
        if int(directory.name.split("-")[1]) < BEAM_MODELS
        and all(layer.grouped.window != 1 for layer in open_checkpoint(directory).config.kinds)
    ]
    searches, others, largest = 0, [], 0.0
    for number, directory in enumerate(track(chosen, "beam search")):
        sampling = Sampling(
            beams=BEAM_WIDTHS[number % len(BEAM_WIDTHS)],
            length_penalty=LENGTH_PENALTIES[number % len(LENGTH_PENALTIES)],
            early_stopping=number % 2 == 1,
        )
        config = open_checkpoint(directory).config
        prompts = prompts_of(config.vocabulary, [13, 2, 5])
        model = load_model(directory, torch.float32)
        ours = searched(directory, prompts, sampling, new_tokens=NEW_TOKENS)
        for prompt, tokens, score in zip(prompts, *ours, strict=True):
            theirs, their_score = hugging_face_beams(model, prompt, sampling, config.stop_tokens, NEW_TOKENS)
            searches += 1
            largest = max(largest, abs(score - their_score))
            if tokens != theirs:
                others.append(f"{directory.name}, {sampling.beams} beams, prompt of {len(prompt)}")
    return {
        "searches": searches,
        "widths": BEAM_WIDTHS,
        "other_sequences": len(others),
        "others": others[:20],
        "largest_difference_of_scores": largest,
    }


# ---------------------------------------------------------------- from policy to policy


def compare_policies() -> dict[str, Any]:
    """Models of odd sizes under every policy in every way, beside `resident` on one memory."""
    adversary = [("adversarial", {"seed": seed}) for seed in range(2, ADVERSARIES)]
    runs = [*all_runs(), *SCHEDULES._replace(policies=adversary).whole()]
    differing = []
    with tempfile.TemporaryDirectory() as folder:
        references = {
            model: Reference.of(model, Path(folder) / str(number))
            for number, model in enumerate({each.model: None for each in runs})
        }
        for each in track(runs, "from policy to policy"):
            if each.differs(references[each.model]):
                differing.append(each.name)
    return {
        "policies": sorted({each.policy for each in runs}),
        "models": len(references),
        "runs": len(runs),
        "runs_that_differ": len(differing),
        "differing": differing[:20],
    }


if __name__ == "__main__":
    sys.exit(main())
