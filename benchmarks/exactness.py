"""Check results against Hugging Face, and from policy to policy to the bit.

Against Hugging Face: the tiny Mixtral that ships and random models of every shape (Mixtral, DBRX, Qwen3-MoE with up
to 128 experts, OLMoE) generate greedily from prompts of mixed length in one batch. Hugging Face is given the same text
at once. In float32 a token counts as wrong where it is
not the first choice of Hugging Face, unless its first two logits are at most 1e-4 apart.

In bfloat16 our error and Hugging Face's own bfloat16 error are both taken against Hugging Face in float32 with the
same (rounded) weights, over all logits, in units of the spread of the model's logits, so that all models weigh the
same. Now and then rounding sends a token to another expert, on either side. That makes the errors of one model a matter
of luck, so they are pooled over all models, and given apart for the positions up to which neither side has taken
another expert than float32.

Beam search: Hugging Face's `generate` and ours, on some of these models, with widths from 4 to 16, several length
penalties, with early stopping and without. The best sequence must be the same, and its score to 1e-4. Models whose
attention sees one token only are left out: Hugging Face's KV cache keeps all tokens there.

From policy to policy: every shipped policy, and the adversary with many seeds, on a machine with one memory and on one
with two, in both dtypes: the logits of every step must be those of `resident` on one memory, to the bit. So must those
of models of odd sizes under every policy, with settings, in every way that tests take in turn (`_equal_bits.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _beams import hugging_face_beams, searched
from _equal_bits import EqualRun, all_runs
from _options import EXECUTION, Benchmark, track
from _random_models import (
    DECISIVE,
    hugging_face_logits,
    load_model,
    prompts_of,
    random_dbrx,
    random_mixtral,
    random_olmoe,
    random_qwen,
)
from _small_runs import ONE_MEMORY, TWO_MEMORIES, Generated, generate, same_bits

from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.sampling import Sampling
from moesched.tasks import Task
from odd_models import Reference

Tensor = torch.Tensor

TINY = Path(__file__).parents[1] / "examples" / "tiny-mixtral"
NEW_TOKENS = 16
MICRO_BATCH = 3
POLICIES = (
    "layer_streaming",
    "cgopipe",
    "expert_cache",
    "expert_streaming",
    "fastdecode",
    "flexgen",
    "flexgen_cpu",
    "lru_offload",
    "prefetch_gate",
    "twiddler",
)
MACHINES = (ONE_MEMORY, TWO_MEMORIES)
# Models whose pages are not much smaller than the blocks of a disk, which would fill the budget.
DEEP_MODELS = (("mixtrals", 0), ("mixtrals", 1), ("dbrxs", 0), ("qwens", 1), ("olmoes", 3))
DEEP_LAYERS = 4  # so that layers stream while others wait
SHARE_OF_WEIGHTS = 0.8
BEAM_WIDTHS = (4, 8, 12, 16)
LENGTH_PENALTIES = (1.0, 0.0, 2.0)
BEAM_MODELS = 6  # of each family
SAME_SCORE = 1e-4
MOST_BFLOAT16 = 2.0

MAKERS: dict[str, Callable[[int, int], Any]] = {
    "mixtrals": random_mixtral,
    "dbrxs": random_dbrx,
    "qwens": random_qwen,
    "olmoes": random_olmoe,
}


BENCHMARK = Benchmark(
    __doc__,
    "exactness",
    measures=(
        "benchmarks/_random_models.py",
        "benchmarks/_beams.py",
        "benchmarks/_equal_bits.py",
        "moesched/models",
        *EXECUTION,
    ),
    packages=("torch", "transformers"),
    parts=MAKERS,
    rounds=30,
    rounds_help="random models of each family",
    by_machine=False,
)
BENCHMARK.parser.add_argument("--seeds", type=int, default=20, help="seeds of the adversary")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    models = [(family, seed) for family in options.only for seed in range(options.rounds)]
    started = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for Hugging Face: work this small is done sooner by one thread
    with tempfile.TemporaryDirectory() as folder:
        directories = [TINY, *write_models(Path(folder), models, layers=2)]
        pairs = [compare(directory) for directory in track(directories, "against Hugging Face")]
        beams = compare_beams(directories[1:])
        torch.set_num_threads(threads)
        chosen = [(family, seed) for family, seed in DEEP_MODELS if family in options.only]
        deep = [TINY, *write_models(Path(folder), chosen, layers=DEEP_LAYERS)]
        policies = compare_policies(deep, options.seeds)
    figures: dict[str, Any] = {
        "seconds": round(time.perf_counter() - started, 1),
        "models": f"tiny-mixtral, and {options.rounds} random models of each family: {', '.join(options.only)}",
        "float32": float32_figures([pair.float32 for pair in pairs]),
        "bfloat16": bfloat16_figures([pair.bfloat16 for pair in pairs]),
        "beams": beams,
        "policies": policies,
    }
    print(json.dumps(figures, indent=2))
    BENCHMARK.write(figures)
    return 0 if all(reached(figures)) else 1


def reached(figures: dict[str, Any]) -> Iterator[bool]:
    """Each bar in turn."""
    yield figures["float32"]["wrong_tokens"] == 0
    yield all(each["ratio"] <= MOST_BFLOAT16 for each in figures["bfloat16"]["all_positions"].values())
    yield figures["beams"]["other_sequences"] == 0
    yield figures["beams"]["largest_difference_of_scores"] <= SAME_SCORE
    yield figures["policies"]["runs_that_differ"] == 0


def write_models(folder: Path, models: Sequence[tuple[str, int]], layers: int) -> list[Path]:
    """Random models, by family and seed, as Hugging Face saves them."""
    directories = []
    for family, seed in track(models, "random models"):
        maker = MAKERS[family]
        directories.append(folder / f"{maker.__name__}-{seed}-of-{layers}-layers")
        maker(seed, layers).save_pretrained(directories[-1])
    return directories


# ---------------------------------------------------------------- against Hugging Face


class Float32(NamedTuple):
    """A model's tokens in float32."""

    positions: int
    decisive: int
    wrong: int
    largest_difference: float


