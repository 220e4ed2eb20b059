"""Writes the tables of docs/fidelity.md and docs/transports.md from the result files: no figure is typed by hand.

    python benchmarks/_measured_pages.py

The pages' words are their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from _pages import DOCS, fill
from _results import RESULTS
from _summary import all_reduce, command, fidelity, machine, peak_memory

Rows = Callable[[dict[str, Any]], Iterator[str]]


def main() -> None:
    """Write every table anew from whichever result files there are."""
    for page in ("fidelity.md", "transports.md"):
        fill(DOCS / page, table)


def table(name: str) -> str:
    """The tables of a place, one for each machine."""
    result_name, rows = TABLES[name]
    parts = []
    for file in sorted(RESULTS.glob(f"{result_name}-*.json")):
        result = json.loads(file.read_text())
        lines = [f"| {row} |" for row in rows(result)]
        if len(lines) > 2:
            parts.append(f"{machine(result)}: `{command(file, result)}`\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts) or f"No result yet: `python benchmarks/{result_name}.py` makes one."


def replays(result: dict[str, Any], error: str = "replay_error_percent") -> Iterator[str]:
    """The error of each policy's replays, setting by setting."""
    policies = list(
        dict.fromkeys(each["policy"] for one in result["settings"].values() for each in one["policies"])
    )
    yield " | ".join(["replay's error, %", *policies])
    yield " | ".join(["---", *("---:" for _ in policies)])
    for name, setting in result["settings"].items():
        errors = {each["policy"]: f"{each[error]:+.2f}" for each in setting["policies"] if error in each}
        if errors:
            yield " | ".join([name, *(errors.get(policy, "does not fit") for policy in policies)])


def ranks(result: dict[str, Any]) -> Iterator[str]:
    """How far the simulated order is the measured one, setting by setting."""
    yield (
        "setting | of | pairs beyond noise | in order | fastest | chosen by the simulator | regret | beyond noise "
        "| not in order"
    )
    yield "--- | --- | ---: | ---: | --- | --- | ---: | ---: | ---"
    for name, setting in result["settings"].items():
        for what, order in setting["ranking"].items():
            wrong = "; ".join(
                f"{pair['faster']} before {pair['slower']} "
                f"({pair['measured_percent']:+.1f} %, predicted {pair['predicted_percent']:+.1f} %)"
                for pair in order["discordant"]
            )
            regret = order.get("regret_beyond_noise_percent")  # older results have none
            beyond_noise = "" if regret is None else f"{regret:.1f} %"
            yield (
                f"{name} | {what} | {order['pairs_beyond_noise']} | {order['concordant']} | {order['fastest']} "
                f"| {order['chosen']} | {order['regret_percent']:.1f} % "
                f"| {beyond_noise} | {wrong}"
            )


def settings(result: dict[str, Any]) -> Iterator[str]:
    """What the settings are."""
    yield "setting | model | machine | room for weights | batch | micro-batch | new tokens | left out"
    yield "--- | --- | --- | ---: | ---: | ---: | ---: | ---"
    for name, each in result["settings"].items():
        yield (
            f"{name} | {each['model']} | {each['machine']} | {100 * each['share_of_weights']:.0f} % "
            f"| {each['batch_size']} | {each['micro_batch_size']} | {each['new_tokens']} "
            f"| {', '.join(each['left_out'])}"
        )


def predictions(result: dict[str, Any]) -> Iterator[str]:
    """Decode time and lanes of runs that were never seen; results of totals only are left to docs/results.md."""
    yield "model | policy | batch | decode measured, s | predicted, s | error | bar | holds | lane that is off the most"
    yield "--- | --- | --- | ---: | ---: | ---: | ---: | --- | ---"
    for each in result["runs"]:
        if "decode_holds" in each:
            measured, predicted, errors = each["measured"], each["predicted"], each["error_percent"]
            lanes = [name for name in errors if name.startswith("decode lane ")]
            worst = max(lanes, key=lambda name: abs(errors[name]))
            yield (
                f"{each['model']} | {each['policy']} | {each['batch_size']} by {each['micro_batch_size']} "
                f"| {measured['decode']:.3f} | {predicted['decode']:.3f} | {errors['decode']:+.1f} % "
                f"| {each['bar_percent']:.1f} % | {'yes' if each['decode_holds'] else 'no'} "
                f"| {worst.removeprefix('decode lane ')} {errors[worst]:+.1f} %"
            )


TABLES: dict[str, tuple[str, Rows]] = {
    "bars": ("fidelity", fidelity),
    "settings": ("fidelity", settings),
    "replays": ("fidelity", replays),
    "bare_replays": ("fidelity", partial(replays, error="bare_replay_error_percent")),
    "ranks": ("fidelity", ranks),
    "predictions": ("prediction", predictions),
    "memory": ("peak_memory", peak_memory),
    "all-reduce": ("all_reduce", all_reduce),
}


if __name__ == "__main__":
    main()
