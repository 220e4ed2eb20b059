"""Accuracy of previews of the router on examples/tiny-mixtral, by the number of layers ahead.

The example's prompts run on the torch device, each as a micro-batch, under a policy that previews all later layers in
every layer. Accuracy is the share of the experts that the router then chose for a token in decode steps which had been
forecast. Beside it: the share that a random forecast of as many experts would find, and the share that the layer's most
popular experts, as many as a token chooses, would find.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import moesched
from benchmarks.fidelity._previewing import Kept
from benchmarks.record.benchmark import Benchmark
from benchmarks.record.claims import Claim, Result
from benchmarks.record.results import ROOT
from benchmarks.record.tables import markdown
from moesched.inputs.prompts import read_prompts
from moesched.models.checkpoint import open_checkpoint

MODEL = ROOT / "examples" / "tiny-mixtral"
PROMPTS = ROOT / "examples" / "prompts.jsonl"
NEW_TOKENS = 64

Where = tuple[int, int, int, int]
"""A request, its step, a layer, and the layers ahead: 0 for the router's own choice."""
Values = Mapping[Where, Mapping[int, int]]


def claims(result: Result) -> Iterator[Claim]:
    """Previews of the router on the model that ships."""
    decode = result["decode"]
    ahead = ", ".join(str(each["ahead"]) for each in decode)
    words = f"experts of one token that previews forecast {ahead} layers ahead, {result['model']}"
    figures = ", ".join(f"{each['accuracy']:.1%}" for each in decode)
    yield Claim(f"{words} (at random {decode[0]['chance']:.0%})", figures)


def tables(result: Result) -> dict[str, str]:
    """Accuracy of previews by the number of layers ahead, and of always naming the most popular experts."""
    decode, popular = result["decode"], result["popular"]
    layers = sorted(popular, key=int)
    rows = [
        [
            each["ahead"],
            f"{each['forecasts']:,}",
            *(f"{each[name]:.1%}" for name in ("accuracy", "chance")),
            f"{decode[0]['accuracy'] ** each['ahead']:.1%}",
            *(f"{each['by_layer'][i]:.1%}" if i in each["by_layer"] else "" for i in layers[1:]),
        ]
        for each in decode
    ]
    naming = [f"always the {result['top_k']} most popular", "", "", "", ""]
    rows.append([*naming, *(f"{popular[i]:.1%}" for i in layers[1:])])
    columns = [
        "layers ahead",
        "previews",
        "forecast",
        "at random",
        "nth power",
        *(f"of layer {i}" for i in layers[1:]),
    ]
    return {"previews": markdown(columns, rows)}


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    tables=tables,
    parts=["decode"],
    rounds=32,
    rounds_help="number of prompts",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the model, and write what was found."""
    options = BENCHMARK.parse(arguments)
    config = open_checkpoint(MODEL).config
    values = seen(options.rounds)
    return BENCHMARK.write(
        {
            "model": MODEL.name,
            "top_k": config.routed.top_k,
            "experts": config.routed.experts,
            "popular": popular(values, config.routed.top_k),
            "decode": [accuracy(values, ahead, config.routed.experts) for ahead in range(1, config.layers)],
        }
    )


def seen(prompts: int) -> dict[Where, Mapping[int, int]]:
    """The router's choices in decode steps and their previews, up to the end of each request's text."""
    texts = read_prompts(PROMPTS)[:prompts]
    report = moesched.run_model(
        MODEL,
        texts,
        policy="benchmarks.fidelity._previewing:Kept",
        max_new_tokens=NEW_TOKENS,
        batch_size=len(texts),
        micro_batch_size=1,
    )
    [policy] = Kept.last(1)
    assert report.tokens is not None, "it is measured"
    values = {}
    for (step, layer, micro_batch, ahead), value in policy.seen.items():
        [request] = policy.micro_batches[micro_batch]
        if 0 < step < len(report.tokens[request]):
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
    for (_, _, layer, ahead), value in values.items():
        if not ahead:
            counts.setdefault(layer, Counter()).update(value)
    return {
        layer: sum(count for _, count in each.most_common(top_k)) / each.total()
        for layer, each in counts.items()
    }


if __name__ == "__main__":
    sys.exit(main())