class Bfloat16(NamedTuple):
    """A model's errors in bfloat16, (R, S, V) by request, step and logit, in spreads of the exact logits.

    ours_same_RS, theirs_same_RS: that side has not taken another expert than float32, up to this position.
    """

    ours_RSV: Tensor
    theirs_RSV: Tensor
    ours_same_RS: Tensor
    theirs_same_RS: Tensor


class Pair(NamedTuple):
    """One model's comparison with Hugging Face."""

    float32: Float32
    bfloat16: Bfloat16


def compare(directory: Path) -> Pair:
    """One model, in float32 and in bfloat16."""
    checkpoint = open_checkpoint(directory)
    prompts = prompts_of(checkpoint.config.vocabulary)
    return Pair(
        compare_float32(directory, checkpoint, prompts), compare_bfloat16(directory, checkpoint, prompts)
    )


def compare_float32(directory: Path, checkpoint: Checkpoint, prompts: list[list[int]]) -> Float32:
    """Our greedy tokens and logits beside Hugging Face's for the same text."""
    ours = ours_in("float32", checkpoint, prompts, MICRO_BATCH)
    model = load_model(directory, torch.float32)
    expected_RSV = torch.stack(
        [hugging_face_logits(model, text)[-NEW_TOKENS - 1 : -1] for text in texts_of(prompts, ours)]
    )
    first, second = expected_RSV.topk(2, dim=-1).values.unbind(-1)
    decisive = first - second > DECISIVE
    wrong = (expected_RSV.argmax(-1) != torch.tensor(ours.tokens)) & decisive
    return Float32(
        decisive.numel(),
        int(decisive.sum()),
        int(wrong.sum()),
        float((ours.logits_RSV - expected_RSV).abs().max()),
    )


def compare_bfloat16(directory: Path, checkpoint: Checkpoint, prompts: list[list[int]]) -> Bfloat16:
    """Our bfloat16 logits and Hugging Face's beside float32 with the same rounded weights."""
    routed = Routed(checkpoint.config.layers, len(prompts), checkpoint.config.routed.experts)
    ours = ours_in("bfloat16", checkpoint, prompts, 1, routed)
    texts = texts_of(prompts, ours)
    model = load_model(directory, torch.bfloat16)
    theirs_RSV, their_counts = theirs_in(model, texts)
    exact = load_model(directory, torch.float32)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    exact_RSV, exact_counts = theirs_in(exact, texts)
    return Bfloat16(
        (ours.logits_RSV - exact_RSV) / exact_RSV.std(),
        (theirs_RSV - exact_RSV) / exact_RSV.std(),
        same_so_far(routed.counts_RSLE, exact_counts),
        same_so_far(their_counts, exact_counts),
    )


