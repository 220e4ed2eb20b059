"""Let the CPU compute, too: Mixtral 8x7B on a modelled T4, whose 16 GB hold a sixth of the weights.

    python examples/cpu_and_gpu.py

An expert that is not on the GPU can be moved there, which takes equally long for any number of tokens, or run on the
CPU, which takes longer the more tokens it has. So the CPU pays for few tokens, and moving for many. Figures are
predictions on the virtual clock.
"""

from __future__ import annotations

import moesched
from moesched.units import format_seconds

MACHINE = "t4"
POLICIES = {
    "lru_offload": "missing experts are moved",
    "cpu_ffn": "all experts run on the CPU",
    "twiddler": "whichever is faster, expert by expert",
    "expert_cache": "whichever ends the layer sooner; moved ones are kept",
}
BATCHES = (1, 32, 512)


def main() -> None:
    """Print the decode rate of each policy for few and for many requests."""
    print(f"{'tokens/s with':<24}" + "".join(f"{batch:>8,}" for batch in BATCHES) + " requests")
    for policy, does in POLICIES.items():
        rates = [predicted(policy, batch).decode_tokens_per_second for batch in BATCHES]
        print(f"{policy:<24}" + "".join(f"{rate:>8.1f}" for rate in rates) + f" {does}")
    alone, together = predicted("twiddler", BATCHES[0]), predicted("twiddler", BATCHES[-1])
    for report, batch in ((alone, BATCHES[0]), (together, BATCHES[-1])):
        experts = [kind for kind in report.kinds if kind.kind == "run_expert"]
        total = sum(kind.tasks for kind in experts)
        there = sum(kind.tasks for kind in experts if kind.lane == "host")
        step = format_seconds(report.step_seconds[-1])
        print(
            f"twiddler, batch {batch:,}: {there / total:.0%} of the experts run on the CPU; a step takes {step}"
        )


def predicted(policy: str, batch: int) -> moesched.JobReport:
    """Simulate a policy."""
    return moesched.simulate_model(
        "mixtral-8x7b",
        machine=MACHINE,
        policy=policy,
        workload=moesched.given_lengths([32], 4),
        requests=batch,
        batch_size=batch,
        micro_batch_size=min(batch, 128),
        routing="popularity",
        band=False,
    )


if __name__ == "__main__":
    main()
