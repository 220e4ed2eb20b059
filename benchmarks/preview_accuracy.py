"""Accuracy of previews of the router on examples/tiny-mixtral, by the number of layers ahead.

The example's prompts run on the torch device, each as a micro-batch, under a policy that previews all later layers in
every layer. Accuracy is the share of the experts that the router then chose which had been forecast, for one token in
decode steps, and for a whole prompt in prefill. Beside it: the share that a random forecast of as many experts would
find, and the share that the layer's most popular experts, as many as a token chooses, would find in decode steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from _options import EXECUTION, Benchmark
from _previewing import Kept
from _results import ROOT

import moesched
from moesched.inputs.prompts import read_prompts
from moesched.models.checkpoint import open_checkpoint

MODEL = ROOT / "examples" / "tiny-mixtral"
PROMPTS = ROOT / "examples" / "prompts.jsonl"
PARTS = ("decode", "prefill")
NEW_TOKENS = 64

Where = tuple[int, int, int, int]
"""A request, its step, a layer, and the layers ahead: 0 for the router's own choice."""
Values = Mapping[Where, Mapping[int, int]]

BENCHMARK = Benchmark(
    __doc__,
    "preview_accuracy",
    measures=EXECUTION,
    parts=PARTS,
    packages=("torch",),
    rounds=32,
    rounds_help="number of prompts",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the model, and write what was found."""
    options = BENCHMARK.parse(arguments)
    config = open_checkpoint(MODEL).config
    values = seen(options.rounds)
    found = {}
    for part in options.only:
        chosen = {where: value for where, value in values.items() if (where[1] == 0) == (part == "prefill")}
        found[part] = [accuracy(chosen, ahead, config.routed.experts) for ahead in range(1, config.layers)]
        for each in found[part]:
            print(f"{part:<8} {each['ahead']} ahead: {each['accuracy']:.1%}, by chance {each['chance']:.1%}")
    BENCHMARK.write(
        {
            "model": MODEL.name,
            "top_k": config.routed.top_k,
            "experts": config.routed.experts,
            "popular": popular(values, config.routed.top_k),
            **found,
        }
    )


def seen(prompts: int) -> dict[Where, Mapping[int, int]]:
    """The router's choices and their previews, up to the end of each request's text."""
    texts = read_prompts(PROMPTS)[:prompts]
    report = moesched.run_model(
        MODEL,
        texts,
        policy="_previewing:Kept",
        max_new_tokens=NEW_TOKENS,
        batch_size=len(texts),
        micro_batch_size=1,
    )
    [policy] = Kept.last(1)
    assert report.tokens is not None, "it is measured"
    values = {}
    for (step, layer, micro_batch, ahead), value in policy.seen.items():
        [request] = policy.micro_batches[micro_batch]
        if step < len(report.tokens[request]):
            values[request, step, layer, ahead] = value
    return values


def accuracy(values: Values, ahead: int, experts: int) -> dict[str, Any]:
    """Previews from one distance: all of them, and those of each layer."""
    by_layer: dict[int, list[tuple[Mapping[int, int], Mapping[int, int]]]] = {}
    for (request, step, layer, far), forecast in values.items():
        if far == ahead:
            by_layer.setdefault(layer, []).append((forecast, values[request, step, layer, 0]))
    every = [pair for pairs in by_layer.values() for pair in pairs]
    return {
        "ahead": ahead,
        "forecasts": len(every),
        "accuracy": share_found(every),
        "chance": sum(len(f) / experts * len(c) for f, c in every) / sum(len(c) for _, c in every),
        "by_layer": {layer: share_found(pairs) for layer, pairs in sorted(by_layer.items())},
    }


def share_found(pairs: Iterable[tuple[Mapping[int, int], Mapping[int, int]]]) -> float:
    """The share of the chosen experts, distinct in each micro-batch, that had been forecast."""
    counts = [(len(forecast.keys() & chosen.keys()), len(chosen)) for forecast, chosen in pairs]
    return sum(found for found, _ in counts) / sum(total for _, total in counts)


def popular(values: Values, top_k: int) -> dict[int, float]:
    """By layer, the share of the choices in decode steps that the most popular `top_k` experts are."""
    counts: dict[int, Counter[int]] = {}
    for (_, step, layer, ahead), value in values.items():
        if step and not ahead:
            counts.setdefault(layer, Counter()).update(value)
    return {
        layer: sum(count for _, count in each.most_common(top_k)) / each.total()
        for layer, each in counts.items()
    }


if __name__ == "__main__":
    main()
