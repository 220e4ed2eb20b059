"""Deliberately damaged policies. None may end with wrong tokens, or hang.

One verb call is dropped, repeated or swapped; or the policy changes what it sees, calls verbs on another thread or of a
step that is over, or raises SystemExit. Each shipped policy, damaged at a random call, runs on real threads with a
small random model on the CPU (half of them on a machine with one memory, half with an accelerator's memory beside the
host's) and on the virtual clock of the t4 profile, staged, on symbols. It must raise an error at the policy's own line
or, where the damage does no harm (two calls that commute were swapped), end with exactly the right tokens.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.robustness._damage import MEANINGS, NONE, Damaged, End, choose_damage, end_of
from benchmarks.shared.small_runs import ONE_MEMORY, TWO_MEMORIES, generate
from benchmarks.shared.within import Stuck, within
from moesched.devices.torch.device import TorchDevice
from moesched.machines import Machine, load_machine
from moesched.machines.staging import staged
from moesched.machines.sustained import at_peak
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.seams import Policy
from moesched.testing import Case, run_on_symbols

STUCK_AFTER_SECONDS = 60.0
POLICIES = (
    "resident",
    "layer_streaming",
    "cgopipe",
    "flexgen",
    "twiddler",
    "lru_offload",
    "expert_cache",
    "prefetch_gate",
    "adversarial",
    "adversarial",
)
PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5, 6, 7], [60], [11, 12]]
NEW_TOKENS = 3
MICRO_BATCH = 2

MODEL = SHAPES["mixtral-0.8b"].varied(
    layers=3, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, experts=4, vocabulary=64,
    stop_tokens=(), dtype="float32",
)  # fmt: skip

MACHINES = (ONE_MEMORY, TWO_MEMORIES)
CLOCKS = ("real threads", "virtual clock")


def claims(result: Result) -> Iterator[Claim]:
    """Policies with a wrong call, or that change what they see."""
    total = sum(count for ends in result["ends"].values() for count in ends.values())
    yield none_of("damaged policies that end with wrong tokens or hang", len(result["problems"]), total)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=CLOCKS,
    rounds=2500,
    rounds_help="damaged policies, one by seed",
    by_machine=False,
)
BENCHMARK.parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")


class Bench:
    """Runs damaged policies on a model in a folder, and compares what comes out with an undamaged run."""

    def __init__(self, folder: Path) -> None:
        write_random_model(MODEL, folder / "model", seed=1, dtype="float32")
        self._checkpoint: Checkpoint = open_checkpoint(folder / "model")
        self._calls: dict[Any, list[str]] = {}
        self._expected = [self._generate(make_policy("resident"), machine) for machine in MACHINES]

    def end(self, seed: int, *, real: bool) -> tuple[str, Damaged, End]:
        """The policy and the damage that a seed stands for, and how a run of it ends."""
        choose = Random(seed)
        name = choose.choice(POLICIES)
        settings = {"seed": choose.randrange(20)} if name == "adversarial" else {}
        machine = choose.randrange(2)
        damage = choose_damage(choose, self.calls(name, settings, machine, real=real))
        damaged = Damaged(make_policy(name, settings), damage)
        return name, damaged, self.run(damaged, machine, real=real)

    def run(self, damaged: Damaged, machine: int, *, real: bool) -> End:
        """Run a damaged policy on one of the machines."""
        try:
            return within(
                STUCK_AFTER_SECONDS, lambda: end_of(damaged, lambda: self._right(damaged, machine, real=real))
            )
        except Stuck as error:
            return End("stuck", str(error))

    def calls(self, name: str, settings: dict[str, int], machine: int, *, real: bool) -> list[str]:
        """The verb calls that a policy makes undamaged."""
        key = (name, tuple(settings.items()), machine, real)
        if key not in self._calls:
            counter = Damaged(make_policy(name, settings), NONE)
            if not self._right(counter, machine, real=real):
                raise AssertionError(f"{name} {settings} gives wrong tokens undamaged")
            self._calls[key] = counter.calls
        return self._calls[key]

    def _right(self, policy: Policy, machine: int, *, real: bool) -> bool:
        """Run a policy, and say whether the tokens are those of the model (and, on real tensors, the logits)."""
        if real:
            return self._generate(policy, MACHINES[machine]) == self._expected[machine]
        weights = 1.2 if resident(policy) else 0.9
        case = Case(
            name="damaged",
            machine=at_peak(staged(load_machine("t4"), "16GB")),
            layers=4,
            weights=weights,
            new_tokens=NEW_TOKENS,
        )
        ended = run_on_symbols(policy, case.plan(policy))
        return ended.tokens == ended.expected

    def _generate(self, policy: Policy, machine: Machine) -> tuple[Any, list[list[list[float]]]]:
        """Tokens, and the logits of every step in the order of the requests."""
        device = TorchDevice(self._checkpoint, weight_layout(MODEL), keep_logits=True)
        generated = generate(
            device,
            policy,
            machine,
            PROMPTS,
            new_tokens=NEW_TOKENS,
            micro_batch_size=MICRO_BATCH,
            weights=2.0 if resident(policy) else 0.8,
        )
        return generated.tokens, generated.logits_RSV.tolist()


def resident(policy: Policy) -> bool:
    """Test whether a policy, damaged or not, needs room for all weights."""
    return type(policy.policy if isinstance(policy, Damaged) else policy).__name__ == "Resident"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    started = time.perf_counter()
    ends: dict[str, Counter[str]] = {clock: Counter() for clock in options.only}
    by_kind: Counter[str] = Counter()
    by_verb: Counter[str] = Counter()
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for seed in track(range(options.first, options.first + options.rounds), "damaged policies"):
            for clock in options.only:
                name, damaged, end = bench.end(seed, real=clock == "real threads")
                ends[clock][end.how] += 1
                by_kind[f"{damaged.damage.kind}: {end.how}"] += 1
                if end.how == "harmless":
                    by_verb[f"{damaged.damage.kind} {damaged.struck}"] += 1
                elif not end.well:
                    problems.append(
                        f"seed {seed} on {clock}: {name}, {damaged.damage} of {damaged.struck}: {end}"
                    )
    figures: dict[str, Any] = {
        "policies": options.rounds,
        "first_seed": options.first,
        "seconds": round(time.perf_counter() - started, 1),
        "kinds": MEANINGS,
        "ends": {clock: dict(counted) for clock, counted in ends.items()},
        "ends_by_kind": dict(sorted(by_kind.items())),
        "harmless": dict(sorted(by_verb.items())),
        "problems": problems[:20],
    }
    return BENCHMARK.write(figures)


if __name__ == "__main__":
    sys.exit(main())
