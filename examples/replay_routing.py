"""Record the experts that a model's tokens choose, and replay them on the virtual clock.

    python examples/replay_routing.py

A cache of experts finds more of them with real text than with random choices: some experts are popular, and
neighbouring tokens choose alike. `moesched simulate --routing FILE` replays such a file, also one of vLLM or Megatron
(docs/routing.md).
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import moesched
from moesched.routing.trace import write_routing_trace

MODEL = Path(__file__).parent / "tiny-mixtral"
PROMPTS = [
    "Return the number of items in the list.",
    "Raise an error if the file does not exist, and close it.",
]
TOKENS = 24


def main() -> None:
    """Record, save, replay."""
    trace = moesched.profile_routing(MODEL, PROMPTS, max_new_tokens=TOKENS, dtype="float32").trace
    counts = trace.profile().counts[0]
    print(f"{sum(trace.request_tokens)} tokens; those of each expert in layer 0:", *counts)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "routing.npz"
        write_routing_trace(trace, file)
        for routing in ("uniform", str(file)):
            report = moesched.simulate_model(
                MODEL,
                machine="t4",
                policy="lru_offload",
                settings={"offload_per_layer": 4, "buffers": 1},
                workload=moesched.given_lengths(trace.prompt_tokens.tolist(), TOKENS),
                routing=routing,
                batch_size=1,
            )
            (pool,) = report.pools
            name = "the trace" if routing == str(file) else routing
            print(
                f"{name:<9} {pool.hits / (pool.hits + pool.misses):.0%} of the uses find their expert in the cache"
            )


if __name__ == "__main__":
    main()
