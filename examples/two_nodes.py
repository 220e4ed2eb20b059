"""Two nodes share a model's experts, as two machines would: two processes, connected by encrypted ZeroMQ.

    python examples/two_nodes.py [--out FOLDER]

Each node loads half of the experts and everything that every token needs; once per layer, the nodes add up the
outputs of their experts. The tokens are those of one process, and one trace shows both nodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import moesched

HERE = Path(__file__).parent
PROMPTS = ["Return the", "Raise an error if"]


def main() -> None:
    """Run one process and two nodes, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "two-nodes")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    shared: dict[str, Any] = {"max_new_tokens": 16, "dtype": "float32", "batch_size": 2}
    model = HERE / "tiny-mixtral"
    alone = moesched.run_model(model, PROMPTS, policy="resident", **shared)
    trace = out / "two-nodes.json"
    report = moesched.run_local(model, PROMPTS, nodes=2, policy="ep_router_aided", trace=trace, **shared)

    whole = alone.peak_bytes["host"]
    for member in report.members:
        share = member.peak_bytes["host"] / whole
        print(f"node {member.rank} takes {100 * share:.0f} % of the memory that one process takes")
    ranks = {each.lane.rank for each in moesched.read_trace(trace).recording.slices}
    problems = moesched.check_trace(trace)
    print(f"the trace shows nodes {' and '.join(map(str, sorted(ranks)))}, and has {len(problems)} problems")
    print("the same tokens" if report.tokens == alone.tokens else "OTHER TOKENS")
    for prompt, text in zip(PROMPTS, report.text or [], strict=True):
        print(f"{prompt!r} continues: {text!r}")


if __name__ == "__main__":
    main()
