"""Profiling: a real run over calibration data that records every router's choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

from moesched.errors import BadInput
from moesched.inputs.chosen_policy import PolicyGiven
from moesched.inputs.defaults import MACHINE, NEW_TOKENS, PROFILING_POLICY
from moesched.inputs.options import options_from, part_of, takes
from moesched.inputs.prompts import Prompt, encode_prompts
from moesched.inputs.tokenizer import find_tokenizer
from moesched.jobs.device_listener import RoutingListener
from moesched.jobs.options import ProfilingKeywords, ProfilingOptions
from moesched.jobs.report import require_complete
from moesched.jobs.run_model import run_model
from moesched.machines import Machine
from moesched.models.reading import read_config
from moesched.routing.recorder import RoutingRecorder
from moesched.routing.trace import RoutingTrace
from moesched.system.cells import counted_in_cell
from moesched.system.own_loop import interruptible


class Profiled(NamedTuple):
    """The trace of a profiling run; if it was interrupted, up to Ctrl-C."""

    trace: RoutingTrace
    interrupted: bool


@takes(ProfilingOptions)
@interruptible()
def profile_routing(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    policy: PolicyGiven = PROFILING_POLICY,
    machine: Machine | str = MACHINE,
    max_new_tokens: int = NEW_TOKENS,
    progress: Callable[[int, int], object] | None = None,
    **options: Unpack[ProfilingKeywords],
) -> Profiled:
    """Run prompts through a model and record the experts that each token chooses, prompt tokens and generated ones.

    Args:
        model: a Hugging Face folder.
        prompts: texts, or token ids.
        policy: as `run_model` takes it; all make the same choices.
        machine: "auto" for this one, a name of `moesched list machines`, a TOML file, or a Machine.
        max_new_tokens: tokens to generate for each prompt, at most; they are recorded too.
        progress: called with the number of choices so far (tokens times layers) and the largest possible number.

    Raises the errors of `moesched.run_model`.
    """
    given = options_from(ProfilingOptions, "profile_routing", options, policy=policy, machine=machine)
    config = read_config(model)
    if config.routed.experts == 1:
        raise BadInput(
            f"model {config.name} has one expert in a layer and no router: nothing is chosen there"
        )
    encoded = encode_prompts(prompts, find_tokenizer(Path(model)), config, max_new_tokens)
    lengths = list(map(len, encoded))
    most = config.layers * (sum(lengths) + len(lengths) * (max_new_tokens - 1))
    recorder = RoutingRecorder(config, progress or counted_in_cell("choices of experts"), most)
    report = run_model(
        model,
        encoded,
        max_new_tokens=max_new_tokens,
        listener=RoutingListener(recorder),
        **part_of(given, ProfilingOptions),
    )
    require_complete(report)
    # The last token of a request is sampled and never routed.
    routed = [
        length + max(0, len(tokens) - 1) for length, tokens in zip(lengths, report.tokens or [], strict=True)
    ]
    return Profiled(recorder.trace(routed, lengths), report.interrupted)
