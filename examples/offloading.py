"""Generate text with less and less memory for the weights: the text stays the same, and the disk is read instead.

    python examples/offloading.py

The policy `cgopipe` keeps the pages that fit, and streams the others through a buffer. The budget counts weights, KV
cache and buffers, not Python and its libraries.
"""

from __future__ import annotations

from pathlib import Path

import moesched
from moesched.units import format_bytes

HERE = Path(__file__).parent
PROMPTS = ["Return the", "Raise an error if"]
BUDGETS = ("32MB", "24MB", "20MB", "16MB")
TOKENS = 12


def main() -> None:
    """Run the same prompts under each budget."""
    texts = set()
    print(f"{'budget':>8} {'peak':>9} {'pages that stay':>16} {'read from disk':>15}")
    for budget in BUDGETS:
        report = moesched.run_model(
            HERE / "tiny-mixtral",
            PROMPTS,
            policy="cgopipe",
            batch_size=2,
            max_new_tokens=TOKENS,
            dtype="float32",
            budgets={"host": budget},
        )
        plan = report.plan
        stay = f"{plan.resident_pages} of {plan.resident_pages + plan.streamed_pages}"
        peak, read = format_bytes(report.peak_bytes["host"]), format_bytes(report.bytes_read or 0)
        print(f"{budget:>8} {peak:>9} {stay:>16} {read:>15}")
        texts.add(tuple(report.text or ()))
    print("the same text each time" if len(texts) == 1 else "THE TEXTS DIFFER")
    for prompt, text in zip(PROMPTS, texts.pop(), strict=True):
        print(f"{prompt!r} continues: {text!r}")


if __name__ == "__main__":
    main()
