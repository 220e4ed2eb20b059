"""Run a policy of forty lines on the small model that ships, and compare it with two that ship.

    python examples/custom_policy.py

Every policy generates the same tokens; they differ in what they read, and when.
"""

from __future__ import annotations

from pathlib import Path

import moesched

HERE = Path(__file__).parent
PROMPTS = ["Return the", "Raise an error if"]
POLICIES = {
    "resident": "resident",
    "layer_streaming": "layer_streaming",
    "on_demand": "on_demand:OnDemand",
}


def main() -> None:
    """Run each policy under the same small budget and print what it did."""
    reports = {}
    for name, where in POLICIES.items():
        budget = "100MB" if name == "resident" else "18MB"
        reports[name] = moesched.run_model(
            HERE / "tiny-mixtral",
            PROMPTS,
            policy=where,
            max_new_tokens=24,
            dtype="float32",
            budgets={"host": budget},
        )
    expected = reports["resident"].tokens
    for name, report in reports.items():
        kinds = {kind.kind: kind.tasks for kind in report.kinds}
        same = "the same tokens" if report.tokens == expected else "OTHER TOKENS"
        print(
            f"{name}: {same}, {kinds.get('fetch', 0)} fetches, {kinds.get('run_expert', 0)} experts on their own"
        )
    for prompt, text in zip(PROMPTS, reports["resident"].text or [], strict=True):
        print(f"{prompt!r} continues: {text!r}")


if __name__ == "__main__":
    main()