def same_so_far(counts_RSLE: Tensor, exact_RSLE: Tensor) -> Tensor:
    """Test whether all experts were those of float32, up to each position (R, S)."""
    return (counts_RSLE == exact_RSLE).all(-1).all(-1).cumprod(1).bool()


def ours_in(
    dtype: str, checkpoint: Checkpoint, prompts: list[list[int]], micro_batch_size: int, *observers: Any
) -> Generated:
    """Greedy generation by the policy that needs no transfers."""
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config, dtype), keep_logits=True)
    return generate(
        device,
        make_policy("resident"),
        ONE_MEMORY,
        prompts,
        new_tokens=NEW_TOKENS,
        micro_batch_size=micro_batch_size,
        observers=observers,
    )


def texts_of(prompts: Sequence[Sequence[int]], generated: Generated) -> list[list[int]]:
    """Each prompt with what was generated from it."""
    return [[*prompt, *tokens] for prompt, tokens in zip(prompts, generated.tokens, strict=True)]


class Routed:
    """Numbers of tokens of each expert: by request (each a micro-batch of its own), step, layer and expert."""

    def __init__(self, layers: int, requests: int, experts: int) -> None:
        self.counts_RSLE = torch.zeros(requests, NEW_TOKENS, layers, experts, dtype=torch.int64)

    def ended(self, task: Task) -> None:
        """Note what a router chose."""
        if task.verb == "post_attention":
            for expert, count in task.value.items():
                self.counts_RSLE[task.micro_batch, task.step, task.layer, expert] = count


