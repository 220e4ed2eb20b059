"""The machine of the emulated accelerator: the shipped T4 with lower rates."""

from __future__ import annotations

import msgspec

from moesched.machines import Machine, Tier, load_machine
from moesched.machines.staging import staged

SLOWED, HOST_SLOWED, LAUNCH_SLOWED = 100, 25, 40
"""By how much the emulated machine is slower than a T4: its rates, its host's besides, and the start of anything.

The last keeps time from being dilated a hundred times, since starting a product takes this machine some 100 µs.
"""


def slow_t4() -> Machine:
    """The shipped T4, staged, with rates that are to small models what a T4's are to large ones.

    Its host is slower still, so that attention over a few tokens takes what attention over many takes there.
    """
    t4 = staged(load_machine("t4"), "16GB", ring=False)

    def slower(memory: str) -> float:
        return SLOWED * HOST_SLOWED if memory == "host" else SLOWED

    return msgspec.structs.replace(
        t4,
        name="slow-t4",
        description=f"t4 with rates {SLOWED} times lower, its host's {SLOWED * HOST_SLOWED} times",
        processors={
            name: msgspec.structs.replace(
                each,
                flops={dtype: rate / slower(each.memory) for dtype, rate in each.flops.items()},
                launch_seconds=each.launch_seconds * LAUNCH_SLOWED,
            )
            for name, each in t4.processors.items()
        },
        memories={
            name: Tier(capacity=each.capacity, bandwidth=each.bandwidth / slower(name))
            for name, each in t4.memories.items()
        },
        links=[
            msgspec.structs.replace(
                each, bandwidth=each.bandwidth / SLOWED, latency=each.latency * LAUNCH_SLOWED
            )
            for each in t4.links
        ],
    )
