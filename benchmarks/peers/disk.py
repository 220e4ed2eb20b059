"""Decoding with weights on the disk: our steps against the time in which the disk gives their bytes.

Each request lies between two measurements of the disk: the same pages read into the same sort of memory, with nothing
else to do. The bytes of a step are those that the schedule fetched in it, in whole blocks of the disk. The first decode
step finds pages that prefill fetched, and the last fetches none ahead: they do not count. Policies that do not fit are
left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.comparison import Case
from benchmarks.peers.protocol import Message, PeerFailed
from benchmarks.peers.rounds import Field, wait_for_quiet
from benchmarks.record.benchmark import progress
from benchmarks.shared.decoding import Model
from benchmarks.shared.disk_rate import disk_rate

CASES = (Case(16, 16, 9), Case(1, 16, 9))
COUNTED = slice(2, -1)
"""Of the steps, of which prefill is the first."""


def against_disk(field: Field, folder: Path, cases: Sequence[Case], rounds: int) -> dict[str, Any]:
    """By request and policy, the median of our step over (bytes read / disk bandwidth)."""
    model = Model.opened(folder)
    found: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    with disk_rate(model) as disk:
        before = disk.gbs()
        for _ in range(rounds):
            for case, contestant in product(cases, field.contestants()):
                wait_for_quiet(field.patience)
                request = case.request(model.checkpoint.config.vocabulary)
                try:
                    answer = field.ask(contestant, {**request, "count_bytes": True})
                except PeerFailed as reason:
                    progress.print(f"{case.name}: {contestant.setting} is left out: {reason}", soft_wrap=True)
                    continue
                after = disk.gbs()
                figures = beside_the_disk(answer, (before + after) / 2)
                found[case.name][contestant.setting].append(figures)
                progress.print(f"{case.name}: {contestant.setting} {figures}", soft_wrap=True)
                before = after
    return {
        name: {
            policy: {**{key: median(run[key] for run in runs) for key in runs[0]}, "runs": runs}
            for policy, runs in policies.items()
        }
        for name, policies in found.items()
    }


def beside_the_disk(answer: Message, disk_gbs: float) -> dict[str, float]:
    """A request's steps over the time in which the disk gives their bytes."""
    seconds = [answer["prefill_seconds"], *answer["step_seconds"]][COUNTED]
    return {
        "step_seconds": median(seconds),
        "disk_gbs": disk_gbs,
        "over_disk": sum(seconds) * disk_gbs * 1e9 / sum(answer["read_bytes"][COUNTED]),
        "other_cores": answer["other_cores"],
    }
