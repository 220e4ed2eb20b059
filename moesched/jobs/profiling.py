"""Profiling: a real run over calibration data that records every router's choices."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.inputs.options import WeightsOptions
from moesched.inputs.prompts import encode_prompts
from moesched.inputs.tokenizer import open_model
from moesched.jobs.device_listener import RoutingListener
from moesched.jobs.options import ProbeOptions, ProfilingOptions
from moesched.jobs.report import require_complete
from moesched.jobs.session import run_model
from moesched.keywords import takes
from moesched.options import part_of
from moesched.routing.checks import routed_layers
from moesched.routing.recorder import RoutingRecorder
from moesched.routing.trace import RoutingTrace
from moesched.system.cells import counted_in_cell
from moesched.system.own_loop import interruptible


class Profiled(NamedTuple):
    """The routing trace of a profiling run; after Ctrl-C, the trace up to then, and `interrupted` is True."""

    trace: RoutingTrace
    interrupted: bool


@takes(ProfilingOptions)
@interruptible()
def profile_routing(given: ProfilingOptions) -> Profiled:
    """Run prompts through a model, and record the experts that each token of prompts and generated text chooses.

    Raises the errors of `moesched.run_model`.
    """
    checkpoint, tokenizer = open_model(Path(given.model))
    config = checkpoint.config
    if config.routed.experts == 1:
        raise BadInput(
            f"model {config.name} has one expert in a layer and no router: nothing is chosen there"
        )
    encoded = encode_prompts(given.prompts, tokenizer, config, given.max_new_tokens)
    lengths = list(map(len, encoded))
    most = len(routed_layers(config)) * (sum(lengths) + len(lengths) * (given.max_new_tokens - 1))
    recorder = RoutingRecorder(config, given.progress or counted_in_cell("choices of experts"), most)
    report = run_model(
        prompts=encoded,
        max_new_tokens=given.max_new_tokens,
        listener=RoutingListener(recorder),
        **part_of(given, ProbeOptions, WeightsOptions),
    )
    require_complete(report)
    # The last token of a request is sampled and never routed.
    routed = [
        length + max(0, len(tokens) - 1) for length, tokens in zip(lengths, report.tokens or [], strict=True)
    ]
    return Profiled(recorder.trace(routed, lengths), report.interrupted)
