"""moesched itself, as a process that stays: the same requests as the others get.

    python -m peers.moesched_peer MODEL [BYTES]

BYTES is the host's budget; by default everything fits.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.protocol import Answer, Message, serve
from benchmarks.shared.decoding import Model, Uses
from moesched import plugins
from moesched.devices.torch.device import TorchDevice
from moesched.machines.local import local_machine
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run


def load() -> tuple[Answer, Message]:
    """A device that keeps the weights that stay; it is made by the first request."""
    model = Model.opened(Path(sys.argv[1]))
    budgets = {"host": int(sys.argv[2]) if sys.argv[2:] else 4 * model.weight_bytes}

    @cache
    def device(direct: bool) -> TorchDevice:
        return TorchDevice(model.checkpoint, model.layout, direct=direct)

    def generate(request: Message) -> Message:
        prompts, setting, uses = request["prompts"], request["setting"], Uses()
        policy, chosen = plugins.make_policy(setting["policy"], {}), device(setting["direct"])
        micro_batch = min(len(prompts), setting["micro_batch"])
        batch = split_batch([len(prompt) for prompt in prompts], request["new_tokens"], micro_batch)
        plan = plan_run(local_machine(), model.layout, batch, policy, budgets, chosen.slot_bytes)
        observers = [uses] if request.get("count_bytes") else []
        report = run(plan, policy, chosen, prompts, observers=observers, keep_open=True)
        steps = range(request["new_tokens"])
        pages = [[page.nbytes for page in model.layout.pages if uses.touched(step, page)] for step in steps]
        counted = {
            "touched_bytes": [model.head_bytes + sum(each) for each in pages],
            "read_bytes": [sum(map(chosen.bytes_to_read, uses.fetched[step])) for step in steps],
        }
        return {
            "prefill_seconds": report.step_seconds[0],
            "step_seconds": report.step_seconds[1:],
            "tokens": report.tokens,
            **(counted if observers else {}),
        }

    return generate, {"versions": {name: version(name) for name in ("moesched", "torch")}}


if __name__ == "__main__":
    serve(load)