@torch.inference_mode()
def theirs_in(model: Any, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Hugging Face's logits (R, S, V) of the generated positions, and its routing as `Routed` counts it."""
    logits, counts = [], []
    for text in texts:
        out = model(torch.tensor([text[:-1]]), output_router_logits=True)
        logits.append(out.logits[0, -NEW_TOKENS:].float())
        counts.append(torch.stack([routed_by_step(layer, model) for layer in out.router_logits], dim=1))
    return torch.stack(logits), torch.stack(counts)


def routed_by_step(logits_TE: Tensor, model: Any) -> Tensor:
    """Numbers of tokens of each expert in each step (S, E): the first step takes in the whole prompt."""
    chosen = logits_TE.float().softmax(-1).topk(model.num_experts_per_tok).indices
    counts_TE = torch.zeros(logits_TE.shape, dtype=torch.int64).scatter_(1, chosen, 1)
    prompt = len(counts_TE) - NEW_TOKENS + 1
    return torch.cat((counts_TE[:prompt].sum(0, keepdim=True), counts_TE[prompt:]))


def float32_figures(models: list[Float32]) -> dict[str, Any]:
    """All models together."""
    positions, decisive, wrong, _ = map(sum, zip(*models, strict=True))
    return {
        "positions": positions,
        "left_out": positions - decisive,
        "wrong_tokens": wrong,
        "largest_difference_of_logits": max(model.largest_difference for model in models),
    }


def bfloat16_figures(models: list[Bfloat16]) -> dict[str, Any]:
    """Errors pooled over all models, and the ratios of single ones."""
    everywhere = [(model.ours_RSV.flatten(), model.theirs_RSV.flatten()) for model in models]
    both = [model.ours_same_RS & model.theirs_same_RS for model in models]
    same = [
        (model.ours_RSV[kept].flatten(), model.theirs_RSV[kept].flatten())
        for model, kept in zip(models, both, strict=True)
        if kept.any()
    ]
    return {
        "bar": MOST_BFLOAT16,
        "share_with_the_experts_of_float32": {
            "ours": share([model.ours_same_RS for model in models]),
            "hugging_face": share([model.theirs_same_RS for model in models]),
            "both": share(both),
        },
        "all_positions": pooled(everywhere),
        "same_experts": pooled(same),
        "ratio_by_model": by_model(everywhere),
        "ratio_by_model_same_experts": by_model(same),
    }


def share(flags: list[Tensor]) -> float:
    """The share that is true."""
    return round(float(torch.cat([each.flatten() for each in flags]).float().mean()), 3)


def by_model(models: list[tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """Our error over theirs, one model at a time."""
    figures = {}
    for name, error in ERRORS.items():
        ratios = [error(ours) / error(theirs) for ours, theirs in models]
        figures[name] = {"best": min(ratios), "median": median(ratios), "worst": max(ratios)}
    return {name: {k: round(v, 3) for k, v in ratios.items()} for name, ratios in figures.items()}


def mean_absolute(errors: Tensor) -> float:
    """The mean of absolute errors."""
    return float(errors.abs().mean())


def root_mean_square(errors: Tensor) -> float:
    """The root of the mean square."""
    return float(errors.square().mean().sqrt())


ERRORS = {"mean_absolute": mean_absolute, "root_mean_square": root_mean_square}


def pooled(models: list[tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """Our error, theirs, and the first over the second, over the logits of all models."""
    ours, theirs = (torch.cat(errors) for errors in zip(*models, strict=True))
    return {
        name: {
            "ours": round(error(ours), 5),
            "hugging_face": round(error(theirs), 5),
            "ratio": round(error(ours) / error(theirs), 3),
        }
        for name, error in ERRORS.items()
    }


# ---------------------------------------------------------------- beam search


def compare_beams(directories: Sequence[Path]) -> dict[str, Any]:
    """Our best sequences and their scores beside those that Hugging Face's `generate` finds."""
    chosen = [
        directory
        for directory in directories
        if int(directory.name.split("-")[1]) < BEAM_MODELS
        and open_checkpoint(directory).config.attention.window != 1
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


def compare_policies(directories: list[Path], seeds: int) -> dict[str, Any]:
    """Every policy beside `resident` on one memory."""
    cases = [
        (directory, dtype, machine)
        for directory in directories
        for dtype in ("float32", "bfloat16")
        for machine in MACHINES
    ]
    runs, logits, differing = 0, 0, []
    for directory, dtype, machine in track(cases, "from policy to policy"):
        checkpoint = open_checkpoint(directory)
        prompts = prompts_of(checkpoint.config.vocabulary)
        expected = ours_in(dtype, checkpoint, prompts, MICRO_BATCH)
        for name, settings in policies(seeds):
            device = TorchDevice(checkpoint, weight_layout(checkpoint.config, dtype), keep_logits=True)
            got = generate(
                device,
                make_policy(name, settings),
                machine,
                prompts,
                new_tokens=NEW_TOKENS,
                micro_batch_size=MICRO_BATCH,
                weights=2.0 if name == "resident" else SHARE_OF_WEIGHTS,
            )
            runs += 1
            logits += got.logits_RSV.numel()
            if got.tokens != expected.tokens or not same_bits(got.logits_RSV, expected.logits_RSV):
                differing.append(f"{name} {settings}, {directory.name}, {dtype}, {machine.name}")
    odd = list(all_runs())
    runs += len(odd)
    differing += differing_at_odd_sizes(odd)
    return {
        "policies": sorted({"resident", *POLICIES, *(each.policy for each in odd)}),
        "adversaries": seeds,
        "models": len(directories) + len({each.model for each in odd}),
        "runs": runs,
        "logits": logits,
        "runs_that_differ": len(differing),
        "differing": differing[:20],
    }


def differing_at_odd_sizes(runs: Sequence[EqualRun]) -> list[str]:
    """The runs of models of odd sizes whose logits differ."""
    differing = []
    with tempfile.TemporaryDirectory() as folder:
        references = {
            model: Reference.of(model, Path(folder) / str(number))
            for number, model in enumerate({each.model: None for each in runs})
        }
        for each in track(runs, "at odd sizes"):
            if each.differs(references[each.model]):
                differing.append(each.name)
    return differing


def policies(seeds: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Each policy's name and settings."""
    for name in ("resident", *POLICIES):
        yield name, {}
    for seed in range(seeds):
        yield "adversarial", {"seed": seed}


if __name__ == "__main__":
    sys.exit(main())
